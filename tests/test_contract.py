"""The contract of every entry, with each of its guides: every registered entry is tested.

Entries are made at the small sizes that they were registered with. To add a model, see
CONTRIBUTING.md; nothing has to be added here.
"""

import copy
import functools
import json
import math
import pickle
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import ELBO, SVI, Predictive, RenyiELBO, Trace_ELBO
from pyro.infer.importance import psis_diagnostic, vectorized_importance_weights
from pyro.poutine.util import prune_subsample_sites
from variants import create, list_models, small_settings, takes_images

from capsule_zoo.inference import (
    Checks,
    check_pair,
    classify,
    compare,
    encode,
    evaluate,
    fit,
    loss_per_image,
    reconstruct,
)
from capsule_zoo.inference.annealing.path import ValueMessenger
from capsule_zoo.inference.check import is_discrete, latent_sites
from capsule_zoo.models import ImageSpace, Model
from capsule_zoo.models.specification import build, spec
from capsule_zoo.registry import Entry, load, save_entry

NAMES = list_models()
PAIRS = [(name, guide) for name in NAMES for guide in create(name, **small_settings(name)).guides]
BATCH = 5


def make(name: str, guide: str | None = None, seed: int = 0) -> Entry:
    pyro.set_rng_seed(seed)
    entry = create(name, **small_settings(name))
    return entry.use_guide(guide or entry.default_guide)


def images_for(entry: Entry, number: int = BATCH, dtype: torch.dtype = torch.float32):
    return entry.model.space.example(number, dtype, torch.Generator().manual_seed(1))


def labels_for(entry: Entry, number: int = BATCH) -> torch.Tensor | None:
    """Return labels for a model that learns from them."""
    return torch.arange(number) % 2 if entry.model.supervised else None


def loss_at(entry: Entry, images: torch.Tensor, seed: int = 2) -> torch.Tensor:
    """Return the training loss, nats per image, as a function of the seed."""
    torch.manual_seed(seed)
    labels = labels_for(entry, len(images))
    return loss_per_image(entry.objective, entry.model, entry.guide, images, labels)


def parameters_of(entry: Entry) -> dict[str, torch.nn.Parameter]:
    modules = {"model": entry.model, "guide": entry.guide}
    return {f"{k}.{n}": p for k, module in modules.items() for n, p in module.named_parameters()}


def values_of(entry: Entry) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in parameters_of(entry).items()}


def moved(entry: Entry, before: dict[str, torch.Tensor]) -> set[str]:
    return {n for n, p in parameters_of(entry).items() if not torch.equal(p.detach(), before[n])}


def svi_steps(entry: Entry, steps: int = 3) -> None:
    """Train with plain Pyro, as in a user's notebook."""
    adam = pyro.optim.Adam({"lr": 1e-3})
    svi = SVI(entry.model, entry.guide, adam, loss=entry.objective)
    for _ in range(steps):
        svi.step(images_for(entry), labels_for(entry))


def finite(model: Model, drawn: torch.Tensor) -> bool:
    """Return True for finite values; NaN stands for an absent point in scenes of points."""
    images = isinstance(model.space, ImageSpace)
    return bool(torch.isfinite(drawn).all() if images else not drawn.isinf().any())


@pytest.mark.parametrize("name", NAMES)
def test_prior_draws_images_of_the_declared_shape_and_range(name):
    entry = make(name)
    model = entry.model.discretize()
    trace = poutine.trace(model).get_trace(batch_size=3)
    drawn = trace.nodes["_RETURN"]["value"]
    assert drawn.shape == images_for(entry, 3).shape
    assert finite(model, drawn)
    if not isinstance(model.space, ImageSpace):
        return
    mean = trace.nodes["image"]["fn"].mean
    low, high = model.pixel_range
    beyond = 1e-6 if model.means_in_range else 0.5 * (high - low)
    assert mean.min() >= low - beyond and mean.max() <= high + beyond


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_declared_sites_are_those_that_are_drawn(name, discrete):
    model = make(name).model
    model = model.discretize() if discrete else model
    trace = prune_subsample_sites(poutine.trace(model).get_trace(batch_size=3))
    drawn = {n: s for n, s in latent_sites(trace).items() if n != model.space.site}
    declared = {site.name: site for site in model.sites}
    assert drawn.keys() == declared.keys()
    for site_name, site in declared.items():
        node = drawn[site_name]
        frames = sorted(node["cond_indep_stack"], key=lambda frame: frame.dim)
        assert tuple(frame.name for frame in frames) == site.plates, site_name
        assert all(model.plate_dims[frame.name] == frame.dim for frame in frames), site_name
        assert node["fn"].event_dim == site.event_dim, site_name
        assert is_discrete(node["fn"]) == site.discrete, site_name


@pytest.mark.parametrize("name", [name for name in NAMES if takes_images(name)])
def test_images_may_have_the_shape_of_any_data_set(name):
    sizes = {**small_settings(name), "image_shape": (3, 28, 30)}
    assert create(name, **sizes).model.image_shape == (3, 28, 30)


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_guide_fits_relaxed_and_discrete(name, guide):
    entry = make(name, guide)
    check_pair(entry.model, entry.guide, images_for(entry))
    discrete = entry.model.discretize(), entry.guide.discretize()
    check_pair(*discrete, images_for(entry))
    drawn = poutine.trace(entry.guide).get_trace(images_for(entry))
    assert set(entry.guide.covers) == latent_sites(prune_subsample_sites(drawn)).keys()


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_gradients_reach_every_parameter(name, guide):
    reached: set[str] = set()
    for seed in range(4):  # a unit may be dead at one draw of the weights
        entry = make(name, guide, seed)
        loss_at(entry, images_for(entry), seed).backward()
        parameters = parameters_of(entry)
        grads = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        assert all(torch.isfinite(g).all() for g in grads.values())
        reached |= {n for n, g in grads.items() if g.abs().max() > 0}
    assert sorted(set(parameters) - reached) == []


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_continuous_sites_of_the_guide_are_reparametrized(name, guide):
    """Otherwise Pyro silently takes the noisy score-function gradient."""
    entry = make(name, guide)
    drawn = latent_sites(
        prune_subsample_sites(poutine.trace(entry.guide).get_trace(images_for(entry)))
    )
    assert [n for n, s in drawn.items() if not (is_discrete(s["fn"]) or s["fn"].has_rsample)] == []


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_a_small_step_downhill_lowers_the_loss(name, guide):
    """It falls by the predicted amount, unless a discrete site makes the gradient an estimate."""
    entry = make(name, guide)
    entry.model.double()
    entry.guide.double()
    images = images_for(entry, dtype=torch.float64)
    before = loss_at(entry, images)
    before.backward()
    slopes = [p for p in parameters_of(entry).values() if p.grad is not None]
    steepness = sum(p.grad.square().sum() for p in slopes)
    optimizer = torch.optim.SGD(slopes, lr=float(1e-4 / steepness))  # 1e-4 nats to first order
    optimizer.step()
    lower = (before - loss_at(entry, images)).item()
    assert lower > 0
    if not any(site.discrete for site in entry.model.latent_sites):
        assert lower == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_save_and_load_give_the_same_loss(name, guide, tmp_path):
    entry = make(name, guide)
    svi_steps(entry)
    save_entry(entry, tmp_path)
    pyro.set_rng_seed(99)
    twin = load(tmp_path)
    assert twin.default_guide == guide
    images = images_for(entry)
    with torch.no_grad():
        assert torch.equal(loss_at(twin, images), loss_at(entry, images))


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_a_pair_is_rebuilt_from_json(name, guide):
    """The rebuilt pair has the same specification, tensors of the same names, and an equal loss."""
    entry = make(name, guide)
    written = json.dumps([spec(entry.model), spec(entry.guide, model=entry.model)])
    of_model, of_guide = json.loads(written)
    twin = copy.copy(entry)
    twin.objective = copy.deepcopy(entry.objective)  # it counts the updates
    twin.model = build(of_model)
    twin.guide = build(of_guide, model=twin.model)
    assert json.dumps([spec(twin.model), spec(twin.guide, model=twin.model)]) == written
    for part in ("model", "guide"):
        getattr(twin, part).load_state_dict(getattr(entry, part).state_dict())
    images = images_for(entry)
    assert torch.equal(loss_at(entry, images), loss_at(twin, images))


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_discrete_evaluation_is_finite(name, guide):
    entry = make(name, guide)
    images, labels = images_for(entry), labels_for(entry)
    idata = evaluate(entry.model, entry.guide, images, labels=labels, num_particles=3)
    weights = torch.as_tensor(idata.sample_stats["log_weight"].values)
    assert weights.shape == (1, 3, BATCH)
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_precision_is_kept_through_loss_and_gradients(name, guide, dtype):
    entry = make(name, guide)
    entry.model.to(dtype)
    entry.guide.to(dtype)
    loss = loss_at(entry, images_for(entry, dtype=dtype))
    loss.backward()
    assert loss.dtype == dtype
    assert torch.isfinite(loss)
    assert {p.grad.dtype for p in parameters_of(entry).values() if p.grad is not None} == {dtype}


def bad_points(entry: Entry) -> dict[str, torch.Tensor]:
    points = images_for(entry)
    most = points.shape[1]
    return {
        "one scene": points[0],
        "empty": points[:0],
        "infinite": points / 0,
        "half a point": torch.cat([points, 0 * points + torch.tensor([0.0, math.nan])], dim=1),
        "one point": points.masked_fill(torch.arange(most)[:, None] > 0, math.nan),
        "too many": torch.cat([points, points], dim=1),
        "three coordinates": torch.cat([points, points[..., :1]], dim=2),
        "whole numbers": (points * 255).long(),
    }


def bad_images(entry: Entry) -> dict[str, torch.Tensor]:
    """Return batches that the entry must refuse, by what is wrong with them."""
    if not isinstance(entry.model.space, ImageSpace):
        return bad_points(entry)
    images, (_, high) = images_for(entry), entry.model.pixel_range
    return {
        "no channels": images[:, 0],
        "empty": images[:0],
        "too bright": images + high + 1,
        "negative": images - high - 1,
        "NaN": images.clone().index_fill(0, torch.tensor([1]), float("nan")),
        "wrong channels": torch.cat([images, images], dim=1),
        "wrong size": images[..., :-1],
        "bytes": (images * 255).to(torch.uint8),
    }


def bad_kinds(only: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    """Return each pair with each kind of bad images of its entry, or with these kinds only."""
    kinds = {name: bad_images(make(name)) for name in NAMES}
    return [(*pair, kind) for pair in PAIRS for kind in kinds[pair[0]] if kind in only or not only]


@pytest.mark.parametrize(("name", "guide", "kind"), bad_kinds())
def test_bad_images_are_refused_by_name(name, guide, kind):
    entry = make(name, guide)
    images = bad_images(entry)[kind]
    for call in (entry.model, entry.guide):
        with pytest.raises(ValueError, match=entry.model.observes):
            call(images)
    before = values_of(entry)
    with pytest.raises(ValueError, match=rf"{entry.model.observes}|split"):
        fit(entry.model, entry.guide, images, steps=1, checks=Checks(progress=False))
    assert not moved(entry, before)


@pytest.mark.parametrize(
    ("name", "guide", "kind"), bad_kinds(("too bright", "wrong size", "infinite", "too many"))
)
def test_bad_images_are_refused_by_functions_without_validation(name, guide, kind):
    entry = make(name, guide)
    images, labels = bad_images(entry)[kind], labels_for(entry)
    if kind == "too bright" and math.isinf(entry.model.pixel_range[1]):
        images = images * math.inf
    pair, taught = (entry.model, entry.guide), entry.model.supervised
    with pyro.validation_enabled(False):
        for use in (
            lambda: fit(*pair, images, steps=1, checks=Checks(progress=False)),
            lambda: evaluate(*pair, images, labels=labels, num_particles=1),
            lambda: compare({"one": pair}, images),
            lambda: encode(*pair, images),
            lambda: classify(*pair, images) if taught else reconstruct(*pair, images),
        ):
            with pytest.raises(ValueError, match=entry.model.observes):
                use()


def takes_labels(name: str) -> bool:
    """Return True for a model that takes labels, which `draw`, of a class that may, does not."""
    try:
        make(name).model.check_labels(torch.arange(2))
    except (AttributeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", [name for name in NAMES if takes_labels(name)])
def test_labels_are_integers_of_any_width(name):
    entry = make(name)
    images, labels = images_for(entry), torch.arange(BATCH) % 2
    results = [
        evaluate(entry.model, entry.guide, images, labels=labels.to(dtype), num_particles=1)
        for dtype in (torch.int64, torch.int32, torch.uint8)
    ]
    first, *others = (idata.sample_stats.log_weight.values for idata in results)
    assert all((first == other).all() for other in others)
    for program in (entry.model, entry.guide):
        density = []
        for dtype in (torch.int64, torch.int32, torch.uint8):
            pyro.set_rng_seed(0)
            trace = poutine.trace(program).get_trace(images, labels.to(dtype))
            density.append(trace.log_prob_sum())
        assert density[0] == density[1] == density[2]


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_a_call_checks_its_batch_once_and_only_while_validation_is_on(name, guide, monkeypatch):
    """A check reads all pixels and waits for the device: fast code turns validation off."""
    entry, counts = make(name, guide), {"calls": 0, "checks": 0}
    kind = type(entry.model.space)
    check = kind.check

    def called(module, arguments, options):
        batch = arguments[0] if arguments else options.get(module.observes)
        counts["calls"] += batch is not None

    def checked(space, batch):
        counts["checks"] += 1
        check(space, batch)

    monkeypatch.setattr(kind, "check", checked)
    for program in (entry.model, entry.guide):
        program.register_forward_pre_hook(called, with_kwargs=True)
    for validate in (True, False):
        counts.update(calls=0, checks=0)
        with pyro.validation_enabled(validate):
            loss_at(entry, images_for(entry)).backward()
            for program in (entry.model, entry.guide):
                program(images_for(entry))
        assert counts["calls"] >= 2
        assert counts["checks"] == validate * counts["calls"]


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_svi_trains_every_parameter_of_two_instances_apart(name, guide):
    """A parameter that is read outside a `pyro_method` is hidden from SVI: silently not trained."""
    first, second = make(name, guide), make(name, guide, seed=1)
    at_first, at_second = values_of(first), values_of(second)
    svi_steps(first)
    assert moved(first, at_first) == set(at_first)
    assert not moved(second, at_second)
    after_first = values_of(first)
    svi_steps(second)
    assert moved(second, at_second) == moved(first, at_first)
    assert not moved(first, after_first)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_copies_keep_their_values_and_train_on_their_own(name, guide, copier):
    entry = make(name, guide)
    svi_steps(entry, 1)
    twin = copy.copy(entry)
    twin.model, twin.guide = copier((entry.model, entry.guide))
    assert not moved(twin, values_of(entry))
    assert twin.guide.model is twin.model
    before = values_of(entry)
    svi_steps(twin)
    assert moved(twin, before)
    assert not moved(entry, before)


PARTICLES = 2


def nesting_of(entry: Entry) -> int:
    """Return the number of dims that the plates of the entry's model take up."""
    return max(-dim for dim in entry.model.plate_dims.values())


def under_plate(entry: Entry, program: Callable) -> Callable:
    """Return the program inside an outer plate, directly to the left of the model's own."""

    def run(*arguments, **options):
        with pyro.plate("outer", PARTICLES, dim=-1 - nesting_of(entry)):
            return program(*arguments, **options)

    return run


def forms(names_or_pairs: list) -> list[tuple]:
    """Return each pair with relaxed presences and, if that is another model, with discrete ones."""
    cases = []
    for pair in names_or_pairs:
        model = make(pair if isinstance(pair, str) else pair[0]).model
        discrete = [False] if model.discretize() is model else [False, True]
        cases += [(*([pair] if isinstance(pair, str) else pair), d) for d in discrete]
    return cases


def double_pair(name: str, guide: str | None = None, discrete: bool = False) -> Entry:
    """Return an entry in float64, without dropout, whose presences may be discrete."""
    entry = make(name, guide)
    entry.model.double().eval()
    entry.guide.double().eval()
    if discrete:
        guide_of = entry.guide.discretize()
        entry.model = entry.model.discretize()
        entry.guide = guide_of
    return entry


def drawn_in(trace: poutine.Trace) -> dict[str, dict]:
    """Return the sample sites of a trace, with their log densities."""
    trace.compute_log_prob()
    return {n: s for n, s in prune_subsample_sites(trace).nodes.items() if s["type"] == "sample"}


def point_of(distribution) -> torch.Tensor | None:
    """Return the point of a Delta, even if it is expanded or independent."""
    while not isinstance(distribution, dist.Delta):
        if not hasattr(distribution, "base_dist"):
            return None
        distribution = distribution.base_dist
    return distribution.v


def assert_one_by_one(program, arguments: tuple, sites: dict[str, dict], only: str | None = None):
    """Check that an outer plate leaves every site's distribution unchanged, index by index."""
    for k in range(PARTICLES):
        values = {n: s["value"][k] for n, s in sites.items() if not s["is_observed"]}
        with ValueMessenger(values):
            alone = drawn_in(poutine.trace(program).get_trace(*arguments))
        assert alone.keys() == sites.keys()
        for name, site in sites.items() if only is None else [(only, sites[only])]:
            actual, expected = site["log_prob"][k], alone[name]["log_prob"]
            if (point := point_of(alone[name]["fn"])) is not None:
                actual, expected = site["value"][k], point
            expected = expected.expand_as(actual)
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "guide", "discrete"), forms(PAIRS))
def test_under_an_outer_plate_every_index_is_a_run_of_its_own(name, guide, discrete):
    """So do vectorized particles work: their densities equal those of particles one by one."""
    entry = double_pair(name, guide, discrete)
    images = images_for(entry, dtype=torch.float64)
    guided = poutine.trace(under_plate(entry, entry.guide)).get_trace(images)
    replayed = poutine.replay(under_plate(entry, entry.model), trace=guided)
    joint, drawn = drawn_in(poutine.trace(replayed).get_trace(images)), drawn_in(guided)
    assert all(site["log_prob"].shape[0] == PARTICLES for site in joint.values())
    if not entry.guide.auxiliary:
        assert_one_by_one(entry.guide, (images,), drawn)
    assert_one_by_one(entry.model, (images,), joint)


@pytest.mark.parametrize(("name", "discrete"), forms(NAMES))
def test_under_an_outer_plate_the_prior_draws_every_index_afresh(name, discrete):
    entry = double_pair(name, discrete=discrete)
    program = functools.partial(entry.model, batch_size=2)
    trace = poutine.trace(under_plate(entry, program)).get_trace()
    shape = images_for(entry, 2).shape
    assert trace.nodes["_RETURN"]["value"].shape == (PARTICLES, *shape)
    sites = drawn_in(trace)
    observed = entry.model.space.site
    image = sites[observed]["value"]
    assert not torch.equal(image[0], image[1])
    # what a chain has come from does not appear in its trace: only the image's distribution can be
    # compared
    assert_one_by_one(program, (), sites, only=None if entry.model.normalized else observed)


def vectorized_objectives(entry: Entry) -> list[ELBO]:
    sizes = dict(num_particles=2, vectorize_particles=True, max_plate_nesting=nesting_of(entry))
    return [Trace_ELBO(**sizes), RenyiELBO(alpha=0, **sizes)]


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_vectorized_particles_train(name, guide):
    entry = make(name, guide)
    labels = labels_for(entry)
    arguments = (images_for(entry),) if labels is None else (images_for(entry), labels)
    for objective in vectorized_objectives(entry):
        loss = objective.loss_and_grads(entry.model, entry.guide, *arguments)
        assert math.isfinite(loss)
        grads = [p.grad for p in parameters_of(entry).values() if p.grad is not None]
        assert grads
        assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.filterwarnings("ignore:Not enough tail samples")  # the weights of untrained guides
@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_vectorized_tools_of_pyro_run(name, guide):
    entry = make(name, guide)
    images, nesting = images_for(entry, 2), nesting_of(entry)
    drawn = Predictive(entry.model, guide=entry.guide, num_samples=3, parallel=True)(images)
    prior = Predictive(entry.model, num_samples=3, parallel=True)(batch_size=2)
    assert set(prior) >= {site.name for site in entry.model.sites}
    for values in (drawn, prior):
        assert all(len(v) == 3 and finite(entry.model, v) for v in values.values())
    weights, _, _ = vectorized_importance_weights(
        entry.model, entry.guide, images, num_samples=3, max_plate_nesting=nesting
    )
    assert weights.shape == (3,)
    assert torch.isfinite(weights).all()
    with torch.no_grad():
        assert isinstance(
            psis_diagnostic(entry.model, entry.guide, images, num_particles=40), float
        )
