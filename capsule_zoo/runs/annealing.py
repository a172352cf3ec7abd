"""The log-likelihood of a trained entry from both sides, and the nats that its guide loses.

`capsule-zoo evaluate --method anneal` gives annealed bounds of a directed model, see
`inference.annealing`; the experiment `zoo/gaps` measures what each guide loses on these images.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from capsule_zoo.data import Dataset
from capsule_zoo.data.progress import announce
from capsule_zoo.entry import Entry
from capsule_zoo.inference import evaluate
from capsule_zoo.inference.annealing.path import AnnealedPath
from capsule_zoo.inference.examination.losses import measure_losses
from capsule_zoo.inference.posterior.fitted import SemiAmortized, fit_guide
from capsule_zoo.inference.posterior.gauss_newton import CLIMBING
from capsule_zoo.runs.measurements import (
    general_guides_of,
    refuse_without_bound,
    scoring_data,
    widen_guide,
)

WIDEN_STEPS = 200
REFINEMENT = 100  # refinement steps to the points of the Gauss-Newton distributions
MODES = 4  # points of the Gauss-Newton distributions for each image
STARTS = (
    "free_form",
    "corrected",
)  # general guides that may initialize chains, in addition to Gauss-Newton distributions
_LARGE = 512  # numbers of a code above which an image has one point, because of the cost


def anneal_run(
    entry: Entry, data: Dataset, *, particles: int = 100, **settings: Any
) -> dict[str, Any]:
    """Bound log p of test images from both sides by annealing, in nats per image.

    Chains start at Gauss-Newton distributions and move by their covariances. The distributions are
    at points refined from the entry's guide. Chains start at the guide itself if the distributions
    do not serve the model, or if the guide has a higher importance-weighted bound. A guide of
    points is widened first, on training images, for its own bounds.

    Args:
        particles: draws of the guide for its own bounds.
        settings: `images`, `seed`, `steps`, `refinement`, `progress` of `guide_losses`, and further
            arguments of `annealed_log_likelihood`.

    Returns:
        The numbers of `annealed_bounds`; the guide's elbo, iwae, ess and pareto_k on these images;
        and lost_elbo and lost_iwae, how far elbo and iwae lie under the annealed lower bound of
        an image. The guide loses at least this much, in expectation, and at most `gap` more.
        `warning` says where `lower` is below a guide's bound, and `remark` says where a few
        samples decide the guide's iwae.

    Raises:
        ValueError: an entry that gives no bound.
    """
    settings = {"simulated": 16, "particles": particles, "steps": WIDEN_STEPS, **settings}
    bounds, losses_by_guide = guide_losses(entry, data, (), **settings)
    return bounds | losses_by_guide["encoder"] | {"units": "nats per image"}


def guide_losses(
    entry: Entry,
    data: Dataset,
    names: Sequence[str],
    *,
    images: int,
    particles: int = 1000,
    group_size: int | None = None,
    steps: int = 200,
    seed: int = 0,
    refinement: int = REFINEMENT,
    modes: int = MODES,
    climbing: int = CLIMBING,
    progress: bool = False,
    **settings: Any,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Measure the nats per image that general guides and the entry's guide lose on test images.

    Args:
        names: general guides; those that do not serve the model, or give no bound, are left out.
            Chains start at the best of Gauss-Newton distributions, of the entry's own guide, and of
            those named here that have a density at given latents and can be fitted to simulated
            images.
        images: number of test images.
        particles: draws of every guide for its bounds.
        group_size: draws of one more bound, a divisor of `particles`.
        steps: updates of every general guide, and updates that widen a guide of points.
        refinement, modes, climbing: `steps`, `modes` and `climbing` of the Gauss-Newton
            distributions from which chains start. Codes of more than 512 numbers have one point,
            and no `mixture`.
        progress: show progress bars.
        settings: arguments of `annealed_log_likelihood`; none are simulated by default.

    Returns:
        The numbers of `annealed_bounds` with seconds; and the numbers of `measure_losses` by
        guide, the entry's own guide first as "encoder".

    Raises:
        ValueError: an entry that gives no bound.
    """
    refuse_without_bound(entry)
    data = scoring_data(entry, data)
    test = data.test[:images].to(next(entry.model.parameters()).device)
    guide = widen_guide(entry, entry.guide, data, steps, seed, progress) or entry.guide
    if AnnealedPath(entry.model.discretize(), None, test.images[:1]).columns > _LARGE:
        modes, names = 1, [name for name in names if name != "mixture"]
    options = dict(refinement=refinement, modes=modes, climbing=climbing, steps=steps, seed=seed)
    announce(f"finding where chains start, for {len(test)} images")
    guides: dict[str, Callable[[], nn.Module]] = {"encoder": lambda: guide}
    general, pair = general_guides_of(entry), entry.with_enumerated_presences
    for name in [name for name in names if name in general]:
        start = pair.model, pair.guide, test.images
        guides[name] = partial(fit_guide, name, *start, steps=steps, seed=seed)
    settings = {"simulated": 0, "progress": progress, **settings}
    starts = starts_of(entry, guide, test.images, names, **options)
    losses_by_guide = measure_losses(
        entry.model,
        starts,
        test,
        guides,
        particles=particles,
        group_size=group_size,
        seed=seed,
        **settings,
    )
    return losses_by_guide.bounds, losses_by_guide.rows


def starts_of(
    entry: Entry,
    guide: nn.Module,
    images: Tensor,
    names: Sequence[str],
    *,
    steps: int,
    seed: int,
    refinement: int,
    modes: int,
    climbing: int,
) -> dict[str, nn.Module]:
    """Return the guides that may initialize the chains, by name; see `annealed_log_likelihood`.

    The guides are `guide` itself as "encoder", Gauss-Newton distributions, and the guides of
    `STARTS` that are in `names`, serve the model and have a density.
    """
    newton = "gauss_newton" if modes == 1 else "mixture"
    settings = {name: dict(steps=steps) for name in STARTS if name in names}
    settings = {newton: dict(steps=refinement, modes=modes, climbing=climbing), **settings}
    general, dense = general_guides_of(entry), {}
    for name in [name for name in settings if name in general]:
        start = SemiAmortized(entry.guide, kind=name, seed=seed, **settings[name])
        points = evaluate(entry.model, start, images[:2], num_particles=1, draws=0)
        if not points.attrs["point_sites"]:
            dense[name] = start
    return {"encoder": guide, **dense}
