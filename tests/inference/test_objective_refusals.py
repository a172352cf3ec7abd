"""What objectives, annealing, calibration and starts cannot take is refused in one line."""

from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import RenyiELBO
from small_entries import check_refused, images_for, on, small_entry
from small_rbms import binary_images
from small_rbms import small as small_rbm
from torch import Tensor
from toys import Conjugate, LinearGuide, NoGuide, PointGuide, conjugate_images, on_toys, pair

from capsule_zoo import models
from capsule_zoo.data import Shifts
from capsule_zoo.data.points import SHAPES, draw_scenes
from capsule_zoo.guides import FreeForm, RecognitionMachine
from capsule_zoo.guides.per_image.site_distributions import UnservedSite
from capsule_zoo.inference import (
    ContrastiveDivergence,
    ImportanceWeightedELBO,
    IncompatibleGuide,
    Objective,
    ReweightedWakeSleep,
    StackedCapsuleObjective,
    WakeSleep,
    evaluate,
    log_partition,
    loss_per_image,
)
from capsule_zoo.inference.annealing import annealed_bounds, annealed_log_likelihood
from capsule_zoo.inference.annealing.exceedance import exceedances
from capsule_zoo.inference.calibration import check_calibration, rank_uniformity
from capsule_zoo.inference.energy.enumeration import exact_samples
from capsule_zoo.inference.energy.pretrain import pretrain
from capsule_zoo.inference.objectives.score_function import ScoreFunctionELBO
from capsule_zoo.inference.objectives.thermodynamic import ThermodynamicObjective
from capsule_zoo.inference.references import load_reference
from capsule_zoo.inference.training.starts.template_learning import learn_templates
from capsule_zoo.inference.transformations import infer_transformation


def annealed(guide=LinearGuide, **settings):
    model = pair()[0]
    defaults = dict(temperatures=3, leapfrogs=2, pilot_chains=2)
    guide = guide(model).double() if callable(guide) else guide
    return annealed_log_likelihood(model, guide, IMAGES, **defaults | settings)


class Counted(Conjugate):
    """A model of a site that cannot move."""

    def code(self) -> Tensor:
        return pyro.sample("count", dist.Poisson(torch.tensor(2.0).double()))


class Returns(Objective):
    """An objective whose loss is what it is made with."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.loss_of = loss

    def differentiable_loss(self, model, guide, *args, **kwargs):
        return self.loss_of


def taught(points: Tensor | None = None, present=None, sigma: float = 0.1, **settings) -> None:
    lines = [torch.arange(2.0 * n).reshape(n, 2) for n in (4, 3)]
    model = models.Constellations(lines, sigma=sigma).double()
    learn_templates(model, POINTS if points is None else points, present, **settings)


def machine(visible: str = "bernoulli", hidden: str = "bernoulli") -> tuple:
    families = dict(visible_family=visible, hidden_family=hidden)
    model = models.CapsuleHelmholtzMachine(4, (2, 2), 2, **families)
    return model, RecognitionMachine(model)


def asked(images=None, grid=None, **settings) -> None:
    entry = small_entry("conditional-autoencoder")
    images = images_for(entry) if images is None else images
    grid = torch.zeros(2, 2) if grid is None else grid
    infer_transformation(entry.model, entry.guide, images, Shifts(), grid=grid, **settings)


def restored(**values) -> None:
    problem = load_reference("generative-capsnet")
    for name, value in values.items():
        getattr(problem, name)(value)


IMAGES = conjugate_images(2)
POINTS = draw_scenes(
    10, 0.1, templates=[SHAPES["square"], SHAPES["triangle"]], seed=9
).points.double()
PRESENT = ~POINTS[..., 0].isnan()
REFUSALS = [
    # annealing and partition functions
    (lambda: annealed(temperatures=1), "temperatures must be at least 2"),
    (lambda: annealed(prior_fraction=1.0), "prior_fraction must be from 0"),
    (lambda: annealed(PointGuide), "points at code.*widen"),
    (lambda: annealed({}), "guide is empty; give guides by name"),
    (lambda: annealed({"prior": None}), "guide 'prior' is not a guide; leave it out"),
    (
        lambda: annealed(lambda m: FreeForm(m, IMAGES, distribution="normal")),
        "own images.*simulated=0",
    ),
    (lambda: on("capsule-rbm", annealed_log_likelihood), "log_partition"),
    (
        lambda: annealed_log_likelihood(Counted().double(), None, IMAGES),
        "site 'count'.*cannot",
        UnservedSite,
    ),
    (lambda: annealed_bounds(on_toys(evaluate, num_particles=2)), "not an annealing"),
    (lambda: exceedances([np.zeros(3)] * 2, {"exact": [np.zeros(2)] * 2}), "on 2 images, but 3"),
    (lambda: log_partition(small_rbm(), "reverse"), "method must be one of 'exact', 'ais', 'raise"),
    (lambda: log_partition(small_rbm(), "raise"), "needs images to start from"),
    (lambda: log_partition(models.CapsuleRBM(36, 2, 16)), r"at most 2\^25 states"),
    (lambda: log_partition(small_rbm("poisson", "poisson")), r"at most 2\^25 states"),
    (lambda: exact_samples(small_rbm("gaussian", "bernoulli"), 9), "must have Gaussian pixels"),
    # objectives
    *(
        (lambda kind=kind, number=number: kind(number), message)
        for kind in (ImportanceWeightedELBO, ReweightedWakeSleep, ScoreFunctionELBO)
        for number, message in (
            (0, "num_particles must be at least"),
            (2.5, "must be a whole numb"),
        )
    ),
    (lambda: ScoreFunctionELBO(1), "num_particles must be at least 2"),
    (lambda: ImportanceWeightedELBO(alpha=-1), "alpha must be at least 0, not -1"),
    (lambda: ReweightedWakeSleep(sleep=-1), "sleep must be from 0 to 1, not -1"),
    (lambda: on_toys(WakeSleep().loss), "needs a model that names its top_sites, and Conjugate"),
    (lambda: ThermodynamicObjective(first=1.0), "first"),
    (lambda: ContrastiveDivergence(sparsity=-1), "sparsity must be at least 0, not -1"),
    (lambda: ContrastiveDivergence(tempering=(1, 0.5)), "tempering needs persistent=True"),
    *(
        (
            lambda levels=levels: ContrastiveDivergence(tempering=levels, persistent=True),
            "tempering must be 1 and then falling",
        )
        for levels in ((0.9, 0.5), (1, 1), (1,))
    ),
    (lambda: on_toys(ContrastiveDivergence().loss), "needs a CapsuleRBM or an RBM as mo"),
    (
        lambda: ContrastiveDivergence().loss(small_rbm(), LinearGuide(pair()[0]), binary_images()),
        "needs a guide with a free energy in closed form",
    ),
    (lambda: on("vae", StackedCapsuleObjective().terms), "model must be a StackedCapsuleAutoencod"),
    (lambda: StackedCapsuleObjective(prior_within=-1.0), "prior_within must be at least 0"),
    (lambda: StackedCapsuleObjective(noise="normal"), "noise must be one of"),
    (lambda: on_toys(partial(loss_per_image, RenyiELBO())), "RenyiELBO offers no differentiable_l"),
    *(
        (
            lambda loss=loss: loss_per_image(Returns(loss), *pair(), conjugate_images(6)),
            f"differentiable_loss of Returns must return a scalar tensor, .*, not {form}$",
        )
        for loss, form in ((torch.zeros(6), r"\(6,\)"), (0.5, "float"), (None, "NoneType"))
    ),
    (
        lambda: pretrain(*machine("poisson", "gaussian"), binary_images(6).float(), steps=1),
        "one Gaussian and one",
    ),
    # calibration, references and priors
    (lambda: rank_uniformity(torch.zeros(79, 1).long(), 31), "too few for 16 bins; give 80"),
    (lambda: check_calibration(*pair(), number=79), "too few for 16 bins; give 80 or more"),
    (lambda: check_calibration(*pair(), 100, draws=3.5), "draws must be a whole number"),
    (lambda: on("capsule-rbm", lambda m, g, _: check_calibration(m, g)), "up to a constant only"),
    (lambda: on_toys(lambda m, g, x: check_calibration(m, FreeForm(m, x))), "for certain images"),
    (
        lambda: on_toys(lambda m, g, x: check_calibration(m, NoGuide(m))),
        "missing",
        IncompatibleGuide,
    ),
    (lambda: load_reference("constelation"), "unknown reference problem 'constelation'; there are"),
    (lambda: restored(log_prob=torch.zeros(3, 7)), r"vectors \(..., 8\) for .*, not \(3, 7"),
    (lambda: restored(score=torch.full((3, 8), torch.nan)), "NaN or infinite"),
    (lambda: restored(vector={"object_pose": torch.zeros(2, 2)}), r"lacks .'part_jitter'."),
    # transformations and templates
    (lambda: asked(grid=torch.zeros(5)), r"grid must be \(G, 2\), not \(5, 1\)"),
    (lambda: asked(torch.rand(2, 1, 3, 3)), r"images must be \(B, 1, 5, 6\)"),
    (lambda: taught(POINTS[0]), r"points\[None\]"),
    (lambda: taught(present=PRESENT[:, :5]), r"present must be \(10, 7\)"),
    (lambda: taught(present=torch.ones_like(PRESENT)), "set present to 0"),
    (lambda: taught(POINTS[:, :1]), "fewer than two"),
    (lambda: taught(largest=3), "at most largest=3 points"),
    (lambda: taught(sigma=0.0), "sigma above 0"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal[1])
def test_what_does_not_fit_is_refused(refusal):
    check_refused(*refusal)
