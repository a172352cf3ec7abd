"""Small models whose evidence is known in closed form, on images of shape (B, 1, 2, 2)."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import constraints

from capsule_zoo import inference
from capsule_zoo.data import Dataset, Split
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference import Checks, Inputs, Pace, Run
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.common.spaces import ImageSpace


class Conjugate(Model):
    """A model with z ~ Normal(mean, 1) per image and four pixels ~ Normal(z, noise)."""

    sites = (Site("code", ("images",)),)
    space = ImageSpace((1, 2, 2))

    def __init__(self, noise: float = 0.5) -> None:
        super().__init__()
        self.noise = noise
        self.mean = nn.Parameter(torch.tensor(0.0))

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        size = batch_size if images is None else len(images)
        with pyro.plate("images", size, dim=-1):
            mean = self.code()[:, None, None, None].expand(-1, *self.image_shape)
            if labels is not None:
                self.explain(labels)
            return pyro.sample("image", dist.Normal(mean, self.noise).to_event(3), obs=images)

    def code(self) -> Tensor:
        """Draw the code of every image, (B,)."""
        return pyro.sample("code", dist.Normal(self.mean, 1.0))

    def explain(self, labels: Tensor) -> None:
        """Leave the labels unused: they carry no information here."""

    def log_evidence(self, images: Tensor) -> Tensor:
        """Compute log p(image), (B,): Normal with covariance noise^2 I + 1 1'."""
        covariance = self.noise**2 * torch.eye(4) + torch.ones(4, 4)
        distribution = dist.MultivariateNormal(self.mean.expand(4), covariance.to(images.dtype))
        return distribution.log_prob(images.flatten(1))

    def posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and scale of p(code | image), (B,) each."""
        variance = 1 / (1 + 4 / self.noise**2)
        mean = (self.mean + images.sum((1, 2, 3)) / self.noise**2) * variance
        return mean, torch.full_like(mean, math.sqrt(variance))


class Correlated(Model):
    """A model whose posterior is normal and correlated within a site and between two sites."""

    sites = (Site("place", ("images",), event_dim=1), Site("size", ("images",)))
    space = ImageSpace((1, 2, 2), (-math.inf, math.inf))

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.tensor(
            [[1.0, 0.8, 0.6], [1.0, 1.2, -0.4], [0.5, 0.9, 0.7], [-0.3, 0.2, 1.0]]
        )
        self.paint = nn.Parameter(numbers.double())

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        size = batch_size if images is None else len(images)
        zero = self.paint.new_zeros(())
        with pyro.plate("images", size, dim=-1):
            place = pyro.sample("place", dist.Normal(zero, 1.0).expand([2]).to_event(1))
            log_size = pyro.sample("size", dist.LogNormal(zero, 1.0)).log()
            latents = torch.cat([place, log_size[:, None]], -1)
            mean = (latents @ self.paint.T).view(-1, *self.image_shape)
            return pyro.sample("image", dist.Normal(mean, 0.5).to_event(3), obs=images)

    @property
    def precision(self) -> Tensor:
        """The precision (3, 3) of the posterior of place and log size."""
        return torch.eye(3).double() + self.paint.T @ self.paint / 0.25

    def log_evidence(self, images: Tensor) -> Tensor:
        """Compute log p(image), (B,): Normal with covariance paint paint' + I / 4."""
        covariance = self.paint @ self.paint.T + 0.25 * torch.eye(4).double()
        distribution = dist.MultivariateNormal(self.paint.new_zeros(4), covariance)
        return distribution.log_prob(images.flatten(1))


class Labelaw(Conjugate):
    """A model whose labels, if given, have a distribution that ignores the image."""

    def explain(self, labels: Tensor) -> None:
        pyro.sample("label", dist.Bernoulli(torch.tensor(0.25).double()), obs=labels.double())


class LabelFactor(Labelaw):
    """A model with labels as a factor, as in the margin loss of a capsule network."""

    def explain(self, labels: Tensor) -> None:
        pyro.factor("label", labels.double())


class LinearGuide(Guide):
    """A guide Normal(slope * sum(x) + offset, scale), started away from the posterior."""

    covers = ("code",)

    def __init__(self, model: Conjugate) -> None:
        super().__init__(model)
        self.slope = nn.Parameter(torch.tensor(0.1))
        self.offset = nn.Parameter(torch.tensor(0.0))
        self.scale = PyroParam(torch.tensor(0.5), constraint=constraints.positive)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        with pyro.plate("images", len(images), dim=-1):
            mean = self.slope * images.sum((1, 2, 3)) + self.offset
            pyro.sample("code", dist.Normal(mean, self.scale))


class ExactGuide(Guide):
    """A guide that is the exact posterior."""

    covers = ("code",)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Normal(*self.model.posterior(images)))


class PointGuide(Guide):
    """A guide with a Delta at slope * sum(x): without a density, and so without a bound."""

    covers = ("code",)

    def __init__(self, model: Conjugate) -> None:
        super().__init__(model)
        self.slope = nn.Parameter(torch.tensor(0.1))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Delta(self.slope * images.sum((1, 2, 3))))


class BernoulliMixture(Model):
    """A model with kind ~ Categorical(3), summed out or not, and pixels ~ Bernoulli(p[kind])."""

    space = ImageSpace((1, 2, 2))

    def __init__(self, enumerated: bool = True) -> None:
        super().__init__()
        self.enumerated = enumerated
        self.sites = (Site("kind", ("images",), discrete=True, enumerated=enumerated),)
        self.logits = nn.Parameter(torch.randn(3))
        self.pixel_logits = nn.Parameter(torch.randn(3, 1, 2, 2))

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        size = batch_size if images is None else len(images)
        infer = {"enumerate": "parallel"} if self.enumerated else {}
        with pyro.plate("images", size, dim=-1):
            kind = pyro.sample("kind", dist.Categorical(logits=self.logits), infer=infer)
            pixels = dist.Bernoulli(logits=self.pixel_logits[kind]).to_event(3)
            return pyro.sample("image", pixels, obs=images)

    def log_evidence(self, images: Tensor) -> Tensor:
        """Compute log p(image), (B,): log p(image), (B,), summed over kinds by hand."""
        pixels = dist.Bernoulli(logits=self.pixel_logits).log_prob(images[:, None]).sum((2, 3, 4))
        return torch.logsumexp(self.logits.log_softmax(0) + pixels, 1)


class NoGuide(Guide):
    """A guide without sites, for models with every latent site summed out."""

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        pass


def gradients(loss: Tensor, *modules: nn.Module) -> Tensor:
    """Return the gradient of a loss by all parameters of the modules, zero where it has none."""
    parameters = [p for module in modules for p in module.parameters()]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(grads, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def conjugate_images(number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return images in [0, 1] with a shared brightness, (number, 1, 2, 2)."""
    brightness = torch.rand(number, 1, 1, 1, dtype=dtype)
    return (brightness + 0.1 * torch.randn(number, 1, 2, 2, dtype=dtype)).clamp(0, 1)


def binary_images(number: int) -> Tensor:
    """Return images (number, 1, 2, 2) of zeros and ones, in float64."""
    return torch.randint(2, (number, 1, 2, 2)).double()


class Items(torch.utils.data.Dataset):
    """Single images, or images with their labels, counted as they are read."""

    def __init__(self, *columns) -> None:
        self.columns = columns
        self.read = 0

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, number: int):
        self.read += 1
        item = tuple(column[number] for column in self.columns)
        return item if len(item) > 1 else item[0]


QUIET: dict = {"progress": False, "batch_size": 16, "lr": 0.02}  # settings of short runs of `fit`


def grouped(settings: dict) -> dict:
    """Return settings of `fit` by their own names as its arguments, sorted into their groups."""
    kinds = {"pace": Pace, "inputs": Inputs, "checks": Checks}
    fields = {kind: {field.name for field in dataclasses.fields(kind)} for kind in kinds.values()}
    groups = {k: v for k, v in settings.items() if not any(k in names for names in fields.values())}
    for name, kind in kinds.items():
        groups[name] = kind(**{k: v for k, v in settings.items() if k in fields[kind]})
    return groups


def fit(*pair_and_data, **settings) -> Run:
    """Call `fit` with settings by their own names, which tests vary one by one."""
    return inference.fit(*pair_and_data, **grouped(settings))


def pair(seed: int = 1) -> tuple[Conjugate, LinearGuide]:
    """Return a conjugate model and its linear guide, in float64."""
    torch.manual_seed(seed)
    model = Conjugate().double()
    return model, LinearGuide(model).double()


def on_toys(call: Callable, *arguments: object, **settings: object) -> object:
    """Return what a verb makes of the linear pair, of three images and of further arguments."""
    return call(*pair(), conjugate_images(3), *arguments, **settings)


def dataset(number: int = 60) -> Dataset:
    """Return conjugate images: `number` to train on, and 20 held-out ones."""

    def split(n):
        return Split(conjugate_images(n), torch.zeros(n, dtype=torch.int64))

    return Dataset("toy", split(number), split(20), split(20))


def states(*modules: nn.Module) -> dict[str, Tensor]:
    """Return copies of all tensors that the modules hold."""
    return {f"{i}.{n}": v.clone() for i, m in enumerate(modules) for n, v in m.state_dict().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Check that two sets of tensors have the same names and are equal bit for bit."""
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


class Parts(Model):
    """Two parts with a presence and a pose, which is a hundred times wider if it is absent."""

    sites = (
        Site("part_presence", ("images", "parts"), discrete=True),
        Site("part_pose", ("images", "parts"), event_dim=1),
    )
    plate_dims = {"images": -2, "parts": -1}
    space = ImageSpace((1, 2, 2), (-math.inf, math.inf))
    scales = 3.0, 0.03

    def __init__(self, noise: float = 0.3) -> None:
        super().__init__()
        self.noise = noise
        self.mean = nn.Parameter(torch.tensor([[0.8], [-0.5]]).double())
        self.bumps = torch.tensor([[1.0, 0, 0, 0.4], [0, -0.6, 0.9, 0]]).double()
        self.presence = torch.tensor([0.4, 0.6]).double()

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        with pyro.plate("images", batch_size if images is None else len(images), dim=-2):
            with pyro.plate("parts", 2, dim=-1):
                part_presence = pyro.sample("part_presence", dist.Bernoulli(self.presence))
                scale = (
                    part_presence[..., None] * (self.scales[1] - self.scales[0]) + self.scales[0]
                )
                pose = pyro.sample("part_pose", dist.Normal(self.mean, scale).to_event(1))
            mean = ((part_presence * pose[..., 0]) @ self.bumps)[:, None]
            distribution = dist.Normal(mean.unflatten(-1, (1, 2, 2)), self.noise).to_event(3)
            observed = None if images is None else images[:, None]
            return pyro.sample("image", distribution, obs=observed).squeeze(1)

    def log_evidence(self, images: Tensor) -> Tensor:
        """Compute log p(image), (B,), as a sum over the presences."""
        terms = []
        for present in itertools.product((0, 1), (0, 1)):
            on = torch.tensor(present).double()
            bumps = on[:, None] * self.bumps
            covariance = (
                self.noise**2 * torch.eye(4).double() + self.scales[1] ** 2 * bumps.T @ bumps
            )
            distribution = dist.MultivariateNormal(self.mean[:, 0] @ bumps, covariance)
            prior = dist.Bernoulli(self.presence).log_prob(on).sum()
            terms.append(prior + distribution.log_prob(images.flatten(1)))
        return torch.stack(terms).logsumexp(0)


class PartsGuide(Guide[Parts]):
    """A guide to `Parts` that takes nearly every part for absent, and its pose for far away."""

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        with pyro.plate("images", len(images), dim=-2), pyro.plate("parts", 2, dim=-1):
            pyro.sample("part_presence", dist.Bernoulli(self.model.presence.new_tensor(0.2)))
            at = self.model.mean.detach() + 0.5
            pyro.sample("part_pose", dist.Normal(at, 2.5).to_event(1))
