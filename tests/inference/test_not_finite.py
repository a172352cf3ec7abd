"""Distributions that are not finite for one image: a guide is refused in one line, or repaired."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from toys import Conjugate, LinearGuide, conjugate_images

from capsule_zoo.guides import Guide
from capsule_zoo.inference import IncompatibleGuide, SemiAmortized, check_pair, compare, evaluate
from capsule_zoo.inference.annealing import annealed_log_likelihood
from capsule_zoo.inference.annealing.path import simulate
from capsule_zoo.inference.evaluation.evaluate import chain_seed
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.inference.not_finite import NonFiniteGuide
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.posterior.widen import widen
from capsule_zoo.models.base import Site
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.common.spaces import ImageSpace


class Bright(Conjugate):
    """A conjugate model of images whose pixels may be negative."""

    space = ImageSpace((1, 2, 2), (-math.inf, math.inf))


class Roots(Guide[Bright]):
    """A guide that takes the root of the mean pixel, which dark images do not have."""

    covers = ("code",)
    point = False

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        root = images.mean((1, 2, 3)).sqrt()
        with pyro.plate("images", len(images), dim=-1), pyro.validation_enabled(False):
            pyro.sample("code", dist.Delta(root) if self.point else dist.Normal(root, 0.3))


class Points(Roots):
    """The same as points."""

    point = True


@pytest.fixture
def dark():
    """Return a model, a guide that is NaN for one image, and images of which number 3 is dark."""
    torch.manual_seed(0)
    model, images = Bright().double(), conjugate_images(5) + 0.1
    images[3] -= 2
    return model, Roots(model), images


REFUSED = r"is not finite at site 'code' for image 3 of 5; use another guide"


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("distribution", ["delta", "normal", "low_rank", "corrected"])
def test_refinement_from_nan_is_refused_and_names_image_and_site(dark, distribution, validated):
    model, guide, images = dark
    with pyro.validation_enabled(validated), pytest.raises(NonFiniteGuide, match=REFUSED):
        refine(model, guide, images, steps=4, distribution=distribution)
    subset = images[[0, 1, 2, 4]]
    fitted = refine(model, guide, subset, steps=4, distribution=distribution)
    assert fitted.refinement.end.isfinite().all()


@pytest.mark.parametrize("kind", ["free_form", "gauss_newton"])
def test_semi_amortized_guides_name_the_image_of_the_caller(dark, kind):
    """They sort the images, so that the dark one is the first inside."""
    _, guide, images = dark
    with pytest.raises(NonFiniteGuide, match=REFUSED):
        SemiAmortized(guide, 4, kind=kind)(images)
    with pytest.raises(NonFiniteGuide, match=REFUSED):
        evaluate(guide.model, SemiAmortized(guide, 4, kind=kind), images, batch_size=3)


def test_a_gauss_newton_distribution_is_refused_and_a_mixture_leaves_the_mode_out(dark):
    model, guide, images = dark
    with pytest.raises(NonFiniteGuide, match=rf"Gauss-Newton distribution of Bright {REFUSED}"):
        gauss_newton(model, guide, images, steps=4)
    mixture = gauss_newton(model, guide, images, steps=4, modes=3)
    log_weight, *_ = log_weights(model, mixture, images)
    torch.testing.assert_close(log_weight, model.log_evidence(images), rtol=0, atol=1e-8)


class Snedecor(Bright):
    """A model whose prior has neither a mean nor a Fisher information that is known here."""

    sites = (Site("code", ("images",)), Site("factor", ("images",)))

    def code(self) -> Tensor:
        two = self.mean + 2
        return super().code() * pyro.sample("factor", dist.FisherSnedecor(two, two))


@pytest.mark.parametrize("modes", [1, 2])
def test_a_prior_without_variance_is_named(dark, modes):
    model = Snedecor().double()
    match = r"of Snedecor is not finite at site 'factor' for images 0, 1, 2, 3, 4 of 5"
    with pytest.raises(NonFiniteGuide, match=match) as caught:
        gauss_newton(model, None, dark[2], steps=4, modes=modes)
    assert (caught.value.images, caught.value.site) == ([0, 1, 2, 3, 4], "factor")


class Wide(Bright):
    """A model whose image says nothing of a positive factor, so that draws of it overflow."""

    sites = (Site("factor", ("images",)), Site("code", ("images",)))

    def code(self) -> Tensor:
        flat = dist.Normal(self.mean, 1000.0)
        pyro.sample("factor", dist.TransformedDistribution(flat, [dist.transforms.ExpTransform()]))
        return super().code()


def test_a_distribution_whose_draws_overflow_is_refused(dark):
    model = Wide().double()
    with pytest.raises(
        NonFiniteGuide, match=r"Wide is not finite at site 'factor' for images 0, 1"
    ):
        gauss_newton(model, None, dark[2], steps=4)


@pytest.mark.parametrize("validated", [True, False])
def test_an_evaluation_names_image_and_site(dark, validated):
    """Also in a later pass, and without Pyro's validation, which shows all numbers instead."""
    model, guide, images = dark
    settings = dict(num_particles=7, batch_size=2)
    with pyro.validation_enabled(validated), pytest.raises(NonFiniteGuide, match=REFUSED):
        evaluate(model, guide, images, **settings)
    pairs = {"linear": (model, LinearGuide(model).double()), "roots": (model, guide)}
    with pytest.raises(NonFiniteGuide, match=f"Roots of Bright {REFUSED}"):
        compare(pairs, images)
    with pytest.raises(NonFiniteGuide, match=REFUSED):
        annealed_log_likelihood(model, guide, images, simulated=0, chains=2, temperatures=2)


@pytest.mark.parametrize("check", [check_pair, evaluate, widen])
def test_a_pair_that_is_not_finite_at_once_is_refused_in_one_line(dark, check):
    model, _, images = dark
    match = r"does not fit Bright: the log density is not finite at site 'code' for image 0 of"
    with pytest.raises(IncompatibleGuide, match=match) as caught:
        check(model, Points(model), images[[3, 1, 2]])
    assert "\n" not in str(caught.value).partition("Guides made")[0].strip()


class Overflowing(Bright):
    """A model whose density is not a number for a large code; chains move there."""

    def code(self) -> Tensor:
        code = super().code()
        return torch.where(code > 1, math.inf, code) - torch.where(code > 1, math.inf, 0 * code)


def test_chains_that_are_not_finite_are_refused(dark):
    settings = dict(chains=30, temperatures=3, leapfrogs=1, simulated=0)
    with pytest.raises(
        NonFiniteGuide, match=r"annealing of Overflowing from 'prior' is not finite"
    ):
        annealed_log_likelihood(Overflowing().double(), None, dark[2], **settings)


def test_a_guide_that_is_not_finite_for_simulated_images_says_so(dark):
    """All given images are bright; some of those that the model draws are dark."""
    model, guide, images = dark
    start = SemiAmortized(guide, 2, kind="gauss_newton")
    settings = dict(chains=2, temperatures=2, leapfrogs=1, batch_size=2)
    match = r"Bright, to simulated images, is not finite at site 'code' for image \d of 5"
    with pytest.raises(NonFiniteGuide, match=match) as caught:
        annealed_log_likelihood(model, start, images[[0, 1, 2, 4]], simulated=5, **settings)
    with use_seed(chain_seed(0, 3)):
        drawn, _ = simulate(model, 5)
    assert caught.value.images == [(drawn.mean((1, 2, 3)) < 0).tolist().index(True)]
