"""Parallel tempering: the distribution of every temperature stays, and neighbors do exchange."""

import torch
from small_rbms import PAIRS, binary_images, log_masses, small

from capsule_zoo.inference.energy.tempering import TemperedChains, TemperedRBM


def test_tempered_chains_keep_the_distribution_of_every_temperature():
    """Replicas start at exact distributions; sweeps and exchanges leave their means there."""
    model, betas, number = small(), (1.0, 0.6, 0.2), 30_000
    machine = TemperedRBM(model)
    _, listed = log_masses(model, PAIRS[0])
    fields = model.fields(listed)
    distributions = []
    for beta in betas:
        energy = machine.free_energy(listed, machine.posterior(fields, beta), beta)
        distributions.append((-energy).softmax(0).detach())
    torch.manual_seed(0)
    starts = [
        listed[torch.multinomial(distribution, number, replacement=True)]
        for distribution in distributions
    ]
    chains = TemperedChains(betas, torch.stack(starts))
    for _ in range(4):
        chains.sweep(model)
    for images, distribution in zip(chains.images, distributions, strict=True):
        code = (images.flatten(1) * 2.0 ** torch.arange(3, -1, -1)).sum(1).long()
        fraction = torch.bincount(code, minlength=16) / number
        assert (
            (fraction - distribution).abs()
            < 5.5 * (distribution * (1 - distribution) / number).sqrt()
        ).all()
    assert (distributions[0] - distributions[2]).abs().max() > 0.02  # the temperatures differ


def test_exchanges_happen():
    model, betas = small(), (1.0, 0.9)
    chains = TemperedChains(betas, binary_images(2000))
    chains.images[1] = 1 - chains.images[0]
    before = chains.images.clone()
    chains._exchange(TemperedRBM(model))
    swapped = (chains.images[0] == before[1]).flatten(1).all(1)
    assert 0.3 < swapped.double().mean() < 1
    assert (chains.images[1][swapped] == before[0][swapped]).all()
    assert (chains.images[0][~swapped] == before[0][~swapped]).all()
