"""An encoder for any program: a network from a row of data to the posterior of its latents.

    u ~ Normal(loc(row), S(row) S(row)'),   z = transform(u's part of each site)
    discrete sites   z ~ the model's own family(logits(row))

u holds all continuous sites in unconstrained space, and S is lower triangular: correlated above the
diagonal of prior and data alike; with more than 64 numbers, sites are independent. The network
sees the standardized row, and which values are missing, and starts at the prior.

>>> guide = auto_encoder(program, x)
>>> evaluate(program, guide, x_new)
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.per_image.base import families_of
from capsule_zoo.guides.per_image.free_form import draw_site
from capsule_zoo.guides.per_image.gauss_newton import ChainedNormal
from capsule_zoo.guides.per_image.site_distributions import ByLogits, Continuous
from capsule_zoo.inference.annealing.path import simulate
from capsule_zoo.inference.examination.program import ProgramModel, as_model
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.training.fit import fit
from capsule_zoo.inference.training.settings import Checks, Pace
from capsule_zoo.models.checks import check_whole
from capsule_zoo.models.common.modes import use_seed

MAX_CORRELATED = 64  # latent coordinates of a row, up to which its posterior is correlated
_HIDDEN = 64  # units of each of two hidden layers
_PRIOR_DRAWS = 256  # prior samples that set the first location and scale
_SIMULATED = 512  # rows sampled from the model, on which the encoder is trained too
_BATCH = 64  # rows of a training step
_RATE, _CLIP = 3e-3, 10.0  # learning rate, and the largest norm of a gradient
_FAR = 5.0  # widths of the middle 80 % from the median beyond which a sampled row is dropped
_STEEPEST = 6.0  # largest change of the logarithm of a scale
_LARGEST = 20.0  # standard deviations at which an input of the linear map is clamped


class InterruptedFit(KeyboardInterrupt):
    """The error of an interrupt, with the guides that were trained before.

    Attributes:
        guides: guides of the program by name, "encoder" first. After `examine`, the others are
            fitted to rows when they are called on them, if they are not yet.
    """

    def __init__(self, reason: str, guides: dict[str, nn.Module]) -> None:
        super().__init__(
            f'{reason}, which is kept in the guides of this error, error.guides["encoder"]; in a '
            'notebook that is sys.last_value.guides["encoder"]'
        )
        self.guides = guides


class AutoEncoder(Guide[ProgramModel]):
    """The guide whose distributions a network computes from each row; see the top of this file.

    Args:
        model: the model of a program.
        rows: rows (N, F) that give the columns their units.
        network: a module from flattened rows (B, F) to features (B, n); by default two layers of
            64 units. It gets the rows in units of their columns, missing values as 0.
    """

    center: Tensor
    spread: Tensor
    loc: Tensor
    scale: Tensor

    def __init__(self, model: ProgramModel, rows: Tensor, network: nn.Module | None = None) -> None:
        super().__init__(model)
        self.families = families_of(model)
        mask = ~rows.isnan()
        count = mask.sum(0).clamp(min=1)
        center = torch.where(mask, rows, 0.0).sum(0) / count
        spread = (torch.where(mask, rows - center, 0.0).square().sum(0) / count).sqrt()
        self.register_buffer("center", center)
        self.register_buffer("spread", torch.where(spread > 0, spread, 1.0))
        self._place(rows)
        width = rows.shape[1]
        self.reads_missing = network is None
        if network is None:
            network = nn.Sequential(
                nn.Linear(2 * width, _HIDDEN),
                nn.Softplus(),
                nn.Linear(_HIDDEN, _HIDDEN),
                nn.Softplus(),
            )
        self.network = network.to(rows)
        with torch.no_grad():
            features = self.network(self._read(rows[:1]))
        outputs = self.continuous + self.logits_size
        outputs += self.continuous * (self.continuous if self.correlated else 1)
        self.head = PyroModule[nn.Linear](features.shape[1], outputs).to(rows)
        self.line = PyroModule[nn.Linear](width, self.continuous, bias=False).to(rows)
        for parameter in (*self.head.parameters(), *self.line.parameters()):
            nn.init.zeros_(parameter)

    def _place(self, rows: Tensor) -> None:
        """Set the shapes of all sites, and location and scale of the prior, by sampling."""
        with isolated_parameters(self.model), torch.no_grad():
            _, values = simulate(self.model, _PRIOR_DRAWS)
        self.shapes: dict[str, torch.Size] = {}
        parts, self.logits_size = [rows.new_zeros(_PRIOR_DRAWS, 0)], 0
        for name, family in self.families.items():
            if isinstance(family, Continuous):
                free = family.transform.inv(values[name]).to(rows)
                self.shapes[name] = free.shape[1:]
                parts.append(free.reshape(len(free), -1))  # of scalars too
            else:
                self.shapes[name] = family.start(None, values[name]).shape[1:]
                self.logits_size += self.shapes[name].numel()
        joined = torch.cat(parts, 1).nan_to_num(0.0, 0.0, 0.0)
        low, middle, high = joined.quantile(torch.tensor([0.16, 0.5, 0.84]).to(rows), dim=0)
        self.register_buffer("loc", middle)
        self.register_buffer("scale", ((high - low) / 2).clamp(min=1e-3))
        self.continuous = joined.shape[1]
        self.correlated = self.continuous <= MAX_CORRELATED

    def _standard(self, rows: Tensor) -> Tensor:
        """Standardize rows by column, with 0 for missing values."""
        units = (rows - self.center) / self.spread
        return units.nan_to_num(0.0)

    def _read(self, rows: Tensor) -> Tensor:
        """Return the inputs of the network, (B, 2 F), or (B, F) for a user's network."""
        units = self._standard(rows)
        if not self.reads_missing:
            return units
        return torch.cat([units.asinh(), rows.isnan().to(rows)], 1)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Sample every site of rows (B, F) and return the values by name."""
        number = self.continuous
        outputs = self.head(self.network(self._read(images)))
        shift, logits, shape = outputs.split(
            [number, self.logits_size, outputs.shape[1] - number - self.logits_size], 1
        )
        shape = _STEEPEST * (shape / _STEEPEST).tanh()
        line = self.line(self._standard(images).clamp(-_LARGEST, _LARGEST))
        loc = self.loc + self.scale * (shift + line)
        if self.correlated:
            square = shape.view(-1, number, number)
            factor = square.tril(-1) + torch.diag_embed(square.diagonal(dim1=1, dim2=2).exp())
            factor = self.scale[:, None] * factor
        else:
            factor = self.scale * shape.exp()
        plates: dict[str, Any] = {}
        noise: list[Tensor] = []
        draws, place, first = {}, 0, 0
        for site in self.model.latent_sites:
            family, shape = self.families[site.name], self.shapes[site.name]
            size = shape.numel()
            if isinstance(family, ByLogits):
                part = logits[:, first : first + size].reshape(-1, *shape)
                distribution, first = family.distribution(part, site.event_dim), first + size
                draws[site.name] = draw_site(self.model, site, distribution, plates)
                continue
            columns = slice(place, place + size)
            part = loc[:, columns]
            if not self.correlated:
                scale = factor[:, columns].reshape(-1, *shape)
                distribution = family.normal(part.reshape(-1, *shape), scale, site.event_dim)
                draws[site.name] = draw_site(self.model, site, distribution, plates)
                place += size
                continue
            rows = factor[:, columns]
            if noise:
                part = part + (rows[:, :, :place] @ torch.cat(noise, 1)[..., None])[..., 0]
            base = ChainedNormal(
                part.reshape(-1, *shape), rows[:, None, :, columns], family.free_dim(site.event_dim)
            )
            draws[site.name] = draw_site(self.model, site, family.to_support(base), plates)
            noise.append(base.noise(family.transform.inv(draws[site.name]))[:, 0, :, 0])
            place += size
        return draws


def auto_encoder(
    program: Callable,
    *args: Any,
    observed: Mapping[str, Any] | None = None,
    network: nn.Module | None = None,
    steps: int = 2000,
    seed: int = 0,
    progress: bool = False,
) -> AutoEncoder:
    """Train an encoder for a Pyro program on its data and on data sampled from the program.

    The program is not trained. Every function that takes a model, a guide and images, such as
    `evaluate`, `fit_guide` and `encode`, takes the program next to this guide, with its data. The
    program as a model of the zoo is `guide.model`; its rows are made by `guide.model.rows_of`.

    Args:
        program, args, observed: the program and its data, see `examine`.
        network: a module from the flattened rows (B, F) to features (B, n), in place of two
            layers of 64 units.
        steps: updates, of 64 rows each.
        seed: seed of parameters, data and updates.
        progress: show a progress bar.

    Raises:
        UnservedProgram: the program cannot be taken; the message names the site and the remedy.
        ValueError: `steps` is negative, or `network` is no module.
        InterruptedFit: an interrupt; the encoder trained so far is in the error.
    """
    check_whole(1, steps=steps)
    if network is not None and not isinstance(network, nn.Module):
        raise ValueError(
            f"network must be a torch module from rows (B, F) to features (B, n), not "
            f"{type(network).__name__}; leave it out for two layers of 64 units"
        )
    model, rows = as_model(program, *args, observed=observed)
    return trained_encoder(model, rows, network, steps=steps, seed=seed, progress=progress)


def _without_outliers(rows: Tensor) -> Tensor:
    """Drop outliers among rows, which a prior with heavy tails produces."""
    low, middle, high = rows.nan_to_num().quantile(torch.tensor([0.1, 0.5, 0.9]).to(rows), dim=0)
    width = (high - low).clamp(min=1.0)
    far = (rows.nan_to_num(0.0, torch.inf, -torch.inf) - middle).abs() > _FAR * width
    return rows[~far.any(1)]


def trained_encoder(
    model: ProgramModel,
    rows: Tensor,
    network: nn.Module | None = None,
    *,
    steps: int,
    seed: int,
    progress: bool = False,
) -> AutoEncoder:
    """Train the encoder of a model on rows and on rows sampled from the model.

    Where all data are one row, the last third of the updates is on that row alone.

    Raises:
        InterruptedFit: an interrupt; the encoder trained so far is in the error.
    """
    with isolated_parameters(model), use_seed(seed):
        simulated, _ = simulate(model, _SIMULATED)
        simulated = _without_outliers(simulated.to(rows))
        # the given rows count at least as much as the sampled rows
        copies = max(1, -(-len(simulated) // len(rows)))
        both = torch.cat([rows.repeat(copies, 1), simulated])
        guide = AutoEncoder(model, both, network)
    stages = [(both, steps, "cosine")]
    if not model.by_row:
        last = steps // 3
        stages = [(both, steps - last, "constant"), (rows.repeat(_BATCH, 1), last, "cosine")]
    before = 0
    for data, number, schedule in stages:
        pace, checks = Pace(schedule, clip=_CLIP), Checks(progress=progress)
        settings: dict[str, Any] = dict(pace=pace, checks=checks, lr=_RATE, batch_size=_BATCH)
        if number:
            run = fit(model, guide, data, steps=number, freeze="model", seed=seed, **settings)
            before += run.steps
            if run.stopped == "interrupted":
                reason = f"interrupted after {before} of {steps} updates of the encoder"
                raise InterruptedFit(reason, {"encoder": guide})
    return guide
