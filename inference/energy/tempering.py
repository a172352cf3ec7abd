"""Machines interpolated between independent pixels and a capsule RBM, for annealing.

At inverse temperature beta the couplings are scaled, and the visible biases are moved by an offset
that vanishes at beta = 1:

    -E_beta = -E with W, Omega scaled by beta, and (1 - beta) offset.x added

At beta = 0 pixels and capsules are independent and log Z is known; at beta = 1 it is the machine.
"""

import torch
from torch import Tensor

from capsule_zoo.models.capsule_rbm import CapsuleRBM
from capsule_zoo.models.units.switched_units import CapsuleDistribution, Fields


class TemperedRBM:
    """The family of tempered machines; every `beta` is a number or one number per image, (B,).

    Args:
        model: the machine at beta = 1.
        offset: offset added to the visible biases at beta = 0, (C, H, W).
    """

    def __init__(self, model: CapsuleRBM, offset: Tensor | None = None) -> None:
        self.model = model
        self.offset = torch.zeros_like(model.visible.bias) if offset is None else offset

    def posterior(self, fields: Fields, beta: float | Tensor) -> CapsuleDistribution:
        """Return p_beta(z, h | x), given the fields of x in the machine at beta = 1."""
        return self.model.posterior_of(fields.scale_fields(beta))

    def free_energy(
        self, images: Tensor, distribution: CapsuleDistribution, beta: float | Tensor
    ) -> Tensor:
        """Compute -log sum_{h, z} exp(-E_beta), (B,), in nats, from the posterior at `beta`."""
        moved = (images * self.offset).flatten(1).sum(1)
        return self.model.free_energy(images, distribution) - (1 - beta) * moved

    def draw_images(self, distribution: CapsuleDistribution, beta: float | Tensor) -> Tensor:
        """Draw x ~ p_beta(x | z, h), (B, C, H, W), with (z, h) from the posterior."""
        if isinstance(beta, Tensor):
            beta = beta[:, None, None, None]
        field = beta * self.model.visible_field(distribution.sample()) + (1 - beta) * self.offset
        return self.model.visible.sample(field)

    def base_images(self, batch: int) -> Tensor:
        """Draw exact samples at beta = 0, (batch, C, H, W)."""
        return self.model.visible.distribution(self.offset).sample((batch,))

    def log_base_partition(self) -> Tensor:
        """Compute log Z at beta = 0, in nats."""
        visible = self.model.visible
        moved = visible.log_partition(self.offset) - visible.log_partition()
        return self.model.log_base_partition() + moved.sum()


class TemperedChains:
    """The chains of parallel tempering: neighboring temperatures exchange their images.

    There is one Gibbs chain at each temperature. Hot chains (small beta) move freely, and the
    images that they find pass on to beta = 1.

    Args:
        betas: inverse temperatures, 1 first and falling.
        images: start of all chains, (chains, C, H, W), or their state, (betas, chains, C, H, W).
        exchanges: number of exchanges so far; they alternate between even and odd pairs.
    """

    def __init__(
        self, betas: tuple[float, ...], images: Tensor, exchanges: int | Tensor = 0
    ) -> None:
        self.betas = images.new_tensor(betas)
        self.images = images if images.dim() == 5 else images.repeat(len(betas), 1, 1, 1, 1)
        self.exchanges = int(exchanges)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the chains, which restores them with the temperatures."""
        return {"images": self.images, "exchanges": torch.tensor(self.exchanges)}

    @torch.no_grad()
    def sweep(self, model: CapsuleRBM) -> None:
        """Run one Gibbs sweep at every temperature, then one exchange."""
        machine = TemperedRBM(model)
        self.images = self.images.to(model.weight)
        self.betas = self.betas.to(model.weight)
        betas = self.betas.repeat_interleave(self.images.shape[1])
        distribution = machine.posterior(model.fields(self.images.flatten(0, 1)), betas)
        self.images = machine.draw_images(distribution, betas).view_as(self.images)
        self._exchange(machine)

    def _exchange(self, machine: TemperedRBM) -> None:
        """Swap the images of neighboring levels i, i + 1 by the Metropolis rule."""
        levels, chains = self.images.shape[:2]
        images = self.images.flatten(0, 1)
        fields = machine.model.fields(images)

        def energies(betas: Tensor) -> Tensor:
            """Compute the free energy of images at their level's temperature, (levels, chains)."""
            rows = betas.repeat_interleave(chains)
            distribution = machine.posterior(fields, rows)
            return machine.free_energy(images, distribution, rows).view(levels, chains)

        current_energy = energies(self.betas)
        hotter, colder = energies(self.betas.roll(-1)), energies(self.betas.roll(1))
        log_ratio = current_energy[:-1] + current_energy[1:] - hotter[:-1] - colder[1:]
        swap = torch.rand_like(log_ratio).log() < log_ratio
        swap[(self.exchanges + 1) % 2 :: 2] = False
        self.exchanges += 1
        order = torch.arange(levels, device=images.device)[:, None].repeat(1, chains)
        order[:-1] += swap.long()
        order[1:] -= swap.long()
        self.images = self.images[order, torch.arange(chains, device=images.device)]
