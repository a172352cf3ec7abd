"""Capsule RBM: a restricted Boltzmann machine whose hidden units come in switched groups.

Story. Each capsule is a group of hidden units with a switch. A capsule that is on acts on the
image as an RBM does. A capsule that is off has no effect. The energy of an image x with hidden
units h_k and switches z_k is

    -E(x, h, z) = a.x + log f(x) + sum_k [b_k.h_k + log g(h_k)] + c.z       # independent units
                + sum_k z_k x'W_k h_k + x'Omega z                           # what couples them

and the joint density is exp(-E) / Z. As a Pyro model it is drawn from the top, with a factor that
makes the product the unnormalized joint (A is the log-partition of the visible units):

    z_k ~ Bernoulli(c_k)                                                    # (B, K)
    h_k ~ family(b_k)                                                       # (B, K, J)
    phi = sum_k z_k W_k h_k + Omega z                                       # (B, C, H, W)
    factor A(a + phi) - A(a)
    x   ~ family(a + phi)                                                   # p(x | h, z)

This is exp(-E) over the partition functions of the independent units (`log_base_partition`).

Given x the energy is a sum over capsules, so everything that the paper approximates is exact here.
With m_k = W_k'x, and B the log-partition of the hidden units,

    z_k | x      ~ Bernoulli(c_k + Omega_k.x + sum_j [B(b_kj + m_kj) - B(b_kj)])
    h_k | z_k, x ~ family(b_k + z_k m_k)
    F(x) = -a.x - log f(x) - sum_j B(b) - sum_k log[1 + exp(logit of z_k | x)]  # -log sum exp(-E)

so that the two blocks x and (z, h) make an exact Gibbs chain. With one capsule whose switch is
always on it is an RBM (`RBM`); with Gaussian x and h it is a spike-and-slab RBM.

References:
    Li & Zhu 2019, "Capsule Generative Models" (ICANN): the energy is theirs; they
    infer by mean field, which can have two fixed points (`MeanFieldSwitches`).
    Courville, Bergstra & Bengio 2011, "A Spike and Slab Restricted Boltzmann Machine": the
    special case. Welling, Rosen-Zvi & Hinton 2004, "Exponential Family Harmoniums": the families.
"""

import math

import pyro
import torch
import torch.nn.functional as F
from pyro.nn import pyro_method
from torch import Tensor, nn

from capsule_zoo.models.base import Site
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.plates import outer_sizes
from capsule_zoo.models.networks.leading import unflat_batch
from capsule_zoo.models.units.exponential_family import GaussianUnits, PoissonUnits, make_units
from capsule_zoo.models.units.switched_units import (
    CapsuleDistribution,
    CapsuleMachine,
    CapsuleState,
    Fields,
    capsule_distribution,
    capsule_sites,
    draw_capsules,
)

COUPLING_LIMIT = 0.95  # at 1 and above a Gaussian-Gaussian machine has no partition function


class CapsuleRBM(CapsuleMachine):
    """The capsule RBM, described at the top of this file.

    Args:
        image_shape: (channels, height, width), or a square number of pixels.
        capsules: number of capsules, K.
        units: hidden units of a capsule, J.
        visible_family: distribution of pixels, "bernoulli" (which may be gray), "gaussian" or
            "poisson". Gaussian pixels with Poisson hidden units, or the reverse, have no partition
            function and are refused.
        hidden_family: distribution of hidden units, "bernoulli", "gaussian" or "poisson".
        sweeps: Gibbs sweeps that the model runs for a draw without images.

    Raises:
        ValueError: a size below 1, an unknown family, a pair of families without a partition
            function.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the image (B, C, H, W).
    With images its trace is the unnormalized joint. Without images there is no prior to draw
    from, so the model runs a Gibbs chain from the visible biases. Its trace is then the last
    sweep of the chain.
    """

    plate_dims = {"images": -2, "capsules": -1}
    normalized = False

    def __init__(
        self,
        image_shape: int | tuple[int, int, int] = (1, 28, 28),
        capsules: int = 40,
        units: int = 16,
        *,
        visible_family: str = "bernoulli",
        hidden_family: str = "bernoulli",
        sweeps: int = 100,
    ) -> None:
        super().__init__(image_shape, visible_family)
        check_at_least(1, capsules=capsules, units=units, sweeps=sweeps)
        if {visible_family, hidden_family} == {"gaussian", "poisson"}:
            raise ValueError(
                "visible_family and hidden_family may not be one Gaussian and one Poisson: their "
                "joint has no partition function; use Bernoulli units on one side"
            )
        self.hidden = make_units("hidden_family", hidden_family, capsules, units)
        self.sweeps = sweeps
        pixels = math.prod(self.image_shape)
        self.weight = nn.Parameter(0.01 * torch.randn(pixels, capsules, units))  # W
        if self.switched:
            self.switch_weight = nn.Parameter(torch.zeros(pixels, capsules))  # Omega
            self.switch_bias = nn.Parameter(torch.zeros(capsules))  # c
        self.keep_normalizable()

    @property
    def num_capsules(self) -> int:
        return self.weight.shape[1]

    @property
    def num_units(self) -> int:
        return self.weight.shape[2]

    @property
    def sites(self) -> tuple[Site, ...]:
        return capsule_sites("capsule", self.hidden, self.switched)

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        batch = batch_size if images is None else len(images)
        with pyro.plate("images", batch, dim=-2):
            if images is None:
                distribution = self._chain(batch)
            else:
                distribution = self.posterior_of(Fields.none(self.hidden, batch))
            field = self.visible_field(draw_capsules("capsule", distribution))
            if images is not None:
                gain = self.visible.log_partition(field) - self.visible.log_partition()
                pyro.factor("interaction", gain.flatten(-3).sum(-1, keepdim=True))
            return self._sample_image(field, images)

    def _chain(self, batch: int) -> CapsuleDistribution:
        """Run the Gibbs chain up to its last sweep; return the distribution of the capsules.

        Plates outside the model get their own chains.
        """
        outer = outer_sizes()
        images = self.gibbs(self.base_images(outer.numel() * batch), self.sweeps - 1)
        fields = self.fields(images)
        return self.posterior_of(
            Fields(*(unflat_batch(field, 0, torch.Size([*outer, batch])) for field in fields))
        )

    @pyro_method
    def fields(self, images: Tensor) -> Fields:
        """Compute the fields of images (B, C, H, W), which are added to the capsules' biases."""
        pixels = images.flatten(1)
        hidden = (pixels @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:])
        return Fields(hidden, pixels @ self.switch_weight if self.switched else hidden[..., 0])

    @pyro_method
    def posterior_of(self, fields: Fields) -> CapsuleDistribution:
        """Return the posterior p(z, h | x) from the fields of x."""
        return capsule_distribution(
            self.hidden, self.switch_bias if self.switched else None, fields
        )

    @pyro_method
    def posterior(self, images: Tensor) -> CapsuleDistribution:
        """Return the exact posterior p(z, h | x) of images (B, C, H, W)."""
        return self.posterior_of(self.fields(images))

    @pyro_method
    def free_energy(
        self, images: Tensor, distribution: CapsuleDistribution | None = None
    ) -> Tensor:
        """Compute F(x) = -log sum_{h, z} exp(-E), (B,), in nats: log p(x) = -F(x) - log Z.

        Args:
            images: (B, C, H, W).
            distribution: `posterior(images)`, if it is already computed.
        """
        distribution = self.posterior(images) if distribution is None else distribution
        log_visible = self.visible.log_base(images).flatten(1).sum(1)
        return -(log_visible + self.hidden.log_partition().sum() + distribution.log_partition())

    @pyro_method
    def log_base_partition(self) -> Tensor:
        """Compute the log partition function, in nats, of the machine without couplings.

        The log density of this model's trace is -E(x, h, z) minus this number.
        """
        total = self.visible.log_partition().sum() + self.hidden.log_partition().sum()
        return total + F.softplus(self.switch_bias).sum() if self.switched else total

    @pyro_method
    @torch.no_grad()
    def base_images(self, batch: int) -> Tensor:
        """Sample images (batch, C, H, W) from the visible biases alone."""
        return self.visible.sample(self.visible.bias.new_zeros(batch, *self.image_shape))

    @pyro_method
    @torch.no_grad()
    def gibbs(self, images: Tensor, steps: int = 1) -> Tensor:
        """Run `steps` sweeps of exact block Gibbs, x -> (z, h) -> x, from images (B, C, H, W)."""
        for _ in range(steps):
            images = self.draw_images(self.posterior(images).sample())
        return images

    @pyro_method
    @torch.no_grad()
    def draw_images(self, capsules: CapsuleState) -> Tensor:
        """Sample images (B, C, H, W) from p(x | h, z)."""
        return self.visible.sample(self.visible_field(capsules))

    @pyro_method
    def switch_probabilities(self, images: Tensor) -> Tensor:
        """Return the switch probabilities p(z_k = 1 | x), (B, K), the spectrum of the image."""
        return self.posterior(images).switch_probability

    @pyro_method
    def reconstruct(self, images: Tensor) -> Tensor:
        """Return the mean image (B, C, H, W) of the capsules' posterior means."""
        return self.mean_image(self.posterior(images).mean())

    @pyro_method
    @torch.no_grad()
    def projective_field(self, capsule: int, steps: int = 50, chains: int = 64) -> Tensor:
        """Compute the mean image (C, H, W) of Gibbs chains in which only one capsule is on.

        Raises:
            ValueError: there is no such capsule.
        """
        if not 0 <= capsule < self.num_capsules:
            raise ValueError(f"capsule must be from 0 to {self.num_capsules - 1}, not {capsule!r}")
        weight = self.weight[:, capsule]  # (pixels, J); the other units touch no pixel
        switch = self.switch_weight[:, capsule] if self.switched else 0.0
        images = self.base_images(chains)
        for _ in range(steps):
            fields = images.new_zeros(chains, *self.weight.shape[1:])
            fields[:, capsule] = images.flatten(1) @ weight
            hidden = self.hidden.sample(fields)[:, capsule]
            field = (hidden @ weight.T + switch).unflatten(-1, self.image_shape)
            images = self.visible.sample(field)
        return self.visible.mean(field).mean(0)

    @torch.no_grad()
    def coupling_norm(self) -> float:
        """Compute the norm of the couplings, which must be below 1 for log Z to exist.

        Two Gaussian sides are normalizable if and only if the spectral norm of
        precision_x^-1/2 [W_1 ... W_K] precision_h^-1/2 is below 1 (the worst case is all switches
        on). With one Bernoulli side the machine is always normalizable, and the result is 0.
        """
        if (scale := self._standard_scale()) is None:
            return 0.0
        coupling = _no_wider_than_high(scale * self.weight.flatten(1))
        if (bound := coupling.norm().item()) < COUPLING_LIMIT:  # Frobenius: a cheap upper bound
            return bound
        squares = torch.linalg.eigvalsh(coupling.T @ coupling)  # far cheaper than singular values
        return squares[-1].sqrt().item()

    @torch.no_grad()
    def keep_normalizable(self) -> None:
        """Reduce the couplings W, if necessary, so that the partition function exists.

        Training calls this before every step. With two Gaussian sides, the singular values of the
        matrix of `coupling_norm` that are too large are reduced, and the other directions stay as
        they are. (To scale the whole of W is simpler, but keeps all directions small because of
        one.) With two Poisson sides, no coupling may be positive.
        """
        if (scale := self._standard_scale()) is not None:
            coupling = scale * self.weight.flatten(1)
            if coupling.norm() >= COUPLING_LIMIT:
                tall = _no_wider_than_high(coupling)  # a view: `coupling` changes with it
                squares, directions = torch.linalg.eigh(tall.T @ tall)
                over = squares > COUPLING_LIMIT**2
                directions, values = directions[:, over], squares[over].sqrt()
                tall -= (tall @ directions) * (1 - COUPLING_LIMIT / values) @ directions.T
                self.weight.copy_((coupling / scale).view_as(self.weight))
        elif isinstance(self.visible, PoissonUnits) and isinstance(self.hidden, PoissonUnits):
            self.weight.clamp_(max=0)

    def _standard_scale(self) -> Tensor | None:
        """Return factors of W (pixels, K J) by which every Gaussian unit has precision 1."""
        if not (isinstance(self.visible, GaussianUnits) and isinstance(self.hidden, GaussianUnits)):
            return None
        left = (-0.5 * self.visible.log_precision).exp().flatten()[:, None]
        return left * (-0.5 * self.hidden.log_precision).exp().flatten()


class RBM(CapsuleRBM):
    """The restricted Boltzmann machine, as a capsule RBM with one capsule that is always on.

    Args:
        image_shape: (channels, height, width), or a square number of pixels.
        hidden: hidden units.
        visible_family, hidden_family, sweeps: as for `CapsuleRBM`.
    """

    switched = False

    def __init__(
        self,
        image_shape: int | tuple[int, int, int] = (1, 28, 28),
        hidden: int = 640,
        *,
        visible_family: str = "bernoulli",
        hidden_family: str = "bernoulli",
        sweeps: int = 100,
    ) -> None:
        check_at_least(1, hidden=hidden)
        super().__init__(
            image_shape,
            capsules=1,
            units=hidden,
            visible_family=visible_family,
            hidden_family=hidden_family,
            sweeps=sweeps,
        )


def _no_wider_than_high(matrix: Tensor) -> Tensor:
    """Return a view of the matrix, or of its transpose, that is no wider than high."""
    return matrix.T if matrix.shape[0] < matrix.shape[1] else matrix
