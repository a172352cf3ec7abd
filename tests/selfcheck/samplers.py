"""Joint-distribution tests of the samplers (Geweke 2004), and estimates of log Z.

Chains begin at exact draws from the joint distribution. If the sampler leaves this distribution
invariant, every state of a chain has it too. The mean of a chain is one row of the test, because
the states of a chain are not independent.
"""

from typing import Any

import torch
from checks import check
from machines import GAUSSIANS, chain_machine, energy_machine, exact_draws, prior_draws
from means import compare_mean, same_means
from posteriors import recognition_after, small_part_whole
from pyro import poutine
from small_rbms import PAIRS, log_masses
from torch import Tensor

from capsule_zoo.guides import ExactSwitches, RecognitionMachine
from capsule_zoo.inference import log_partition
from capsule_zoo.inference.calibration import Outcome
from capsule_zoo.inference.energy.tempering import TemperedChains
from capsule_zoo.models import RBM, CapsuleHelmholtzMachine, CapsuleRBM, PartWholeCapsules
from capsule_zoo.models.units.switched_units import CapsuleState

SWEEPS = 8
BETAS = (1.0, 0.6, 0.2)


def moments(*blocks: Tensor) -> Tensor:
    """Return first and second moments of the numbers of all blocks (N, ...), with products."""
    numbers = torch.cat([block.flatten(1) for block in blocks], 1)
    rows, columns = torch.triu_indices(numbers.shape[1], numbers.shape[1])
    return torch.cat([numbers, numbers[:, rows] * numbers[:, columns]], 1)


def of_joint(values: dict, images: Tensor) -> Tensor:
    """Return moments of images, switches and activities."""
    hidden = values["capsule_hidden"]
    switch = values.get("capsule_switch", torch.ones_like(hidden[..., 0]))
    return moments(images, switch, switch[..., None] * hidden)


@check("geweke_gibbs_rbm", of=[CapsuleRBM], kind=RBM)
@check("geweke_gibbs_capsule_rbm", of=[CapsuleRBM])
@check("geweke_gibbs_gaussian", of=[CapsuleRBM], hidden_family="gaussian")
@check("geweke_gibbs_poisson", of=[CapsuleRBM], hidden_family="poisson")
@check("geweke_gibbs_spike_slab", of=[CapsuleRBM], **GAUSSIANS)
def block_gibbs(number: int, **options: Any) -> Outcome:
    """Check the Gibbs sweep x -> (z, h) -> x, for every family of units."""
    model = energy_machine(scale=0.6, **options)
    _, images = exact_draws(model, number)
    means = torch.zeros(())
    with torch.no_grad():
        for _ in range(SWEEPS):
            images = model.gibbs(images)
            switch, activity = model.posterior(images).sample()
            means = means + moments(images, switch, activity) / SWEEPS
    return same_means(of_joint(*exact_draws(model, number)), means)


@check("geweke_guide_then_image", of=[ExactSwitches, CapsuleRBM])
def guide_then_image(number: int) -> Outcome:
    """Check the same chain, drawn by the Pyro guide and the conditional distribution of images."""
    model = energy_machine()
    guide, (_, images) = ExactSwitches(model), exact_draws(model, number)
    means = torch.zeros(())
    with torch.no_grad():
        for _ in range(SWEEPS):
            state = _draw(guide, images)
            images = model.draw_images(state)
            means = means + moments(images, *_draw(guide, images)) / SWEEPS
    return same_means(of_joint(*exact_draws(model, number)), means)


def _draw(guide: ExactSwitches, images: Tensor) -> CapsuleState:
    nodes = poutine.trace(guide).get_trace(images).nodes
    switch, hidden = (nodes[f"capsule_{n}"]["value"] for n in ("switch", "hidden"))
    return CapsuleState(switch, switch[..., None] * hidden)


@check("geweke_tempered_chains", of=[TemperedChains])
def tempered(number: int) -> Outcome:
    """Check that sweeps and exchanges leave the distribution of every temperature invariant."""
    model = energy_machine()

    def images_at_all() -> Tensor:
        """Return the images at all temperatures, (levels, chains, C, H, W)."""
        return torch.stack([exact_draws(model, number, beta)[1] for beta in BETAS])

    chains, means = TemperedChains(BETAS, images_at_all()), torch.zeros(())
    for _ in range(SWEEPS):
        chains.sweep(model)
        means = means + moments(*chains.images) / SWEEPS
    return same_means(moments(*images_at_all()), means)


@check("geweke_prior_of_capsule_rbm", of=[CapsuleRBM])
def prior_of_energy(number: int) -> Outcome:
    """Check draws without images: the ends of chains that began at independent pixels."""
    model = energy_machine(scale=0.6, sweeps=100)
    with torch.no_grad():
        drawn = prior_draws(model, number)
    return same_means(of_joint(*exact_draws(model, number)), of_joint(*drawn))


@check("geweke_helmholtz_chain", of=[CapsuleHelmholtzMachine, RecognitionMachine])
def helmholtz(number: int) -> Outcome:
    """Check a chain of recognition and generation, where recognition is the exact posterior."""
    model, guide = chain_machine()
    return _alternated(model, guide, number)


@check("geweke_helmholtz_trained", of=[RecognitionMachine], approximate=True)
def helmholtz_after_training(number: int) -> Outcome:
    """Check the same chain with a briefly trained recognition, which is not the posterior."""
    return _alternated(*recognition_after(steps=50), number)


def _alternated(model: CapsuleHelmholtzMachine, guide: RecognitionMachine, number: int) -> Outcome:
    images, means = prior_draws(model, number)[1], torch.zeros(())
    for _ in range(SWEEPS):
        images = guide.gibbs(images)
        means = means + moments(images) / SWEEPS
    return same_means(moments(prior_draws(model, number)[1]), means)


@check("geweke_part_whole_selections", of=[PartWholeCapsules])
def selections(number: int) -> Outcome:
    """Check that the prior is the same with parents drawn and with parents summed out."""
    model = small_part_whole(4).discretize()
    samples = []
    for selection in ("enumerate", "marginal"):
        values, images = prior_draws(model.with_selection(selection), number)
        names = ("object_presence", "object_pose", "part_presence", "part_pose")
        poses = [values[name] for name in names]
        samples.append(torch.cat([moments(*poses), moments(images)], 1))
    return same_means(*samples)


@check("geweke_annealing", of=[CapsuleRBM], fraction=0.02)
def annealing(number: int) -> Outcome:
    """Check that the mean of exp(annealed log Z) is Z, even with few temperatures."""
    model = energy_machine()
    exact = log_masses(model, PAIRS[0])[0].logsumexp(0)
    seeds = torch.randint(2**31, (number,)).tolist()
    options: dict[str, Any] = dict(method="ais", chains=20, temperatures=10)
    estimates = [log_partition(model, seed=seed, **options).value for seed in seeds]
    ratio = (torch.tensor(estimates).double() - exact.detach()).exp()
    return compare_mean(ratio[:, None], torch.ones(1).double())
