"""Layer-wise pre-training of a capsule Helmholtz machine by capsule RBMs, from the image upward.

Each layer is trained as the capsules of an RBM on the activities of the layer below: the lowest on
images, the next on the activities u = z h of the first, and so on. The couplings of an RBM
initialize both halves of the machine: generative weights downward and recognition weights upward.
Above the first layer an RBM has no Omega, because in the machine Omega couples switches to
switches.

References:
    Hinton, Osindero & Teh 2006, "A Fast Learning Algorithm for Deep Belief Nets".
    Li & Zhu 2019, "Capsule Generative Models" (ICANN).
"""

import copy
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides.energy import ExactSwitches
from capsule_zoo.guides.recognition import RecognitionLayer, RecognitionMachine
from capsule_zoo.inference.energy.contrastive_divergence import ContrastiveDivergence
from capsule_zoo.inference.training.fit import fit
from capsule_zoo.inference.training.progress import Run
from capsule_zoo.inference.training.settings import Pace
from capsule_zoo.models.capsule_helmholtz import CapsuleHelmholtzMachine, GenerativeLayer
from capsule_zoo.models.capsule_rbm import CapsuleRBM
from capsule_zoo.models.units.exponential_family import FAMILIES, BernoulliUnits


@accept_arrays("images", like="machine")
def pretrain(
    machine: CapsuleHelmholtzMachine, guide: RecognitionMachine, images: Tensor, **settings: Any
) -> list[Run]:
    """Train every layer in turn as a capsule RBM, and set the parameters of both halves in place.

    Args:
        machine, guide: a machine, and its recognition guide.
        images: training images (N, C, H, W).
        settings: settings of `fit` for each layer: at least epochs, steps or minutes. Default: SGD
            with a rate that falls from .05 to zero, or from .0003 where units or pixels are not
            Bernoulli; batches of 100, one persistent sweep.

    Returns:
        The run of every layer, the lowest first.

    Raises:
        ValueError: Gaussian units below or above Poisson units, whose RBM has no density, or
            settings that `fit` refuses.
    """
    objective = settings.pop("objective", ContrastiveDivergence(persistent=True))
    every = machine.visible, *(layer.hidden for layer in machine.layers)
    lr = 0.05 if all(isinstance(units, BernoulliUnits) for units in every) else 3e-4
    defaults = dict(optimizer=torch.optim.SGD, lr=lr, pace=Pace("linear"), batch_size=100)
    runs = []
    below: GenerativeLayer | None = None
    for generative, recognition in zip(reversed(machine.layers), guide.layers, strict=True):
        rbm = _rbm_like(machine, generative, below, images)
        layer_objective = copy.deepcopy(objective)  # which has separate chains
        runs.append(
            fit(
                rbm,
                ExactSwitches(rbm),
                images,
                objective=layer_objective,
                **{**defaults, **settings},
            )
        )
        _take_over(guide, generative, recognition, below, rbm)
        with torch.no_grad():
            chunks = images.split(1000)
            images = torch.cat([rbm.posterior(x).sample().activity[:, None] for x in chunks])
        below = generative
    return runs


def _rbm_like(
    machine: CapsuleHelmholtzMachine,
    layer: GenerativeLayer,
    below: GenerativeLayer | None,
    images: Tensor,
) -> CapsuleRBM:
    """Return a new RBM between a layer and the layer, or image, below it."""
    both = machine.visible if below is None else below.hidden, layer.hidden
    visible, hidden = (next(n for n, kind in FAMILIES.items() if type(u) is kind) for u in both)
    _, channels, height, width = images.shape
    shape, sizes = (channels, height, width), layer.hidden.bias.shape
    rbm = CapsuleRBM(shape, *sizes, visible_family=visible, hidden_family=hidden)
    rbm = rbm.to(machine.weight)
    rbm.switch_weight.requires_grad_(below is None)
    rbm.set_base_rates(images)
    return rbm


@torch.no_grad()
def _take_over(
    guide: RecognitionMachine,
    layer: GenerativeLayer,
    recognition: RecognitionLayer,
    below: GenerativeLayer | None,
    rbm: CapsuleRBM,
) -> None:
    """Copy an RBM's parameters into the generative and the recognition layer."""
    machine = guide.model
    layer.hidden.load_state_dict(rbm.hidden.state_dict())
    layer.switch_bias.copy_(rbm.switch_bias)
    recognition.coupling.weight.copy_(rbm.weight)
    recognition.switch_bias.copy_(rbm.switch_bias)
    recognition.hidden_bias.zero_()
    if below is None:
        machine.weight.copy_(rbm.weight)
        machine.switch_weight.copy_(rbm.switch_weight)
        machine.visible.load_state_dict(rbm.visible.state_dict())
        recognition.coupling.switch_weight.copy_(rbm.switch_weight)
        if guide.centered:  # add what the subtracted mean takes away from the fields of an image
            origin = machine.visible.mean().flatten()
            recognition.hidden_bias.copy_(torch.einsum("m,mkj->kj", origin, rbm.weight))
            recognition.switch_bias.add_(origin @ rbm.switch_weight)
    elif below.coupling is not None:
        below.coupling.weight.copy_(rbm.weight.flatten(1).T.view_as(below.coupling.weight))
