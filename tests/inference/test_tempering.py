"""Parallel tempering: the law of every temperature stays, and neighbors do exchange."""

import torch
from small_rbms import PAIRS, binary_images, log_masses, small

from capsule_zoo.inference.energy.tempering import TemperedChains, TemperedRBM


def test_tempered_chains_keep_the_law_of_every_temperature():
    """All replicas start at their exact laws; sweeps and exchanges leave their means there."""
    model, betas, number = small(), (1.0, 0.6, 0.2), 30_000
    machine = TemperedRBM(model)
    _, listed = log_masses(model, PAIRS[0])
    fields = model.fields(listed)
    laws = []
    for beta in betas:
        energy = machine.free_energy(listed, machine.posterior(fields, beta), beta)
        laws.append((-energy).softmax(0).detach())
    torch.manual_seed(0)
    starts = [listed[torch.multinomial(law, number, replacement=True)] for law in laws]
    chains = TemperedChains(betas, torch.stack(starts))
    for _ in range(4):
        chains.sweep(model)
    for images, law in zip(chains.images, laws, strict=True):
        code = (images.flatten(1) * 2.0 ** torch.arange(3, -1, -1)).sum(1).long()
        share = torch.bincount(code, minlength=16) / number
        assert ((share - law).abs() < 5.5 * (law * (1 - law) / number).sqrt()).all()
    assert (laws[0] - laws[2]).abs().max() > 0.02  # the temperatures differ


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
