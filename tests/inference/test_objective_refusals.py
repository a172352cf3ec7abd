"""What objectives, annealing, calibration and starts cannot take is refused in one line."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import RenyiELBO
from small_entries import check_refused, images_for, small_entry
from small_rbms import binary_images
from small_rbms import small as small_rbm
from torch import Tensor
from toys import Conjugate, LinearGuide, NoGuide, PointGuide, conjugate_images, pair

from capsule_zoo import models
from capsule_zoo.data import Shifts
from capsule_zoo.data.points import SHAPES, draw_scenes
from capsule_zoo.guides import FreeForm, RecognitionMachine
from capsule_zoo.guides.per_image.site_laws import UnservedSite
from capsule_zoo.inference import (
    ContrastiveDivergence,
    ImportanceWeightedELBO,
    IncompatibleGuide,
    Objective,
    ReweightedWakeSleep,
    StackedCapsuleObjective,
    WakeSleep,
    evaluate,
    log_partition,
    loss_per_image,
)
from capsule_zoo.inference.annealing import annealed_bounds, annealed_log_likelihood
from capsule_zoo.inference.annealing.exceedance import exceedances
from capsule_zoo.inference.calibration import check_calibration, rank_uniformity
from capsule_zoo.inference.energy.pretrain import pretrain
from capsule_zoo.inference.objectives.score_function import ScoreFunctionELBO
from capsule_zoo.inference.objectives.thermodynamic import ThermodynamicObjective
from capsule_zoo.inference.posterior.fitted import auto_normal
from capsule_zoo.inference.references import load_reference
from capsule_zoo.inference.top_prior import fit_top_prior
from capsule_zoo.inference.training.starts.template_learning import learn_templates
from capsule_zoo.inference.transformations import infer_transformation


def on(name: str, call, *arguments, guide: str | None = None, **settings):
    """Return what a verb makes of an entry, of three images and of further arguments."""
    entry = small_entry(name, guide)
    return call(entry.model, entry.guide, images_for(entry), *arguments, **settings)


def toys(call, *arguments, **settings):
    """Return what a verb makes of the linear pair, of three images and of further arguments."""
    return call(*pair(), conjugate_images(3), *arguments, **settings)


def annealed(guide=LinearGuide, images=None, **settings):
    model = pair()[0]
    how = dict(temperatures=3, leapfrogs=2, pilot_chains=2)
    guide = guide(model).double() if isinstance(guide, type) else guide
    images = conjugate_images(2) if images is None else images
    return annealed_log_likelihood(model, guide, images, **how | settings)


class Counted(Conjugate):
    """A model of a site that cannot move."""

    def code(self) -> Tensor:
        return pyro.sample("count", dist.Poisson(torch.tensor(2.0).double()))


class Returns(Objective):
    """An objective whose loss is what it is made with."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.loss_of = loss

    def differentiable_loss(self, model, guide, *args, **kwargs):
        return self.loss_of


def toy_images(number: int = 3) -> Tensor:
    return conjugate_images(number)


def taught(points: Tensor | None = None, present=None, sigma: float = 0.1, **settings) -> None:
    lines = [torch.arange(2.0 * n).reshape(n, 2) for n in (4, 3)]
    model = models.Constellations(lines, sigma=sigma).double()
    learn_templates(model, POINTS if points is None else points, present, **settings)


def stacked(**weights):
    return StackedCapsuleObjective(**weights)


def top_prior(values: dict, components: int = 2, name: str = "part-whole") -> None:
    fit_top_prior(small_entry(name).model, values, components=components)


def asked(images=None, grid=None, **settings) -> None:
    entry = small_entry("conditional-autoencoder")
    images = images_for(entry) if images is None else images
    grid = torch.zeros(2, 2) if grid is None else grid
    infer_transformation(entry.model, entry.guide, images, Shifts(), grid=grid, **settings)


def restored(**values) -> None:
    problem = load_reference("generative-capsnet")
    for name, value in values.items():
        getattr(problem, name)(value)


POINTS = draw_scenes(
    10, 0.1, templates=[SHAPES["square"], SHAPES["triangle"]], seed=9
).points.double()
THERE = ~POINTS[..., 0].isnan()
REFUSALS = [
    # annealing and partition functions
    (lambda: annealed(chains=0), "chains must be at least 1"),
    (lambda: annealed(temperatures=1), "temperatures must be at least 2"),
    (lambda: annealed(prior_share=1.0), "prior_share must be from 0"),
    (lambda: annealed(PointGuide), "points at code.*widen"),
    (lambda: annealed({}), "guide is empty; give guides by name"),
    (lambda: annealed({"prior": None}), "guide 'prior' is not a guide; leave it out"),
    (
        lambda: annealed(FreeForm(pair()[0], toy_images(2), law="normal"), toy_images(2)),
        "belong to its own images.*simulated=0",
    ),
    (lambda: on("capsule-rbm", annealed_log_likelihood), "log_partition"),
    (
        lambda: annealed_log_likelihood(Counted().double(), None, toy_images()),
        "site 'count'.*Poisson.*cannot move",
        UnservedSite,
    ),
    (lambda: annealed_bounds(toys(evaluate, num_particles=2)), "not an annealing"),
    (
        lambda: exceedances((np.zeros(3), np.zeros(3)), {"exact": (np.zeros(2), np.zeros(2))}),
        r"'exact' was evaluated on 2 images, but 3 were annealed",
    ),
    (lambda: log_partition(small_rbm(), "reverse"), "method must be one of 'exact', 'ais', 'raise"),
    (lambda: log_partition(small_rbm(), "raise"), "needs images to start from"),
    (lambda: log_partition(small_rbm(), "ais", chains=0), "chains must be at least 1"),
    (lambda: log_partition(models.CapsuleRBM(36, 2, 16)), r"at most 2\^25 states"),
    (lambda: log_partition(small_rbm("poisson", "poisson")), r"at most 2\^25 states"),
    # objectives
    *(
        (lambda kind=kind, number=number: kind(number), words)
        for kind in (ImportanceWeightedELBO, ReweightedWakeSleep, ScoreFunctionELBO)
        for number, words in ((0, "num_particles must be at least"), (2.5, "must be a whole numb"))
    ),
    (lambda: ScoreFunctionELBO(1), "num_particles must be at least 2"),
    (lambda: ImportanceWeightedELBO(alpha=-1), "alpha must be at least 0, not -1"),
    (lambda: ReweightedWakeSleep(sleep=-1), "sleep must be from 0 to 1, not -1"),
    (lambda: toys(WakeSleep().loss), "needs a model that names its top_sites, and Conjugate"),
    (lambda: ThermodynamicObjective(num_particles=1), "num_particles"),
    (lambda: ThermodynamicObjective(intervals=0), "intervals"),
    (lambda: ThermodynamicObjective(first=1.0), "first"),
    (lambda: ContrastiveDivergence(sparsity=-1), "sparsity must be at least 0, not -1"),
    (lambda: ContrastiveDivergence(k=0), "k must be at least 1"),
    (lambda: ContrastiveDivergence(chains=0), "chains must be at least 1"),
    (lambda: ContrastiveDivergence(tempering=(1, 0.5)), "tempering needs persistent=True"),
    *(
        (
            lambda levels=levels: ContrastiveDivergence(tempering=levels, persistent=True),
            "tempering must be 1 and then falling",
        )
        for levels in ((0.9, 0.5), (1, 1), (1,))
    ),
    (
        lambda: toys(ContrastiveDivergence().loss),
        "needs a CapsuleRBM or an RBM as model, not a Conjugate",
    ),
    (
        lambda: ContrastiveDivergence().loss(small_rbm(), LinearGuide(pair()[0]), binary_images()),
        "needs a guide with a free energy in closed form",
    ),
    (
        lambda: stacked().terms(small_entry("vae").model, None, torch.rand(2, 1, 8, 8)),
        "model must be a StackedCapsuleAutoencoder",
    ),
    (lambda: stacked(prior_within=-1.0), "prior_within must be at least 0"),
    (lambda: stacked(noise="normal"), "noise must be one of"),
    (lambda: stacked(present=0.0), "present must be positive"),
    (lambda: stacked(noise=0.0), "noise must be positive"),
    (
        lambda: loss_per_image(RenyiELBO(), *pair(), toy_images()),
        "RenyiELBO offers no differentiable_loss",
    ),
    *(
        (
            lambda loss=loss: loss_per_image(Returns(loss), *pair(), toy_images(6)),
            f"differentiable_loss of Returns must return a scalar tensor, .*, not {form}$",
        )
        for loss, form in ((torch.zeros(6), r"\(6,\)"), (0.5, "float"), (None, "NoneType"))
    ),
    (
        lambda: pretrain(
            (
                m := models.CapsuleHelmholtzMachine(
                    4, (2, 2), 2, visible_family="poisson", hidden_family="gaussian"
                )
            ),
            RecognitionMachine(m),
            binary_images(6).float(),
            steps=1,
        ),
        "may not be one Gaussian and one Poisson",
    ),
    # calibration, references and priors
    (
        lambda: rank_uniformity(torch.zeros(79, 1).long(), 31),
        "ranks hold 79 simulations, too few for 16 bins; give 80",
    ),
    (lambda: check_calibration(*pair(), number=79), "too few for 16 bins; give 80 or more"),
    (lambda: check_calibration(*pair(), draws=0), "draws"),
    (lambda: check_calibration(*pair(), 100, draws=3.5), "draws must be a whole number"),
    (
        lambda: check_calibration((e := small_entry("capsule-rbm")).model, e.guide),
        r"up to a constant only.*simulated=\(values, images\)",
    ),
    (
        lambda: check_calibration((m := pair()[0]), FreeForm(m, toy_images())),
        "parameters for certain images",
    ),
    (lambda: check_calibration((m := pair()[0]), NoGuide(m)), "missing", IncompatibleGuide),
    (lambda: load_reference("constelation"), "unknown reference problem 'constelation'; there are"),
    (
        lambda: restored(log_prob=torch.zeros(3, 7)),
        r"vectors \(..., 8\) for 'generative-capsnet', not \(3, 7\)",
    ),
    (lambda: restored(score=torch.zeros(8)), r"must be \(draws, 8\)"),
    (lambda: restored(score=torch.full((3, 8), torch.nan)), "NaN or infinite"),
    (lambda: restored(vector={"object_pose": torch.zeros(2, 2)}), r"lacks .'part_jitter'."),
    (lambda: load_reference("constellation").score(torch.zeros(1, 8), num_draws=1), "num_draws"),
    (lambda: top_prior({"wing_pose": torch.zeros(5, 2)}), r"values hold \['wing_pose'\]"),
    (lambda: top_prior({"object_pose": torch.zeros(5, 2, 6)}, 0), "components"),
    (lambda: top_prior({"object_pose": torch.zeros(20, 2, 6)}, 30), "fewer than components=30"),
    (  # its whole numbers once passed for binary ones
        lambda: top_prior({"object_kind": torch.arange(20) % 3}, name="shape-codes"),
        "'object_kind', a choice; leave it out",
    ),
    (
        lambda: auto_normal(
            (m := models.CapsuleHelmholtzMachine((1, 2, 2), (2,), 2)),
            RecognitionMachine(m),
            torch.rand(2, 1, 2, 2),
            steps=1,
            seed=0,
        ),
        r"capsule1_switch, capsule1_hidden.*free_form",
        UnservedSite,
    ),
    (
        lambda: small_entry("vae").fit_guide("freeform", torch.rand(2, 1, 5, 6)),
        "unknown general guide 'freeform'; did you mean 'free",
    ),
    # transformations and templates
    (lambda: asked(grid=torch.zeros(5)), r"grid must be \(G, 2\), not \(5, 1\)"),
    (lambda: asked(starts=0), "starts must be at least 1"),
    (lambda: asked(torch.rand(2, 1, 3, 3)), r"images must be \(B, 1, 5, 6\)"),
    (lambda: taught(POINTS[0]), r"points\[None\]"),
    (lambda: taught(present=THERE[:, :5]), r"present must be \(10, 7\)"),
    (lambda: taught(present=torch.ones_like(THERE)), "set present to 0"),
    (lambda: taught(POINTS[:, :1]), "fewer than two"),
    (lambda: taught(largest=3), "at most largest=3 points"),
    (lambda: taught(starts=0), "starts"),
    (lambda: taught(steps=-1), "steps"),
    (lambda: taught(sigma=0.0), "sigma above 0"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal[1])
def test_what_does_not_fit_is_refused(refusal):
    check_refused(*refusal)
