"""Make the reference draws: `python tools/reference_draws.py`.

The image of each problem is drawn from its model, with the latents. These latents are therefore one
exact draw of the posterior, and chains start there: they need no time to find the posterior.

    constellation         independent draws of the exact posterior, a mixture over all matchings
    the other problems    200 chains of Hamiltonian Monte Carlo, with flips of the discrete sites,
                          that leave the joint density of all latents unchanged

Chains are accepted if R-hat of every coordinate and of its square is below 1.01, and the effective
sample size is above 10,000. The files keep 4,000 draws, spread evenly, and the moments of all.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pyro.distributions import Bernoulli, MultivariateNormal
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from capsule_zoo._version import __version__
from capsule_zoo.inference.annealing.path import AnnealedPath, State, simulate
from capsule_zoo.inference.annealing.transitions import Moves, transition
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.references.problems import FOLDER, PROBLEMS, build
from capsule_zoo.inference.training.checkpoint import save_checkpoint
from capsule_zoo.models import Constellations, Model
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.constellations.matching_distributions import RandomMatching

SEED = 0
NUM_DRAWS = 4000
RHAT, ESS = 1.01, 10_000.0


def write_reference(
    name: str, folder: Path = FOLDER, chains: int = 200, transitions: int = 2000
) -> dict[str, Any]:
    """Draw a problem's image and reference draws, write its file, and return its checks.

    Raises:
        ValueError: the name is unknown, or the chains did not pass; nothing is then written.
    """
    model = build(name)
    with use_seed(SEED), isolated_parameters(model):
        _randomize(model)
        images, latents = _image_of(name, model)
        if isinstance(model, Constellations):
            held = _exact(model, images)
        else:
            path = AnnealedPath(model, None, images.expand(chains, *images.shape[1:]))
            start = {n: v.expand(chains, *v.shape[1:]).clone() for n, v in latents.items()}
            held = _sample_by_chains(path, path.state(start), transitions)
    held["checks"] |= {"seed": SEED, "version": __version__, "torch": torch.__version__}
    folder.mkdir(parents=True, exist_ok=True)
    tree = {"model": dict(model.state_dict()), "images": images, **held}
    tree["draws"] = held["draws"].float()  # half the file, and far below the error of the draws
    save_checkpoint(folder / f"{name}.safetensors", tree)
    return held["checks"]


def _randomize(model: Model) -> None:
    """Draw the model's parameters at random, except corners and noise of constellations.

    Templates are drawn with high contrast. An object's votes for its parts differ little from the
    dummy's, so that chains move between the values of the presences.
    """
    scales = {"corners": None, "log_floor": None, "template_logits": 2.0, "transform": 0.1}
    for name, parameter in model.named_parameters():
        scale = scales.get(name.rpartition(".")[2], 0.7)
        if name.endswith("raw_scale"):
            parameter.fill_(-1.8)  # a standard deviation of about 0.25
        elif scale is not None:
            parameter.copy_(scale * torch.randn_like(parameter))


def _image_of(name: str, model: Model) -> tuple[Tensor, dict[str, Tensor]]:
    """Sample an image and its latents: constellations of six points, part-wholes with all parts."""
    images, latents = simulate(model, 1000)
    suits = torch.ones(len(images), dtype=torch.bool)
    if name == "constellation":
        suits = (~images[..., 0].isnan()).sum(1) == 6
        suits = suits & (latents["object_presence"] > 0).all(1)
    if name == "part-whole":
        suits = (latents["part_presence"] > 0).all(1) & (latents["object_presence"][:, 0] > 0)
    row = suits.nonzero()[:1, 0]
    image = images[row]
    if name == "constellation":
        image = image[:, ~image[0, :, 0].isnan()]
    return image, {site.name: latents[site.name][row] for site in model.sites}


def _moments(x: Tensor) -> dict[str, Tensor]:
    """Return means and standard deviations of the columns of x (draws, D) and of their squares."""
    squares = x.square()
    return {
        "mean": x.mean(0),
        "scale": x.std(0),
        "square_mean": squares.mean(0),
        "squared_deviation": squares.std(0),
    }


def _sample_by_chains(path: AnnealedPath, state: State, transitions: int) -> dict[str, Any]:
    """Run chains from a posterior sample; return their draws and checks; see `write_reference`."""
    rows = len(path.images)
    epsilon = path.images.new_full((rows,), 0.1)
    scale = path.images.new_ones(rows, path.columns)
    terms = path.terms(state, slopes=True)
    warm_up = max(60, transitions // 10)
    positions = []
    for t in range(warm_up + transitions):
        moves = Moves(leapfrogs=8, flips=2, scale=scale)
        state, terms, rate = transition(path, state, terms, 1.0, epsilon, moves)
        if t < warm_up:
            epsilon = epsilon * math.exp(0.1 * (rate.mean().item() - 0.8))
            if t == warm_up // 2:
                scale = state.position.std(0).expand_as(state.position)
                epsilon = torch.full_like(epsilon, 0.5)
        else:
            positions.append(state.position)
    x = torch.stack(positions)  # (transitions, chains, D)
    both = torch.cat([x, x.square()], -1)
    rhat = split_gelman_rubin(both, chain_dim=1, sample_dim=0).max().item()
    ess = effective_sample_size(both, chain_dim=1, sample_dim=0).min().item()
    checks = {
        "method": "Hamiltonian Monte Carlo with flips",
        "chains": rows,
        "transitions": transitions,
        "acceptance": rate.mean().item(),
        "rhat": rhat,
        "ess": ess,
    }
    if not (rhat < RHAT and ess > ESS):
        raise ValueError(
            f"the chains did not pass: R-hat {rhat:.4f}, effective sample size {ess:.0f}; run more "
            "transitions"
        )
    flat = x.flatten(0, 1)
    indices = torch.linspace(0, len(flat) - 1, NUM_DRAWS).long()
    return {**_moments(flat), "draws": flat[indices], "log_evidence": None, "checks": checks}


class Mixture(NamedTuple):
    """A posterior that is a mixture of normal distributions.

    Attributes:
        log_weights: log p(image, s) for every value s of the discrete sites, (settings,).
        mean: (settings, D).
        covariance: (settings, D, D).
    """

    log_weights: Tensor
    mean: Tensor
    covariance: Tensor


def exact_posterior(
    model: Constellations, points: Tensor, settings: Mapping[str, Tensor]
) -> Mixture:
    """Return the posterior of the poses of a scene, in closed form.

    Points are linear in the poses. The pose of an object has the prior Normal(0, sigma_pose^2 I),
    also if the object is absent.

    Args:
        points: one scene without absent points, (1, N, 2).
        settings: presences (settings, objects) and matchings (settings, N), by site.
    """
    presence, code = settings["object_presence"], settings["point_corner"]
    objects = presence.shape[1]
    basis = torch.eye(4 * objects).to(points).view(-1, objects, 4)
    distribution = model.points_distribution(basis, code.new_zeros(len(basis), code.shape[1]))
    design = distribution.places.permute(1, 2, 0)  # (corners, 2, D)
    prior = model.sigma_pose**2
    noise = distribution.scale[0, 0].square()
    log_weights = Bernoulli(probs=points.new_tensor(model.presence)).log_prob(presence).sum(1)
    log_weights = log_weights + RandomMatching(
        model.distribution(), presence, code.shape[1]
    ).log_prob(code)
    log_weights = log_weights - (code == 0).sum(1) * math.log(4.0)  # clutter in [-1, 1]^2
    means, covariances, likelihoods = [], [], []
    for row in code:
        design_rows = design[row[row > 0] - 1].flatten(0, 1)  # (2 n, D)
        value = points[0][row > 0].flatten()
        marginal = prior * design_rows @ design_rows.T + noise * torch.eye(len(design_rows)).to(
            design_rows
        )
        likelihoods.append(MultivariateNormal(0 * value, marginal).log_prob(value))
        covariance = torch.linalg.inv(
            torch.eye(design_rows.shape[1]).to(design_rows) / prior
            + design_rows.T @ design_rows / noise
        )
        covariances.append(covariance)
        means.append(covariance @ design_rows.T @ value / noise)
    log_weights = log_weights + torch.stack(likelihoods)
    return Mixture(log_weights, torch.stack(means), torch.stack(covariances))


def _exact(model: Constellations, points: Tensor) -> dict[str, Any]:
    """Return moments of the exact posterior in closed form, and independent draws."""
    posterior = exact_posterior(model, points, PROBLEMS["constellation"].settings(model, points))
    weights = posterior.log_weights.softmax(0)
    components = torch.multinomial(weights, NUM_DRAWS, replacement=True)
    draws = MultivariateNormal(
        posterior.mean[components], posterior.covariance[components]
    ).sample()
    m, v = posterior.mean, posterior.covariance.diagonal(dim1=-2, dim2=-1)
    powers = m, m**2 + v, m**4 + 6 * m**2 * v + 3 * v**2
    first, second, fourth = (weights @ power for power in powers)
    return {
        "mean": first,
        "scale": (second - first**2).sqrt(),
        "square_mean": second,
        "squared_deviation": (fourth - second**2).sqrt(),
        "draws": draws,
        "log_evidence": posterior.log_weights.logsumexp(0).item(),
        "checks": {"method": "independent draws of the exact posterior, moments in closed form"},
    }


def main() -> None:
    """Write the files of all problems, or of the problems that are named."""
    parser = argparse.ArgumentParser(description="Make reference draws.")
    parser.add_argument("names", nargs="*", help="Problems; all by default.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="Folder of the files.")
    arguments = parser.parse_args()
    for name in arguments.names or list(PROBLEMS):
        print(name, write_reference(name, arguments.out), flush=True)


if __name__ == "__main__":
    main()
