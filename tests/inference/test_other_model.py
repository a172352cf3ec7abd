"""A guide that goes on reading the model that it was made from is named, with a remedy."""

import copy
import io
import warnings

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from small_entries import images_for, small_entry
from toys import Conjugate, ExactGuide, LinearGuide, conjugate_images
from variants import create, list_models, small_settings

from capsule_zoo.guides import ExactSwitches, MeanFieldSwitches
from capsule_zoo.guides.per_image.site_distributions import base_distribution
from capsule_zoo.inference import (
    Checks,
    ContrastiveDivergence,
    SummedPresences,
    check_pair,
    compare,
    encode,
    evaluate,
    fit,
    summarize,
)
from capsule_zoo.inference.check import latent_sites
from capsule_zoo.inference.objects import find_objects
from capsule_zoo.inference.other_model import foreign_parameters
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.models.common.modes import eval_mode

PAIRS = [
    (name, guide) for name in list_models() for guide in create(name, **small_settings(name)).guides
]
PATTERN = r"was made from another .* make the guide anew .* copy\.deepcopy\(\(model, guide\)\)"
QUIET = dict(checks=Checks(progress=False))


def loaded(*parts):
    """Return what was saved in one file."""
    file = io.BytesIO()
    torch.save(parts if len(parts) > 1 else parts[0], file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def warnings_of(call) -> list[str]:
    """Return the warnings of a call about another model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(item.message) for item in caught if "another" in str(item.message)]


def draws(guide, images: torch.Tensor) -> torch.Tensor:
    """Return what the guide draws under one seed, log densities and logits, as one vector."""
    torch.manual_seed(3)
    with torch.no_grad(), eval_mode(guide, guide.model):
        trace = poutine.trace(guide).get_trace(images)
    trace.compute_log_prob()
    sites = latent_sites(trace).values()
    numbers = [x for site in sites for x in (site["value"], site["log_prob"])]
    numbers += [getattr(base_distribution(site["fn"]), "logits", torch.zeros(1)) for site in sites]
    return torch.cat([torch.zeros(1).double(), *(x.double().flatten() for x in numbers)])


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_a_guide_is_named_if_its_draws_depend_on_another_model(name, guide):
    entry = small_entry(name, guide)
    images = images_for(entry)
    together = copy.deepcopy((entry.model, entry.guide))
    apart = copy.deepcopy(entry.model), copy.deepcopy(entry.guide)
    assert not warnings_of(lambda: check_pair(entry.model, entry.guide, images))
    assert not warnings_of(lambda: check_pair(*together, images))
    result = warnings_of(lambda: check_pair(*apart, images))
    before = draws(apart[1], images)
    torch.manual_seed(4)
    for parameter in apart[1].model.parameters():
        parameter.data.add_(3 * torch.randn_like(parameter))
    if (name, guide) == ("scenes", "recurrent"):  # it weighs its draws by the model, see its loss
        assert result
        return
    try:
        reads = not torch.equal(before, draws(apart[1], images))
    except ValueError:  # such values are not allowed, so they were read
        reads = True
    assert len(result) == reads, result


def test_files_of_each_half_are_no_pair_and_one_file_of_both_is():
    entry = small_entry("capsule-rbm")
    images = images_for(entry)
    model, guide = loaded(entry.model, entry.guide)
    assert not warnings_of(lambda: check_pair(model, guide, images))
    model, guide = loaded(entry.model), loaded(entry.guide)
    assert all(map(torch.equal, model.parameters(), guide.model.parameters()))
    assert warnings_of(lambda: check_pair(model, guide, images))


@pytest.mark.parametrize("seed", [0, 1])
def test_every_function_that_takes_a_pair_says_so_once(seed):
    """Also of a guide to a model of another seed."""
    entry, other = (
        small_entry("part-whole", "routing"),
        small_entry("part-whole", "routing", seed=seed),
    )
    model, guide, images = entry.model, other.guide, images_for(entry)
    for call in (
        lambda: check_pair(model, guide, images),
        lambda: evaluate(model, guide, images, num_particles=2, chains=2),
        lambda: encode(model, guide, images, num_samples=2),
        lambda: refine(model, guide, images, steps=2),
        lambda: fit(model, guide, images, steps=2, **QUIET),
    ):
        assert len(warnings_of(call)) == 1
    assert warnings_of(lambda: compare({"routing": (model, guide)}, images, num_particles=2))


def test_a_bound_of_a_guide_to_another_model_is_a_bound():
    model, other = Conjugate().double(), Conjugate().double()
    other.mean.data.fill_(2.0)
    images = conjugate_images(40)
    with pytest.warns(UserWarning, match=PATTERN):
        result = summarize(evaluate(model, ExactGuide(other), images, num_particles=200))
    (mean, scale), (wrong, _) = (item.posterior(images) for item in (model, other))
    divergence = ((mean - wrong) / scale).square().mean() / 2  # of normals of one scale
    expected = (model.log_evidence(images).mean() - divergence).item()
    assert divergence > 0.1 and result["elbo"] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("kind", [ExactSwitches, MeanFieldSwitches])
def test_contrastive_divergence_refuses_the_free_energy_of_another_model(kind):
    entry = small_entry("capsule-rbm")
    model, guide, images = entry.model, kind(entry.model), images_for(entry, 6).round()
    apart = copy.deepcopy(model)
    weights = [p.detach().clone() for p in apart.parameters()]
    with pytest.raises(ValueError, match=f"^{kind.__name__} {PATTERN}"):
        fit(apart, guide, images, steps=2, objective=ContrastiveDivergence(), **QUIET)
    with pytest.raises(ValueError, match=PATTERN):
        ContrastiveDivergence().loss_and_grads(apart, guide, images)
    with pytest.raises(ValueError, match=PATTERN):
        ContrastiveDivergence()(apart, guide)
    assert all(map(torch.equal, weights, apart.parameters()))
    together = copy.deepcopy((model, guide))
    losses = []
    for pair in ((model, guide), together):
        run = fit(*pair, images, steps=5, objective=ContrastiveDivergence(), **QUIET)
        losses.append(list(run.history["loss"]))
    assert losses[0] == losses[1]


def test_objects_of_another_model_are_refused():
    """The subsets of objects are weighed by the densities of the guide's own model."""
    entry = small_entry("scenes")
    images, model = images_for(entry), copy.deepcopy(entry.model)
    with pytest.raises(ValueError, match=PATTERN):
        find_objects(model, entry.guide, images)
    with pytest.raises(ValueError, match=PATTERN):
        fit(model, entry.guide, images, steps=1, objective=SummedPresences(), **QUIET)
    find_objects(*copy.deepcopy((entry.model, entry.guide)), images)


def test_models_that_share_their_parameters_are_one():
    model = Conjugate()
    guide = ExactGuide(model)
    twin = model.sharing_parameters()
    assert foreign_parameters(twin, guide) == {} and foreign_parameters(model, guide) == {}
    assert foreign_parameters(model.with_missing_pixels(), guide) == {}
    assert foreign_parameters(poutine.scale(model, scale=2.0), guide) == {}
    assert set(foreign_parameters(Conjugate(), guide)) == {"mean"}


def test_guides_without_a_model_of_their_own_pass():
    model, images = Conjugate(), conjugate_images(3, torch.float32)

    def function(images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", pyro.distributions.Normal(0.0, 1.0))

    auto = AutoNormal(poutine.block(model, hide=["image"]))
    check_pair(model, auto, images)
    for guide in (function, auto, copy.deepcopy(auto), LinearGuide(copy.deepcopy(model))):
        assert not warnings_of(lambda guide=guide: check_pair(model, guide, images))
