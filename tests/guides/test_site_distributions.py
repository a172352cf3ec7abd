"""A free-form guide serves every kind of site, from what the model declares and draws."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from machines import shifted
from pyro import poutine

from capsule_zoo.guides import FreeForm, Guide
from capsule_zoo.inference import check_pair, evaluate
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.models import Model, Site
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.generative_capsnet import LogRelaxedOneHot
from capsule_zoo.models.parts.parent_selection import LogitRelaxedBernoulli
from capsule_zoo.models.units.exponential_family import FastBernoulli

HALF = torch.tensor(0.5, dtype=torch.float64)
DISTRIBUTIONS = {
    "real": dist.Normal(torch.zeros(3).double(), 1.0).to_event(1),
    "positive": dist.LogNormal(torch.zeros(()).double(), 1.0),
    "bounded": dist.Uniform(-torch.ones(2).double(), 2.0).to_event(1),
    "simplex": dist.Dirichlet(2 * torch.ones(3).double()),
    "switch": FastBernoulli(logits=torch.zeros(4).double()).to_event(1),
    "kind": dist.OneHotCategorical(logits=torch.zeros(3).double()),
    "choice": dist.Categorical(logits=torch.zeros(3).double()),
    "relaxed_switch": LogitRelaxedBernoulli(HALF, logits=torch.zeros(()).double()),
    "relaxed_kind": LogRelaxedOneHot(HALF, logits=torch.zeros(3).double()),
}
DISCRETE = ("switch", "kind", "choice")


class AllKinds(Model):
    """One site of every kind that the zoo or its users may have; all shift the image."""

    space = ImageSpace((1, 2, 2), (-torch.inf, torch.inf))
    distributions = DISTRIBUTIONS

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(
            Site(name, ("images",), distribution.event_dim, discrete=name in DISCRETE)
            for name, distribution in self.distributions.items()
        )

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1) as rows:
            values = [
                pyro.sample(name, distribution) for name, distribution in self.distributions.items()
            ]
            total = sum(v.double().reshape(len(rows), -1).sum(1) for v in values)
            mean = total[:, None, None, None].expand(-1, 1, 2, 2)
            return pyro.sample("image", dist.Normal(mean, 1.0).to_event(3), obs=images)


class Points(Guide):
    """The same value of every site for all images."""

    def __init__(self, model, values):
        super().__init__(model)
        self.values = values

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            for site in self.model.latent_sites:
                value = self.values[site.name].expand(len(images), *self.values[site.name].shape)
                pyro.sample(site.name, dist.Delta(value, event_dim=site.event_dim))


@pytest.fixture
def images():
    return torch.randn(3, 1, 2, 2, dtype=torch.float64)


@pytest.mark.parametrize("distribution", ["delta", "normal"])
def test_every_kind_of_site_is_served(images, distribution):
    model = AllKinds()
    guide = refine(model, None, images, steps=6, distribution=distribution)
    assert (guide.refinement.end >= guide.refinement.start).all()
    assert guide.refinement.end.isfinite().all()
    check_pair(model, guide, images)
    nodes = poutine.trace(guide).get_trace(images).nodes
    for name, prior in DISTRIBUTIONS.items():
        assert prior.support.check(nodes[name]["value"]).all(), name
    idata = evaluate(model, guide, images, num_particles=3, discrete=False)
    assert bool(torch.as_tensor(idata.sample_stats.log_weight.values).isfinite().all())
    assert idata.attrs["is_bound"] == (distribution == "normal")


@pytest.mark.parametrize("distribution", ["delta", "normal"])
def test_it_starts_at_the_values_of_another_guide(images, distribution):
    """Points become centers; of a discrete value, the start finds it the likeliest."""
    values = {name: prior.sample() for name, prior in DISTRIBUTIONS.items()}
    model = AllKinds()
    free = FreeForm(model, images, Points(model, values), distribution)
    nodes = poutine.trace(free).get_trace(images).nodes
    for name in ("real", "positive", "bounded", "simplex"):
        drawn = nodes[name]["value"]
        near = 0 if distribution == "delta" else 0.5
        torch.testing.assert_close(drawn, values[name].expand_as(drawn), atol=near + 1e-9, rtol=0)
    assert torch.equal((free.logits["switch"] > 0).double()[0], values["switch"])
    assert torch.equal(free.logits["kind"][0].argmax(), values["kind"].argmax())
    assert torch.equal(free.logits["choice"][0].argmax(), values["choice"])
    for name in ("relaxed_switch", "relaxed_kind"):
        assert torch.equal(free.logits[name][0], values[name])


def test_it_starts_at_the_distributions_of_another_free_form_guide(images):
    """Normal distributions in unconstrained coordinates, and logits, are taken over as they are."""
    model = AllKinds()
    first = shifted(FreeForm(model, images, distribution="normal"), 0.1)
    again = dict(FreeForm(model, images, first, "normal").named_parameters())
    for name, parameter in first.named_parameters():
        value, expected = again[name], parameter
        if name in ("logits.kind", "logits.choice", "logits.relaxed_kind"):
            value, expected = value.log_softmax(-1), parameter.log_softmax(-1)
        torch.testing.assert_close(value, expected, msg=name)
