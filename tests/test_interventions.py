"""Every entry as Pyro's users know models: condition, do, loops by hand, infer_discrete."""

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, infer_discrete
from variants import create, list_models, small_settings

from capsule_zoo.inference import intervene

NAMES = list_models()
BATCH = 4


def model_of(name):
    pyro.set_rng_seed(0)
    return create(name, **small_settings(name)).model.discretize().eval()


def prior(model, seed=1):
    """Return one prior draw of every latent site, by site in the order of the story."""
    torch.manual_seed(seed)
    nodes = poutine.trace(model).get_trace(batch_size=BATCH).nodes
    return {site.name: nodes[site.name]["value"] for site in model.sites}


SITES = [(name, site.name) for name in NAMES for site in model_of(name).sites]
SUPERVISED = [name for name in NAMES if model_of(name).supervised]


@pytest.mark.filterwarnings("ignore:.*with pixels outside of")  # noise of a draw may leave [0, 1]
@pytest.mark.parametrize("name", [name for name in NAMES if model_of(name).normalized])
def test_a_model_conditioned_on_its_own_draw_repeats_it(name):
    model = model_of(name)
    torch.manual_seed(1)
    free = poutine.trace(model).get_trace(batch_size=BATCH)
    drawn = {site: free.nodes[site]["value"] for site in free.stochastic_nodes}
    drawn = {site: value for site, value in drawn.items() if free.nodes[site]["type"] == "sample"}
    torch.manual_seed(2)
    told = poutine.trace(pyro.condition(model, drawn)).get_trace(batch_size=BATCH)
    by_site = {declared: drawn[declared.name] for declared in model.latent_sites}
    again = poutine.trace(poutine.condition(model, by_site)).get_trace(batch_size=BATCH)
    assert all(again.nodes[site.name]["is_observed"] for site in by_site)
    for site in (declared.name for declared in model.sites):
        assert told.nodes[site]["is_observed"]
        torch.testing.assert_close(told.nodes[site]["value"], drawn[site], equal_nan=True)
    torch.testing.assert_close(told.log_prob_sum(), free.log_prob_sum())


@pytest.mark.parametrize(("name", "site"), SITES)
def test_an_intervention_changes_what_comes_later_and_nothing_before(name, site):
    """The value of a site is taken from another draw, with the noise of all others held fixed."""
    model = model_of(name)
    before, other = prior(model, seed=1), prior(model, seed=2)
    torch.manual_seed(1)
    moved = pyro.do(model, {site: other[site]})
    nodes = poutine.trace(moved).get_trace(batch_size=BATCH).nodes
    names = [declared.name for declared in model.sites]
    for earlier in names[: names.index(site)]:
        assert torch.equal(nodes[earlier]["value"], before[earlier])
    observed = nodes[model.space.site]
    if model.supervised or not hasattr(observed["fn"], "mean"):
        return
    told = {**before, site: other[site]}
    means = []
    for values in (before, told):
        if "scene_presence" in values:  # an object that is absent changes nothing
            values["scene_presence"] = torch.ones_like(values["scene_presence"])
        torch.manual_seed(3)
        traced = poutine.trace(pyro.condition(model, values)).get_trace(batch_size=BATCH)
        means.append(traced.nodes[model.space.site]["fn"].mean)
    later = names[names.index(site) + 1 :]
    if not later:  # the image depends on the last site itself
        assert not torch.allclose(*means)


ACTIONS = [(name, site) for name, site in SITES if name not in SUPERVISED]


@pytest.mark.parametrize(("name", "site"), ACTIONS)
def test_every_guide_answers_what_the_image_would_have_been(name, site):
    """An action that changes nothing leaves the images; another one moves only what comes later."""
    pyro.set_rng_seed(0)
    entry = create(name, **small_settings(name))
    model = entry.model
    torch.manual_seed(1)
    nodes = poutine.trace(model.discretize().eval()).get_trace(batch_size=BATCH).nodes
    other, space = nodes[site]["value"], model.space
    observation = space.example(BATCH, torch.float32, torch.Generator().manual_seed(1))
    observation = (
        space.as_batch(nodes["points"]["value"]) if space.site == "points" else observation
    )
    names = [declared.name for declared in model.sites]
    for guide in map(entry.make_guide, entry.guides):
        same = intervene(model, guide, observation, {site: lambda value: value})
        torch.testing.assert_close(
            same.images[0], observation, equal_nan=True, atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(same.mean, same.reconstruction, equal_nan=True)
        torch.testing.assert_close(same.latents, same.inferred)
        intervention = intervene(model, guide, observation, {site: other}, num_samples=2)
        assert intervention.images.shape == intervention.mean.shape == (2, *observation.shape)
        assert torch.equal(intervention.latents[site], other.expand_as(intervention.latents[site]))
        for earlier in names[: names.index(site)]:
            assert torch.equal(intervention.latents[earlier], intervention.inferred[earlier])
        assert not any(value.isnan().any() for value in intervention.latents.values())
        if site == names[-1] and not torch.equal(intervention.inferred[site][0], other):
            assert not torch.equal(
                intervention.mean.nan_to_num(), intervention.reconstruction.nan_to_num()
            )


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_classifier_predicts_no_image(name):
    entry = create(name, **small_settings(name))
    images = entry.model.space.example(2, torch.float32, torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="explains labels and draws no images"):
        intervene(entry.model, entry.guide, images, {"label": 0})


@pytest.mark.parametrize("name", ["part-whole", "shape-codes"])
def test_infer_discrete_gives_the_likeliest_parents(name):
    """Temperature 0 gives the highest marginal of every choice, given the guide's draws."""
    pyro.set_rng_seed(0)
    entry = create(name, **{**small_settings(name), "selection": "enumerate"})
    model, guide = entry.model.double(), entry.guide.double()
    images = model.space.example(BATCH, torch.float64, torch.Generator().manual_seed(1))
    drawn = poutine.trace(guide).get_trace(images)
    values = {site: drawn.nodes[site]["value"] for site in guide.covers}
    conditional = pyro.condition(model, values)
    likeliest = infer_discrete(conditional, first_available_dim=-3, temperature=0)
    nodes = poutine.trace(likeliest).get_trace(images).nodes
    elbo = TraceEnum_ELBO(max_plate_nesting=2)
    marginals = elbo.compute_marginals(model, poutine.replay(guide, trace=drawn), images)
    assert marginals
    for site, distribution in marginals.items():
        scores = distribution.logits.squeeze()
        assert torch.equal(nodes[site]["value"].squeeze(), scores.argmax(-1)), site
        assert scores.shape[0] == BATCH
