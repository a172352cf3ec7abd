"""Pyro's NUTS runs on models of the zoo: discrete sites are summed out, or given."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.mcmc.util import initialize_model
from torch import Tensor
from toys import Conjugate, conjugate_images, pair

from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.settings import configure

FIXED: dict = dict(step_size=0.1, adapt_step_size=False)


def draws(model, images: Tensor, number: int, warmup: int, **options) -> dict[str, Tensor]:
    """Return draws (number, ...) of every continuous site, by name."""
    with use_seed(0):
        kernel = NUTS(model, **{"max_tree_depth": 3, **options})
        sampler = MCMC(kernel, number, warmup_steps=warmup, disable_progbar=True)
        sampler.run(images)
        return sampler.get_samples()


def test_moments_of_nuts_are_those_of_the_exact_posterior():
    model, _ = pair()
    model.requires_grad_(False)
    images = conjugate_images(4)
    samples = draws(model, images, 150, 40)["code"]
    mean, scale = model.posterior(images)
    error = scale / 40**0.5  # 150 draws of a chain are worth at least 40
    assert ((samples.mean(0) - mean).abs() < 4 * error).all()
    torch.testing.assert_close(samples.std(0), scale, rtol=0.35, atol=0)


class Levels(Conjugate):
    """A code, and a kind that decides its sign; the kind is enumerated, or summed out by hand."""

    enumerated = True

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        fraction = torch.tensor([0.8, 0.2]).double()
        signs = torch.tensor([1.0, -1.0]).double()
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            code = pyro.sample("code", dist.Normal(self.mean, 1.0))
            if self.enumerated:
                infer = {"enumerate": "parallel"}
                kind = pyro.sample("kind", dist.Categorical(fraction), infer=infer)
                mean = (signs[kind] * code)[..., None, None, None].expand(
                    *(signs[kind] * code).shape, *self.image_shape
                )
                distribution = dist.Normal(mean, self.noise).to_event(3)
            else:
                mean = (signs * code[..., None])[..., None, None, None]
                distribution = dist.MixtureSameFamily(
                    dist.Categorical(fraction.expand(len(code), 2)),
                    dist.Normal(mean.expand(-1, -1, *self.image_shape), self.noise).to_event(3),
                )
            return pyro.sample("image", distribution, obs=images)


def test_a_discrete_site_is_summed_out():
    """NUTS moves on the same potential whether Pyro enumerates the kind or the model sums it."""
    model = Levels().double().requires_grad_(False)
    images = conjugate_images(2)
    assert draws(model, images, 3, 0, max_plate_nesting=1, **FIXED).keys() == {"code"}
    codes = torch.randn(4, 2).double()
    potentials = []
    for enumerated in (True, False):
        model.enumerated = enumerated
        potential = initialize_model(model, (images,), max_plate_nesting=1)[1]
        potentials.append(torch.stack([potential({"code": code}) for code in codes]))
    torch.testing.assert_close(*potentials)


def test_presences_are_given_and_parents_are_summed_out():
    torch.manual_seed(0)
    sizes = dict(objects=2, parts=2, template_size=4, image_shape=(1, 8, 8), presence="discrete")
    model = configure(PartWholeCapsules, **sizes).double().requires_grad_(False)
    with pyro.validation_enabled(False):
        trace = poutine.trace(model).get_trace(batch_size=1)
    presences = {name: trace.nodes[name]["value"] for name in ("object_presence", "part_presence")}
    image = trace.nodes["image"]["value"][:, 0].clamp(0, 1)
    samples = draws(
        poutine.condition(model, presences), image, 4, 0, step_size=1e-3, adapt_step_size=False
    )
    assert samples.keys() == {"object_pose", "part_pose"}
    assert all(
        value.isfinite().all() and len(value.unique(dim=0)) > 1 for value in samples.values()
    )
