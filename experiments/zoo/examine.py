"""The nats that guides lose of log p(data) on eight textbook programs, written for Pyro alone.

The programs are in `examples/`. Each is small enough for the exact evidence: PCA in closed form,
eight schools with the effects integrated by hand, item response with the abilities integrated at
given difficulties, all others on a grid of their two latent numbers. The densities are written
here independently of the programs.
"""

import math
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Cauchy, HalfCauchy, MultivariateNormal, Normal, Poisson

from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import group_by_quantity, single
from capsule_zoo.experiments.zoo.guide_swaps import LOST, plot_losses
from capsule_zoo.inference.examination.examine import KINDS, examine
from capsule_zoo.records import Numbers, Table, metric_title

NAMES = (
    *("probabilistic_pca", "eight_schools", "poisson_factors", "curve_with_outliers"),
    *("gaussian_mixture", "item_response", "robust_regression", "vae_digits"),
)
SHORT = {"probabilistic_pca": "ppca"}  # names in the record, where they differ
SETTINGS: dict[str, Any] = dict(guides=KINDS[:-1], steps=1000)  # arguments of `examine`
_NEGLIGIBLE_GAP = 0.5  # largest median gap between the bounds that is negligible, in nats
_LARGEST_LOSS = 10.0  # nats, the right end of the figure
_COLUMNS = "elbo", "iwae_100", "iwae", "ess", "pareto_k", "lost_elbo", "lost_iwae", "seconds"


@experiment("zoo/examine", data="digits")
def examine_programs(options: Options) -> Result:
    """Measure the nats that each guide loses on eight textbook programs with known evidence."""
    rows: dict[str, Numbers] = {}
    tables: dict[str, Table] = {}
    for program in NAMES:
        options.say(f"Examining {program}")
        module, name = import_module(f"capsule_zoo.examples.{program}"), SHORT.get(program, program)
        call, arguments, observed = module.example()
        began = time.process_time()
        shared: dict[str, Any] = dict(seed=options.seed, progress=options.progress)
        one = examine(call, *arguments, observed=observed, **SETTINGS, **shared)
        seconds, number = single(time.process_time() - began), len(one.rows)
        truth = EXACT[program](module, call, one.rows.double())
        simulated = one.bounds["num_simulated"]
        rows[name] = {
            "seconds": seconds,
            "exact": single(truth),
            "lower": (one.lower, one.lower_error, number),
            "error": single(abs(one.lower - truth), number),
            "gap_median": single(one.bounds["gap_median"], simulated),
            "gap_largest": single(one.bounds["gap_largest"], simulated),
        }
        columns = {
            column: {
                str(g): single(v, number) for g, v in one.table[column].items() if np.isfinite(v)
            }
            for column in _COLUMNS
        }
        tables[name] = Table(columns, f"{{quantity}}_{name}_{{variant}}")
    metrics, titles = group_by_quantity(rows), {name: metric_title(name) for name in tables}
    gaps = [gap for gap, _, _ in metrics["gap_median"].values()]
    below = single(sum(gap <= _NEGLIGIBLE_GAP for gap in gaps), len(gaps))
    losses, label = {n: t.numbers for n, t in tables.items()}, f"{LOST} log p(data), a row"
    figure = plot_losses(losses, titles, label, linear=0.1, largest=_LARGEST_LOSS)
    by_program = {titles[name]: table for name, table in tables.items()}
    return Result({**metrics, "gaps_below_half": below, **by_program}, {"": figure})


def on_grid(log_joint: Callable[[Tensor, Tensor], Tensor], width: float, steps: int = 601) -> float:
    """Return the log integral of a density of two numbers over a square around 0."""
    line = torch.linspace(-width, width, steps, dtype=torch.float64)
    joint = log_joint(line[:, None], line[None])
    return joint.flatten().logsumexp(0).item() + 2 * math.log(line[1] - line[0])


def by_row(log_joint: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor) -> float:
    """Return the mean of `on_grid` over rows of data, for a standard normal prior."""
    prior = Normal(0.0, 1.0)
    result = []
    for row in rows:

        def joint(a: Tensor, b: Tensor, row: Tensor = row) -> Tensor:
            return log_joint(a, b, row) + prior.log_prob(a) + prior.log_prob(b)

        result.append(on_grid(joint, 7.0))
    return float(np.mean(result))


def exact_pca(module: Any, program: Callable, rows: Tensor) -> float:
    """Return the exact mean log p of rows of the PCA program's flowers."""
    loadings, noise = module.loadings.double(), module.noise.double()
    covariance = loadings @ loadings.T + noise.square() * torch.eye(4)
    distribution = MultivariateNormal(torch.zeros(4).double(), covariance)
    return distribution.log_prob(rows).mean().item()


def exact_schools(module: Any, program: Callable, rows: Tensor) -> float:
    """Return the exact log p of eight schools; mean and log standard deviation are on a grid."""
    mean = torch.linspace(-40, 40, 1201, dtype=torch.float64)
    log_spread = torch.linspace(-14, 9, 1601, dtype=torch.float64)[:, None]
    spread = log_spread.exp()
    joint = Normal(0.0, 5.0).log_prob(mean) + log_spread
    joint = joint + HalfCauchy(torch.tensor(5.0).double()).log_prob(spread)
    for effect, error in zip(rows[0], module.errors.double(), strict=True):
        joint = joint + Normal(mean, (spread.square() + error**2).sqrt()).log_prob(effect)
    cell = (mean[1] - mean[0]) * (log_spread[1] - log_spread[0])
    return joint.flatten().logsumexp(0).item() + math.log(cell)


def exact_poisson(module: Any, program: Callable, rows: Tensor) -> float:
    """Return the exact mean log p of rows of the Poisson program's counts."""
    loadings, base = module.loadings.double(), module.base.double()

    def log_joint(a: Tensor, b: Tensor, row: Tensor) -> Tensor:
        rates = (base + a[..., None] * loadings[0] + b[..., None] * loadings[1]).exp()
        return Poisson(rates).log_prob(row).sum(-1)

    return by_row(log_joint, rows)


def exact_curve(module: Any, program: Callable, rows: Tensor) -> float:
    """Return the exact log p of the points of the line with outliers."""
    x, y = module.x.double(), rows[0]

    def log_joint(a: Tensor, b: Tensor) -> Tensor:
        mean = a[..., None] + b[..., None] * x
        inside = math.log(0.9) + Normal(mean, 0.2).log_prob(y)
        outside = math.log(0.1) + Normal(mean, 3.0).log_prob(y)
        prior = Normal(0.0, 2.0).log_prob(a) + Normal(0.0, 2.0).log_prob(b)
        return torch.logaddexp(inside, outside).sum(-1) + prior

    return on_grid(log_joint, 5.0, 1501)


def exact_mixture(module: Any, program: Callable, rows: Tensor) -> float:
    """Return the exact log p of the points of the Gaussian mixture."""
    weights = module.weights.double().log()

    def log_joint(a: Tensor, b: Tensor) -> Tensor:
        parts = [
            w + Normal(m[..., None], 1.0).log_prob(rows[0])
            for w, m in zip(weights, (a, b), strict=True)
        ]
        prior = Normal(0.0, 3.0).log_prob(a) + Normal(0.0, 3.0).log_prob(b)
        return torch.logaddexp(*parts).sum(-1) + prior

    return on_grid(log_joint, 15.0)


def exact_regression(module: Any, program: Callable, rows: Tensor) -> float:
    """Return the exact log p of the cases of the robust regression."""
    x = module.x.double()

    def log_joint(a: Tensor, b: Tensor) -> Tensor:
        mean = a[..., None] * x[:, 0] + b[..., None] * x[:, 1]
        prior = Cauchy(0.0, 1.0).log_prob(a) + Cauchy(0.0, 1.0).log_prob(b)
        return Normal(mean, 0.5).log_prob(rows[0]).sum(-1) + prior

    return on_grid(log_joint, 6.0, 1501)


def exact_vae(module: Any, program: Any, rows: Tensor) -> float:
    """Return the exact mean log p of rows of the VAE's pixels."""
    decoder = program.__self__.decoder

    @torch.no_grad()
    def log_joint(a: Tensor, b: Tensor, row: Tensor) -> Tensor:
        codes = torch.stack(torch.broadcast_tensors(a, b), -1)
        logits = decoder(codes.float()).double()
        return Bernoulli(logits=logits).log_prob(row).sum(-1)

    return by_row(log_joint, rows)


def exact_responses(module: Any, program: Callable, rows: Tensor) -> float:
    """Return log p of item responses by quadrature of difficulties and abilities."""
    answers = rows[0].view(20, 5)
    (nodes, weights), (abilities, mass) = quadrature(14), quadrature(40)
    logits = abilities[:, None] - nodes
    total = outer_sum([weights[None]] * 5)[0]
    # log p(answer pattern | difficulties): a product over items for each ability
    for pattern, count in zip(*answers.unique(dim=0, return_counts=True), strict=True):
        items = [Bernoulli(logits=logits).log_prob(answer.expand_as(logits)) for answer in pattern]
        items[0] = items[0] + mass[:, None]
        total = total + count * outer_sum(items).logsumexp(0)
    return total.flatten().logsumexp(0).item()


def quadrature(number: int) -> tuple[Tensor, Tensor]:
    """Return the nodes and log weights (number,) of a standard normal's quadrature."""
    nodes, weights = (torch.tensor(x) for x in np.polynomial.hermite_e.hermegauss(number))
    return nodes, (weights / weights.sum()).log()


def outer_sum(terms: Sequence[Tensor]) -> Tensor:
    """Return all sums over one entry of each of k terms (B, n), as a tensor (B, n, ..., n)."""
    total = terms[0]
    for term in terms[1:]:
        total = total[..., None] + term.view(len(term), *[1] * (total.dim() - 1), -1)
    return total


EXACT: dict[str, Callable[[Any, Callable, Tensor], float]] = {
    "probabilistic_pca": exact_pca,
    "eight_schools": exact_schools,
    "poisson_factors": exact_poisson,
    "curve_with_outliers": exact_curve,
    "gaussian_mixture": exact_mixture,
    "item_response": exact_responses,
    "robust_regression": exact_regression,
    "vae_digits": exact_vae,
}
