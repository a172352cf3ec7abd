"""Calibration of guides: checks of the exact ones, and reports of the approximate ones."""

import math
from typing import Any

import pyro.distributions as dist
import torch
from checks import check
from machines import (
    GAUSSIANS,
    at,
    calibrated,
    chain_machine,
    energy_machine,
    exact_draws,
    prior_draws,
    randomized,
)
from means import compare_mean
from pyro.infer import TraceEnum_ELBO
from torch import Tensor

from capsule_zoo.guides import (
    ExactLabel,
    ExactMatching,
    ExactSwitches,
    MeanFieldSwitches,
    PartWholeGuide,
    RecognitionMachine,
)
from capsule_zoo.inference import Checks, ReweightedWakeSleep, fit
from capsule_zoo.inference.calibration import Outcome
from capsule_zoo.models import (
    RBM,
    CapsuleHelmholtzMachine,
    Capsules,
    Constellations,
    ConvolutionalClassifier,
    PartWholeCapsules,
)
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.matrix_capsules import spread_energy
from capsule_zoo.settings import configure


@check("sbc_exact_switches_rbm", of=[ExactSwitches], kind=RBM)
@check("sbc_exact_switches", of=[ExactSwitches])
@check("sbc_exact_switches_gaussian", of=[ExactSwitches], hidden_family="gaussian")
@check("sbc_exact_switches_poisson", of=[ExactSwitches], hidden_family="poisson")
@check("sbc_exact_switches_spike_slab", of=[ExactSwitches], **GAUSSIANS)
def exact_switches(number: int, **options: Any) -> Outcome:
    """Check a capsule RBM's closed-form posterior on draws from its enumerated joint."""
    model = energy_machine(**options)
    return calibrated(model, ExactSwitches(model), *exact_draws(model, number))


@check("sbc_mean_field_switches", of=[MeanFieldSwitches], approximate=True)
def mean_field(number: int) -> Outcome:
    """Check the mean field of a capsule RBM with strong couplings; it is expected to be off."""
    model = energy_machine(scale=1.5)
    return calibrated(model, MeanFieldSwitches(model), *exact_draws(model, number))


class SpreadClassifier(ConvolutionalClassifier):
    """A classifier with the label distribution of the spread loss, as in matrix capsules."""

    def label_distribution(self, scores: Tensor) -> dist.Categorical:
        return dist.Categorical(logits=-spread_energy(scores.sigmoid(), margin=0.9))


@check("sbc_exact_label", of=[ExactLabel], kind=ConvolutionalClassifier, fraction=0.2)
@check("sbc_exact_label_spread_loss", of=[ExactLabel], kind=SpreadClassifier, fraction=0.2)
def exact_label(number: int, kind: type[ConvolutionalClassifier]) -> Outcome:
    """Check the label of an image, under the distribution of scores or of the spread loss."""
    model = kind((1, 4, 4), 3, channels=(2, 2), hidden=4).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # otherwise all labels are about equally likely
    return calibrated(model, ExactLabel(model), *prior_draws(model, number), draws=15)


@check("sbc_exact_matching", of=[ExactMatching], fraction=0.04, sigma=0.2)
@check("sbc_exact_matching_scene_noise", of=[ExactMatching], fraction=0.04, sigma=0.0)
def exact_matching(number: int, sigma: float) -> Outcome:
    """Check presences, matchings and poses of triangles, with noise on templates or on scenes."""
    triangle = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [0.0, 1.0]])
    model = Constellations([triangle, triangle], sigma, sigma_floor=0.15, clutter=1).double()
    values, points = prior_draws(model, number)
    several = (~points[..., 0].isnan()).sum(1) > 1  # others say nothing of a pose, and are refused
    values = {name: value[several] for name, value in values.items()}
    return calibrated(model, ExactMatching(model), values, points[several], draws=15)


@check("sbc_part_parents", of=[PartWholeCapsules], enumerated=False)
@check("sbc_part_parents_enumerated", of=[PartWholeCapsules, TraceEnum_ELBO], enumerated=True)
def part_parents(number: int, enumerated: bool) -> Outcome:
    """Check the object that each part chose, by the model's posterior or Pyro's enumeration."""
    sizes: dict[str, Any] = dict(
        template_size=3, image_shape=(1, 5, 5), sigma_off=0.3, sigma_dummy=0.3
    )
    sizes |= dict(sigma_min=0.05)
    options: dict[str, Any] = dict(selection="enumerate", presence="discrete", epsilon=0.5)
    model = randomized(configure(PartWholeCapsules, objects=2, parts=3, **sizes, **options), 0.3)
    # noise exceeds black and white
    model.space = ImageSpace(model.image_shape, (-math.inf, math.inf))
    model.selections[0].raw_scale.data -= 1.5  # otherwise votes say little about the parent
    values, images = prior_draws(model, number)
    objects, parts = (
        Capsules(values[f"{n}_presence"], values[f"{n}_pose"]) for n in ("object", "part")
    )
    with torch.no_grad():
        if enumerated:
            guide = at(model.sites, model.plate_dims, values)
            elbo = TraceEnum_ELBO(max_plate_nesting=2)
            posterior = elbo.compute_marginals(model, guide, images)["part_parent"].probs
        else:
            posterior = model.responsibilities(objects, parts)
        votes = model.selections[0](objects, relaxed=False).vote  # (N, parts, 1 + objects, 6)
        apart = (parts.pose[:, :, None] - votes).square().sum(-1)
    return choices_calibrated(values["part_parent"], posterior, apart)


def choices_calibrated(truth: Tensor, posterior: Tensor, apart: Tensor) -> Outcome:
    """Test whether choices follow their posterior probabilities, without posterior draws.

    Given the data, the mean of 1[choice = j] - r_j is zero, and stays zero when it is multiplied by
    any function of the data. The test uses 1, r_j (which shows over- and underconfidence) and the
    misfit.

    Args:
        truth: index of the true choice, (N, children), from 0.
        posterior: probabilities r, (N, children, choices).
        apart: distance of a child's data from the prediction of each choice, like `posterior`.
    """
    surprise = torch.nn.functional.one_hot(truth, posterior.shape[-1]) - posterior
    rows = torch.stack([surprise, surprise * posterior, surprise * apart], 1).flatten(1)
    return compare_mean(rows, torch.zeros(rows.shape[1]).to(rows))


@check("sbc_recognition_chain", of=[RecognitionMachine])
def recognition_of_a_chain(number: int) -> Outcome:
    """Check a capsule Helmholtz machine whose recognition half is its exact posterior."""
    model, guide = chain_machine()
    return calibrated(model, guide, *prior_draws(model, number))


@check("sbc_recognition_trained", of=[RecognitionMachine], approximate=True)
def recognition_after_training(number: int) -> Outcome:
    """Check a larger machine after a short training of its recognition half on model samples."""
    model, guide = recognition_after(steps=50)
    return calibrated(model, guide, *prior_draws(model, number))


def recognition_after(steps: int) -> tuple[CapsuleHelmholtzMachine, RecognitionMachine]:
    """Return a machine of 2 x 3 capsules on 2x2 pixels and its guide, trained for `steps` steps."""
    model = randomized(CapsuleHelmholtzMachine((1, 2, 2), (2, 3), 1), 1.5)
    guide = RecognitionMachine(model).double()
    _train(model, guide, prior_draws(model, 2000)[1], steps, ReweightedWakeSleep(2), lr=0.02)
    return model, guide


def small_part_whole(side: int) -> PartWholeCapsules:
    """Return a random model of two objects and two parts on side x side pixels."""
    sizes: dict[str, Any] = dict(objects=2, parts=2, template_size=3, sigma_min=0.05)
    return randomized(configure(PartWholeCapsules, (1, side, side), **sizes), 0.5)


@check("sbc_part_whole_trained", of=[PartWholeGuide], approximate=True, fraction=0.04)
def part_whole_after_training(number: int) -> Outcome:
    """Check presences and poses of a small part-whole model after a short guide training."""
    model = small_part_whole(8)
    model.space = ImageSpace(model.image_shape, (-math.inf, math.inf))
    sizes: dict[str, Any] = dict(channels=4, width=8, heads=2, blocks=1, inducing=2)
    guide = configure(PartWholeGuide, model, "normal", **sizes).double()
    _train(model, guide, prior_draws(model, 500)[1], steps=100, objective=None, lr=3e-3)
    discrete = model.discretize(), guide.discretize().eval()
    return calibrated(*discrete, *prior_draws(discrete[0], number), draws=15)


def _train(model: Any, guide: Any, images: Tensor, steps: int, objective: Any, lr: float) -> None:
    limits: dict[str, Any] = dict(
        steps=steps, batch_size=50, freeze="model", checks=Checks(progress=False)
    )
    fit(model, guide, images, objective=objective, lr=lr, **limits)
