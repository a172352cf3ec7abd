"""Plates to the left of images, and parameters that are a PyroSample."""

import arviz
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_sample
from pyro.nn import PyroSample

from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.models import CapsuleRBM, PartWholeCapsules
from capsule_zoo.models.networks.layers import BalancedLogits
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.models.parts.pixel_mixture import PixelMixture
from capsule_zoo.models.parts.templates import warp_templates
from capsule_zoo.settings import configure

NETWORKS = dict(channels=4, width=8, heads=2, blocks=1, inducing=2)
IMAGES = torch.rand(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def part_whole_pair(objects: int, parts: int) -> tuple[PartWholeCapsules, PartWholeGuide]:
    model = PartWholeCapsules(
        (1, 8, 8),
        objects=objects,
        parts=parts,
        presence="discrete",
        painting=Painting(template_size=3, sigma_image=1.0),
    ).double()
    return model, configure(PartWholeGuide, model, **NETWORKS).double().eval()


def test_parents_are_enumerated_under_particles_as_they_are_marginalized():
    model, guide = part_whole_pair(2, 3)
    model = model.sharing_parameters(presence="relaxed")
    guide = guide.sharing_parameters(_model=(model,))
    losses = []
    for selection in ("marginal", "enumerate"):
        torch.manual_seed(0)
        variant = model.with_selection(selection)
        objective = TraceEnum_ELBO if selection == "enumerate" else Trace_ELBO
        particles = objective(num_particles=3, vectorize_particles=True, max_plate_nesting=2)
        losses.append(particles.loss(variant, guide, IMAGES))
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


def relaxed_model(**options) -> PartWholeCapsules:
    sizes = dict(objects=2, parts=3, image_shape=(1, 8, 8), template_size=3)
    return configure(PartWholeCapsules, **{**sizes, **options}).double()


def nuts(model: PartWholeCapsules, samples: int) -> MCMC:
    kernel = NUTS(model, max_tree_depth=2, init_strategy=init_to_sample)
    chain = MCMC(kernel, num_samples=samples, warmup_steps=2, disable_progbar=True)
    chain.run(IMAGES)
    return chain


@pytest.mark.skipif(not hasattr(arviz, "from_pyro"), reason="arviz 1 does not read Pyro's chains")
def test_arviz_keeps_the_log_likelihood_of_a_chain():
    model = relaxed_model()
    chain = nuts(model, 4)  # the fewest that Pyro's diagnostics take
    log_probs = arviz.from_pyro(chain).log_likelihood["image"].values
    assert log_probs.shape == (1, 4, 2, 1)
    for k in range(4):
        values = {name: draws[k] for name, draws in chain.get_samples().items()}
        trace = poutine.trace(poutine.condition(model, values)).get_trace(IMAGES)
        trace.compute_log_prob()
        expected = trace.nodes["image"]["log_prob"].detach()
        torch.testing.assert_close(
            torch.as_tensor(log_probs[0, k]), expected, rtol=1e-10, atol=1e-8
        )


def make_bayesian(model: PartWholeCapsules, **names: int) -> None:
    """Give parameters of the model, by name and rank, a normal prior about their values."""
    for path, rank in names.items():
        *modules, name = path.split("__")
        owner = model.get_submodule(".".join(modules))
        prior = dist.Normal(getattr(owner, name).detach(), 0.3).to_event(rank)
        setattr(owner, name, PyroSample(prior))


def site_of(model: PartWholeCapsules, path: str) -> str:
    """Return the sample site of a parameter; its name begins with the name of the module."""
    return f"{model._pyro_name}.{path.replace('__', '.')}"


EVERY_PARAMETER = dict(
    template_logits=4,
    presence_logits=1,
    background_logits=3,
    selections__0__log_affinity=2,
    selections__0__presence_logits=2,
    selections__0__transform=3,
    selections__0__raw_scale=2,
)


@pytest.mark.parametrize("likelihood", ["composite", "mixture"])
def test_bayesian_parameters_under_an_outer_plate_are_parameters_of_each_index(likelihood):
    model = relaxed_model(background="learned", likelihood=likelihood, instances=2)
    make_bayesian(model, **EVERY_PARAMETER)
    assert not list(model.parameters())
    with pyro.plate("outer", 3, dim=-3):
        joint = poutine.trace(model).get_trace(IMAGES)
    joint.compute_log_prob()
    latents = {n: s for n, s in joint.nodes.items() if s["type"] == "sample"}
    latents = {n: s for n, s in latents.items() if n not in ("outer", "images", "objects", "parts")}
    assert len(latents) == 5 + len(EVERY_PARAMETER)
    for k in range(3):
        values = {n: s["value"][k] for n, s in latents.items() if n != "image"}
        for path, rank in EVERY_PARAMETER.items():  # outside the inner plates: (3, 1, 1, *event)
            name = site_of(model, path)
            values[name] = values[name].reshape(values[name].shape[-rank:])
        alone = poutine.trace(poutine.condition(model, values)).get_trace(IMAGES)
        alone.compute_log_prob()
        for name, site in latents.items():
            log_probs, expected = site["log_prob"][k], alone.nodes[name]["log_prob"]
            torch.testing.assert_close(
                log_probs, expected.expand_as(log_probs), rtol=1e-10, atol=1e-10, msg=name
            )


@pytest.mark.parametrize("vectorized", [False, True])
def test_bayesian_templates_train_with_an_autoguide(vectorized):
    model = relaxed_model()
    make_bayesian(model, template_logits=4)
    guide = AutoNormal(model)
    objective = Trace_ELBO(num_particles=2, vectorize_particles=vectorized, max_plate_nesting=2)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), objective)
    svi.step(IMAGES)
    (location,) = (p for n, p in guide.named_parameters() if "locs" in n and "template" in n)
    before = location.detach().clone()
    svi.step(IMAGES)
    assert before.shape == (3, 2, 3, 3)
    assert (location != before).all()


def test_a_gibbs_chain_runs_for_every_outer_index():
    model = CapsuleRBM(16, 3, 2, sweeps=3)
    started = []
    model.gibbs = lambda images, steps: started.append(images) or images
    with pyro.plate("outer", 3, dim=-4):
        drawn = model(batch_size=2)
    assert drawn.shape == (3, 1, 2, 1, 4, 4)
    (images,) = started
    assert images.shape == (6, 1, 4, 4)


def test_balanced_logits_have_statistics_for_every_outer_index():
    logits = torch.randn(3, 6, 4, dtype=torch.float64)
    together, alone = (BalancedLogits(4).double() for _ in range(2))
    output = together(logits)
    before = alone.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    means = []
    for k in range(3):
        alone.load_state_dict(before)
        torch.testing.assert_close(output[k], alone(logits[k]), rtol=1e-10, atol=1e-10)
        means.append(alone.running_mean.clone())
    torch.testing.assert_close(together.running_mean, torch.stack(means).mean(0))
    torch.testing.assert_close(together.eval()(logits)[1], together(logits[1]))


def test_templates_of_every_outer_index_are_warped_by_its_own_poses():
    paint, pose = torch.rand(2, 1, 3, 2, 4, 4), torch.randn(2, 5, 3, 6)
    layers = warp_templates(paint, pose, (6, 7))
    expected = torch.cat([warp_templates(paint[k, 0], pose[k], (6, 7)) for k in range(2)], dim=2)
    torch.testing.assert_close(layers, expected)


def test_a_pixel_mixture_expands_as_other_distributions_do():
    color, weight = torch.rand(3, 2, 4, 5, 6), torch.rand(3, 1, 4, 5, 6)
    distribution = PixelMixture(color, weight, 0.2)
    wide = distribution.expand(torch.Size([7, 4, 1]))
    value = wide.sample()
    assert value.shape == (7, 4, 1, 2, 5, 6)
    log_probs = torch.stack([distribution.log_prob(v) for v in value])
    torch.testing.assert_close(wide.log_prob(value), log_probs)
    torch.testing.assert_close(distribution.log_prob(value), log_probs)
    torch.testing.assert_close(wide.mean[3], distribution.mean)
