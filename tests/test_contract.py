"""What every entry of the zoo keeps, with each of its guides: registered is tested.

Entries are made at the small sizes that they were registered with. To add a model, see
CONTRIBUTING.md; nothing has to be added here.
"""

from __future__ import annotations

import copy
import pickle

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.poutine.util import prune_subsample_sites

from capsule_zoo.inference import check_pair, evaluate, fit, loss_per_image
from capsule_zoo.inference.check import is_discrete, latent_sites
from capsule_zoo.registry import Entry, create, list_models, load, save, small_sizes

NAMES = list_models()
PAIRS = [(name, guide) for name in NAMES for guide in create(name, **small_sizes(name)).guides]
BATCH = 5


def make(name: str, guide: str | None = None, seed: int = 0) -> Entry:
    pyro.set_rng_seed(seed)
    entry = create(name, **small_sizes(name))
    return entry.use_guide(guide or entry.default_guide)


def images_for(entry: Entry, number: int = BATCH, dtype: torch.dtype = torch.float32):
    low, high = entry.model.pixel_range
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(number, *entry.model.image_shape, generator=generator, dtype=dtype)
    return low + (high - low) * uniform


def labels_for(entry: Entry, number: int = BATCH) -> torch.Tensor | None:
    """Labels for a model that learns from them."""
    return torch.arange(number) % 2 if entry.model.supervised else None


def loss_at(entry: Entry, images: torch.Tensor, seed: int = 2) -> torch.Tensor:
    """The training loss, nats per image, a function of the seed."""
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
    """Plain Pyro, as a user's notebook has it."""
    adam = pyro.optim.Adam({"lr": 1e-3})
    svi = SVI(entry.model, entry.guide, adam, loss=entry.objective)
    for _ in range(steps):
        svi.step(images_for(entry), labels_for(entry))


@pytest.mark.parametrize("name", NAMES)
def test_prior_draws_images_of_the_declared_shape_and_range(name):
    entry = make(name)
    model = entry.model.with_discrete_presences()
    trace = poutine.trace(model).get_trace(batch_size=3)
    drawn = trace.nodes["_RETURN"]["value"]
    assert drawn.shape == (3, *model.image_shape)
    assert torch.isfinite(drawn).all()
    mean = trace.nodes["image"]["fn"].mean
    low, high = model.pixel_range
    beyond = 1e-6 if model.means_in_range else 0.5 * (high - low)
    assert mean.min() >= low - beyond and mean.max() <= high + beyond


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_declared_sites_are_those_that_are_drawn(name, discrete):
    model = make(name).model
    model = model.with_discrete_presences() if discrete else model
    trace = prune_subsample_sites(poutine.trace(model).get_trace(batch_size=3))
    drawn = {n: s for n, s in latent_sites(trace).items() if n != "image"}
    declared = {site.name: site for site in model.sites}
    assert drawn.keys() == declared.keys()
    for site_name, site in declared.items():
        node = drawn[site_name]
        frames = sorted(node["cond_indep_stack"], key=lambda frame: frame.dim)
        assert tuple(frame.name for frame in frames) == site.plates, site_name
        assert all(model.plate_dims[frame.name] == frame.dim for frame in frames), site_name
        assert node["fn"].event_dim == site.event_dim, site_name
        assert is_discrete(node["fn"]) == site.discrete, site_name


@pytest.mark.parametrize("name", NAMES)
def test_images_may_have_the_shape_of_any_data_set(name):
    sizes = {**small_sizes(name), "image_shape": (3, 28, 30)}
    assert create(name, **sizes).model.image_shape == (3, 28, 30)


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_guide_fits_relaxed_and_discrete(name, guide):
    entry = make(name, guide)
    check_pair(entry.model, entry.guide, images_for(entry))
    discrete = entry.model.with_discrete_presences(), entry.guide.with_discrete_presences()
    check_pair(*discrete, images_for(entry))
    drawn = poutine.trace(entry.guide).get_trace(images_for(entry))
    assert set(entry.guide.covers) == latent_sites(prune_subsample_sites(drawn)).keys()


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_gradients_reach_every_parameter(name, guide):
    reached: set[str] = set()
    for seed in range(4):  # a unit may be dead at one draw of the weights
        entry = make(name, guide, seed)
        loss_at(entry, images_for(entry), seed).backward()
        found = parameters_of(entry)
        grads = {n: p.grad for n, p in found.items() if p.grad is not None}
        assert all(torch.isfinite(g).all() for g in grads.values())
        reached |= {n for n, g in grads.items() if g.abs().max() > 0}
    assert sorted(set(found) - reached) == []


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_continuous_sites_of_the_guide_are_reparametrized(name, guide):
    """Or Pyro takes the noisy score-function gradient, and says nothing."""
    entry = make(name, guide)
    drawn = latent_sites(
        prune_subsample_sites(poutine.trace(entry.guide).get_trace(images_for(entry)))
    )
    assert [n for n, s in drawn.items() if not (is_discrete(s["fn"]) or s["fn"].has_rsample)] == []


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_a_small_step_downhill_lowers_the_loss(name, guide):
    """And by what the gradient foretells, unless a discrete site makes the gradient an estimate."""
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
    save(entry, tmp_path)
    pyro.set_rng_seed(99)
    twin = load(tmp_path)
    assert twin.default_guide == guide
    images = images_for(entry)
    with torch.no_grad():
        assert torch.equal(loss_at(twin, images), loss_at(entry, images))


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


def bad_images(entry: Entry) -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("kind", bad_images(make(NAMES[0])))
@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_bad_images_are_refused_by_name(name, guide, kind):
    entry = make(name, guide)
    images = bad_images(entry)[kind]
    for call in (entry.model, entry.guide):
        with pytest.raises(ValueError, match="images"):
            call(images)
    before = values_of(entry)
    with pytest.raises(ValueError, match=r"images|split"):
        fit(entry.model, entry.guide, images, steps=1, progress=False)
    assert not moved(entry, before)


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
