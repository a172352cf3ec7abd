"""Every idiom of Pyro's tutorials gives the right value with every entry.

The page docs/concepts/pyro_idioms.md shows them on one model. Entries are made at the small sizes
that they were registered with.
"""

import itertools
from collections.abc import Callable

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.inspect import get_model_relations
from pyro.poutine import Trace
from torch import Tensor
from variants import create, list_models, small_settings

from capsule_zoo.inference import loss_per_image
from capsule_zoo.models import base
from capsule_zoo.registry import Entry

NAMES = list_models()
BATCH = 4
ENERGY = ["capsule-rbm", "rbm"]
DIRECTED = [name for name in NAMES if name not in ENERGY]


def _is_relaxed(name: str) -> bool:
    model = create(name, **small_settings(name)).model
    return model.discretize() is not model


def make(name: str, seed: int = 0, **sizes: object) -> Entry:
    """Return an entry in float64, in evaluation mode."""
    pyro.set_rng_seed(seed)
    entry = create(name, **{**small_settings(name), **sizes})
    for module in (entry.model, entry.guide):
        module.double().eval()
    return entry


def observations(entry: Entry, number: int = BATCH) -> Tensor:
    return entry.model.space.example(number, torch.float64, torch.Generator().manual_seed(1))


def labels_for(entry: Entry, number: int = BATCH) -> Tensor | None:
    return torch.arange(number) % 2 if entry.model.supervised else None


def arguments(entry: Entry) -> tuple[Tensor, ...]:
    labels = labels_for(entry)
    return (observations(entry),) if labels is None else (observations(entry), labels)


def by_name(entry: Entry, model: Callable | None = None) -> Callable:
    """Return the model that is conditioned on observations, and on labels if it explains them."""
    values = {entry.model.space.site: observations(entry)}
    if entry.model.supervised:
        values["label"] = labels_for(entry)
    return pyro.condition(model or entry.model, data=values)


def trace_of(program: Callable, *inputs: object, seed: int = 2, **options: object) -> Trace:
    pyro.set_rng_seed(seed)
    return poutine.trace(program).get_trace(*inputs, **options)


def log_probs(trace: Trace) -> dict[str, Tensor]:
    """Return the log density of each site, (images, ...)."""
    trace.compute_log_prob()
    return {n: s["log_prob"] for n, s in trace.nodes.items() if "log_prob" in s}


def assert_close(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


# 1. Condition by name: the same log density, image by image, as of what is passed.


@pytest.mark.parametrize("name", DIRECTED)
def test_conditioned_by_name_is_passed(name):
    entry = make(name)
    drawn = trace_of(entry.guide, *arguments(entry))
    passed = trace_of(poutine.replay(entry.model, trace=drawn), *arguments(entry))
    named = trace_of(poutine.replay(by_name(entry), trace=drawn), batch_size=BATCH)
    site, images = entry.model.space.site, observations(entry)
    assert passed.nodes[site]["value"].shape == named.nodes[site]["value"].shape
    assert passed.nodes["_RETURN"]["value"].shape == named.nodes["_RETURN"]["value"].shape
    if entry.model.supervised:
        assert torch.equal(named.nodes["label"]["value"], labels_for(entry))
    assert_close(log_probs(named), log_probs(passed))
    assert passed.nodes["_RETURN"]["value"].shape == images.shape


@pytest.mark.parametrize("name", ENERGY)
def test_an_energy_model_takes_images_as_its_argument_only(name):
    entry = make(name)
    with pytest.raises(ValueError, match=r"energy model.*pass the observations"):
        by_name(entry)(batch_size=BATCH)
    conditioned = trace_of(by_name(entry), observations(entry))
    assert_close(log_probs(conditioned), log_probs(trace_of(entry.model, observations(entry))))


@pytest.mark.parametrize("name", ["part-whole", "shape-codes"])
def test_choices_that_are_summed_out_have_the_same_loss_by_name(name):
    entry, losses = make(name), []
    model = entry.model.with_selection("enumerate")
    for program in (model, by_name(entry, model)):
        pyro.set_rng_seed(2)
        loss = TraceEnum_ELBO(max_plate_nesting=2).loss(program, entry.guide, observations(entry))
        losses.append(loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


WRONG = {
    "a dim too many": lambda images: images[:, None],
    "one observation without its dim": lambda images: images[0],
    "a smaller batch": lambda images: images[:2],
    "an array": lambda images: images.numpy(),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_observations_of_another_shape_are_refused_by_name(name, wrong):
    entry = make(name)
    site = entry.model.space.site
    model = pyro.condition(entry.model, data={site: WRONG[wrong](observations(entry))})
    inputs = (observations(entry),) if name in ENERGY else ()
    with pytest.raises(ValueError, match=rf"site '{site}' takes a .* here, not"):
        model(*inputs, labels=labels_for(entry), batch_size=BATCH)
    if wrong == "a smaller batch":
        with pytest.raises(ValueError, match="call the program with batch_size=2"):
            model(*inputs, labels=labels_for(entry), batch_size=BATCH)


@pytest.mark.parametrize("name", [n for n in DIRECTED if n != "constellations"])
def test_pixels_are_checked_by_name_as_in_the_argument(name):
    entry = make(name)
    images, labels = observations(entry), labels_for(entry)
    for bad, message in {
        images.mul(torch.nan): "NaN or infinite",
        images.mul(255).byte(): "floating point.*divide bytes",
    }.items():
        with pytest.raises(ValueError, match=message):
            pyro.condition(entry.model, data={"image": bad})(labels=labels, batch_size=BATCH)
    with pytest.warns(UserWarning, match=r"outside of \[0, 1\].*rescale"):
        pyro.condition(entry.model, data={"image": 255 * images})(labels=labels, batch_size=BATCH)


@pytest.mark.parametrize("name", DIRECTED)
def test_latents_that_would_mix_images_are_refused(name):
    """A value with the images at the dim of the capsules would be scored under all images."""
    entry = make(name)
    drawn = trace_of(entry.guide, observations(entry))
    for site in entry.model.latent_sites:
        value = drawn.nodes[site.name]["value"]
        conditional = pyro.condition(entry.model, data={site.name: value[:2]})
        with pytest.raises(ValueError, match=f"site '{site.name}' takes a value of shape"):
            conditional(observations(entry))


def test_a_kind_without_the_dim_of_capsules_is_refused():
    entry = make("shape-codes")
    kinds = torch.arange(BATCH) % 2
    with pytest.raises(ValueError, match=r"site 'object_kind' takes .*\(4, 1\) here, not \(4,\)"):
        pyro.condition(entry.model, data={"object_kind": kinds})(batch_size=BATCH)
    trace = trace_of(entry.model, observations(entry), kinds)
    named = pyro.condition(entry.model, data={"object_kind": kinds[:, None]})
    other = trace_of(named, observations(entry))
    assert_close(other.log_prob_sum(), trace.log_prob_sum())


@pytest.mark.parametrize("name", NAMES)
def test_the_plate_of_the_images_is_not_observed_in_place_of_the_site(name):
    entry = make(name)
    model = pyro.condition(entry.model, data={"images": observations(entry)})
    site = entry.model.space.site
    with pytest.raises(ValueError, match=f"'images' is the plate .*; observe the site '{site}'"):
        model(batch_size=BATCH)


RELAXED = [name for name in NAMES if _is_relaxed(name)]


@pytest.mark.parametrize("name", RELAXED)
def test_values_of_the_other_form_are_not_taken_in_silence(name):
    """A relaxed site holds logits, and the discrete one 0 or 1."""
    entry = make(name)
    discrete = entry.model.discretize()
    sites = [s for s in discrete.sites if s.discrete]
    relaxed = {s.name for s in entry.model.sites if not s.discrete}
    drawn = {form: trace_of(form, batch_size=BATCH).nodes for form in (entry.model, discrete)}
    for site in [s.name for s in sites if s.name in relaxed]:
        value = drawn[entry.model][site]["value"]
        with pytest.raises(ValueError, match=rf"'{site}' is discrete and gets values outside"):
            pyro.condition(discrete, data={site: value})(batch_size=BATCH)
        value = drawn[discrete][site]["value"]
        value = torch.ones_like(value) if site.endswith("_presence") else value
        with pytest.warns(UserWarning, match=rf"'{site}' is relaxed .* values are 0 or 1"):
            pyro.condition(entry.model, data={site: value})(batch_size=BATCH)


# 2. Missing pixels by name.


@pytest.mark.parametrize("name", ["vae", "part-whole", "stacked-capsule-autoencoder", "scenes"])
def test_missing_pixels_are_missing_by_name_too(name):
    entry = make(name)
    model, guide = entry.model.with_missing_pixels(), entry.guide.with_missing_pixels()
    images = observations(entry)
    images[..., :2] = torch.nan
    drawn = trace_of(guide, images)
    passed = trace_of(poutine.replay(model, trace=drawn), images)
    named = poutine.replay(pyro.condition(model, data={"image": images}), trace=drawn)
    model_trace = trace_of(named, batch_size=BATCH)
    assert_close(log_probs(model_trace), log_probs(passed))


# 3. Uncondition, replay, do and block.


@pytest.mark.parametrize("name", NAMES)
def test_uncondition_draws_observations_given_the_latents_of_the_guide(name):
    entry = make(name)
    images, site = observations(entry), entry.model.space.site
    predictive = Predictive(poutine.uncondition(entry.model), guide=entry.guide, num_samples=3)
    drawn = predictive(images)[site]
    assert drawn.shape == (3, *images.shape)
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_replayed_trace_is_the_trace(name):
    entry = make(name)
    inputs = (observations(entry),) if name in ENERGY else ()
    trace = trace_of(entry.model, *inputs, batch_size=BATCH)
    again = poutine.replay(entry.model, trace=trace)
    second_trace = trace_of(again, *inputs, batch_size=BATCH, seed=9)
    assert_close(second_trace.nodes["_RETURN"]["value"], trace.nodes["_RETURN"]["value"])
    assert_close(log_probs(second_trace), log_probs(trace))


@pytest.mark.parametrize("name", NAMES)
def test_do_sets_the_observation_that_the_model_returns(name):
    entry = make(name)
    images, site = observations(entry), entry.model.space.site
    output = pyro.do(entry.model, data={site: images})(batch_size=BATCH)
    assert torch.equal(output, images)
    with pytest.raises(ValueError, match=f"site '{site}' takes a value of shape"):
        pyro.do(entry.model, data={site: images[:2]})(batch_size=BATCH)


# 4. Predictive: what the trace holds has the shape of what the model returns.


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_predictive_draws_what_the_model_returns(name, parallel):
    entry = make(name)
    returned, site = entry.model(batch_size=2), entry.model.space.site
    predictive = Predictive(entry.model, num_samples=3, parallel=parallel)
    drawn = predictive(batch_size=2)
    assert drawn[site].shape == (3, *returned.shape)
    if not parallel and name not in ENERGY:
        posterior = {name: value for name, value in drawn.items() if name != site}
        again = Predictive(entry.model, posterior, return_sites=(site,))(batch_size=2)
        assert again[site].shape == (3, *returned.shape)


@pytest.mark.parametrize("name", NAMES)
def test_the_relations_of_the_sites_can_be_drawn(name):
    entry = make(name)
    relations = get_model_relations(entry.model, arguments(entry))
    names = {site.name for site in entry.model.sites}
    assert names <= set(relations["sample_sample"])
    assert relations["observed"]


# 5. The parameter store, copies and files.


@pytest.mark.parametrize("name", NAMES)
def test_the_store_keeps_the_loss_and_training_goes_on(name, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_instances", itertools.count())
    old = make(name)
    train(old)
    loss = loss_at(old)
    pyro.get_param_store().save(tmp_path / "store.pt")
    pyro.clear_param_store()
    monkeypatch.setattr(base, "_instances", itertools.count())  # as in a new process
    entry = make(name, seed=1)
    pyro.get_param_store().load(tmp_path / "store.pt")
    new_loss, values = loss_at(entry), parameters(entry)
    assert all(torch.equal(values[n], value) for n, value in parameters(old).items())
    assert new_loss == loss
    before = parameters(entry)
    train(entry)
    after = parameters(entry)
    assert all(not torch.equal(after[n], value) for n, value in before.items())


def train(entry: Entry, steps: int = 2) -> None:
    adam = pyro.optim.Adam({"lr": 1e-4})
    svi = SVI(entry.model, entry.guide, adam, loss=entry.objective)
    for _ in range(steps):
        pyro.set_rng_seed(6)
        svi.step(*arguments(entry))


def loss_at(entry: Entry, seed: int = 5) -> float:
    pyro.set_rng_seed(seed)
    pair = entry.model, entry.guide
    loss = loss_per_image(entry.objective, *pair, observations(entry), labels_for(entry))
    return loss.item()


def parameters(entry: Entry) -> dict[str, Tensor]:
    modules = {"model": entry.model, "guide": entry.guide}
    return {
        f"{role}.{name}": value.detach().clone()
        for role, module in modules.items()
        for name, value in module.named_parameters()
    }


# 6. Losses and AutoGuides.


def schedules() -> dict[str, object]:
    adam = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 1e-4}}
    return {
        "clipped": pyro.optim.ClippedAdam({"lr": 1e-4, "lrd": 0.99, "clip_norm": 10.0}),
        "exponential": pyro.optim.ExponentialLR({**adam, "gamma": 0.5}),
    }


@pytest.mark.filterwarnings("ignore:TraceEnum_ELBO found no sample sites")
@pytest.mark.parametrize("name", NAMES)
def test_losses_of_pyro_agree_where_no_site_is_summed_out(name):
    entry, losses = make(name), []
    nesting = max(-dim for dim in entry.model.plate_dims.values())
    for loss in (Trace_ELBO(), TraceGraph_ELBO(), TraceEnum_ELBO(max_plate_nesting=nesting)):
        pyro.set_rng_seed(2)
        losses.append(float(loss.loss(entry.model, entry.guide, *arguments(entry))))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-8)


CONTINUOUS = [
    name
    for name in NAMES
    if not any(s.discrete for s in create(name, **small_settings(name)).model.latent_sites)
]


@pytest.mark.parametrize("name", CONTINUOUS)
def test_autoguides_of_a_model_that_is_conditioned_by_name_have_its_loss(name):
    losses = []
    for named in (False, True):
        entry = make(name)
        pyro.clear_param_store()
        model = by_name(entry) if named else entry.model
        inputs = ((), {"batch_size": BATCH}) if named else (arguments(entry), {})
        svi = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 1e-3}), Trace_ELBO())
        pyro.set_rng_seed(2)
        losses.append([svi.step(*inputs[0], **inputs[1]) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-8)


# 7. Parameters of 16 bits.


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_16_bits_are_refused_by_their_precision(name, kind):
    entry = make(name)
    pair = entry.model.to(kind), entry.guide.to(kind)
    inputs = [x.to(kind) if x.is_floating_point() else x for x in arguments(entry)]
    svi = SVI(*pair, pyro.optim.Adam({"lr": 1e-3}), Trace_ELBO())
    with pytest.raises(ValueError, match=rf"{kind}, but in 16 bits .*; call float\(\)"):
        svi.step(*inputs)
