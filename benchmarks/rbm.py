"""Time an update of an RBM: 784 visible and 640 hidden units, batch 100, one Gibbs sweep.

The peers are scikit-learn's `BernoulliRBM` and `rbms` (persistent chains), and `learnergy` (CD-1).
The last two are timed if they are installed: `pip install rbms learnergy`. The floor is three
matrix products (image to hidden units, back, and to the hidden units again), without draws,
gradient or update. An update needs two more products for the gradients of both phases. The capsule
RBM of equal size is timed as well.
"""

import warnings
from importlib.util import find_spec

import numpy as np
import pyro
import torch
from harness import Benchmark, Contestant, Contestants, main
from sklearn.neural_network import BernoulliRBM
from torch import Tensor

from capsule_zoo.guides import ExactSwitches
from capsule_zoo.inference import ContrastiveDivergence
from capsule_zoo.models import RBM, CapsuleRBM

BATCH, VISIBLE, HIDDEN, RATE = 100, 784, 640, 0.01


def data() -> Tensor:
    """Return a batch of binary noise with a fifth of the pixels on, (100, 1, 28, 28)."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(BATCH, 1, 28, 28, generator=generator) < 0.2).float()


def zoo(model: CapsuleRBM) -> Contestant:
    images = data()
    module = ContrastiveDivergence(persistent=True, chains=BATCH)(model, ExactSwitches(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def update() -> None:
        optimizer.zero_grad()
        module(images).backward()
        optimizer.step()

    return update


def scikit_learn() -> Contestant:
    images = data().flatten(1).numpy()
    rbm = BernoulliRBM(HIDDEN, learning_rate=RATE, batch_size=BATCH, random_state=0)
    rbm.partial_fit(images)
    generator = np.random.RandomState(0)
    return lambda: rbm._fit(images, generator)  # what partial_fit calls, without its checks


def rbms() -> Contestant:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it compiles by torch.jit, which torch deprecates
        from rbms.bernoulli_bernoulli.classes import BBRBM
    images = data().flatten(1)
    weights = torch.ones(BATCH)
    rbm = BBRBM(0.01 * torch.randn(VISIBLE, HIDDEN), torch.zeros(VISIBLE), torch.zeros(HIDDEN))
    for parameter in rbm.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(rbm.parameters(), lr=RATE, maximize=True)
    state = {"chains": rbm.init_chains(BATCH)}

    def update() -> None:
        batch = rbm.init_chains(BATCH, weights=weights, start_v=images)
        state["chains"] = rbm.sample_state(chains=state["chains"], n_steps=1, beta=1.0)
        rbm.compute_gradient(batch, state["chains"], centered=False, lambda_l1=0.0, lambda_l2=0.0)
        optimizer.step()

    return update


def learnergy() -> Contestant:
    from learnergy.models.bernoulli import RBM as Peer

    images = data().flatten(1)
    rbm = Peer(n_visible=VISIBLE, n_hidden=HIDDEN, steps=1, learning_rate=RATE)

    def update() -> None:
        negatives = rbm.gibbs_sampling(images)[-1].detach()
        cost = rbm.energy(images).mean() - rbm.energy(negatives).mean()
        rbm.optimizer.zero_grad()
        cost.backward()
        rbm.optimizer.step()

    return update


def floor() -> Contestant:
    images, weight = data().flatten(1), torch.rand(VISIBLE, HIDDEN)

    def products() -> None:
        hidden = images @ weight
        (hidden @ weight.T) @ weight

    return products


PEERS = {
    "scikit_learn": scikit_learn,
    **{n: make for n, make in (("rbms", rbms), ("learnergy", learnergy)) if find_spec(n)},
}


def make() -> Contestants:
    pyro.set_rng_seed(0)
    return {
        "zoo": zoo(RBM(VISIBLE, HIDDEN)),
        "zoo_capsules": zoo(CapsuleRBM(VISIBLE, 40, 16)),
        **{name: peer() for name, peer in PEERS.items()},
        "floor": floor(),
    }


def check() -> None:
    """Check that autograd's gradient equals the textbook's difference of outer products."""
    pyro.set_rng_seed(0)
    model, images = RBM(VISIBLE, HIDDEN).double(), data().double()
    negatives = model.gibbs(images)
    loss = model.free_energy(images).mean() - model.free_energy(negatives).mean()
    (gradient,) = torch.autograd.grad(loss, [model.weight])
    with torch.no_grad():
        outer = [
            x.flatten(1).T @ (x.flatten(1) @ model.weight.flatten(1)).sigmoid()
            for x in (images, negatives)
        ]
    torch.testing.assert_close(gradient.flatten(1), (outer[1] - outer[0]) / BATCH)


if __name__ == "__main__":
    inputs = f"{BATCH} images of binary noise, {VISIBLE} pixels; {HIDDEN} hidden units"
    main(Benchmark("rbm", make, check, "zoo", (*PEERS, "floor"), inputs))
