"""`fit` refuses data, settings and guides that do not fit, in a line, and leaves the pair alone."""

import math

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import RenyiELBO, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from small_entries import check_refused
from torch.utils.data import DataLoader, TensorDataset
from toys import (
    QUIET,
    Conjugate,
    ExactGuide,
    Items,
    LinearGuide,
    assert_same,
    dataset,
    fit,
    grouped,
    pair,
    states,
)

from capsule_zoo import inference
from capsule_zoo.data import Split
from capsule_zoo.guides import FreeForm
from capsule_zoo.inference.training.stages import Stage, fit_stages

IMAGES = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0)).double()
BYTES = np.zeros((4, 1, 2, 2), np.uint8)


KINDS = "must be a Dataset, a Split, images .*, a list of such batches, .* or a torch DataLoader"
DATA = [
    (None, f"data {KINDS}, not None"),
    ([torch.zeros(1, 2, 2)], f"data {KINDS}, not a list; .* and numpy.stack for a list"),
    ("mnist", rf"data {KINDS}, not a str; see load_dataset\(name\)"),
    (BYTES, "divide bytes by 255"),
    (np.zeros((4, 2, 2, 1)), r"move the channels by images\.movedim\(-1, 1\)"),
    (np.zeros((4, 1, 2, 2), bool), r"call images\.float\(\)"),
    (np.zeros((4, 2, 2)), r"add the missing dimensions with images\[:, None\]"),
    (np.array([None, 1]), "data must hold floating point pixels, not object"),
    (np.full((4, 1, 2, 2), 255.0), r"must lie in \[0, 1\].*; rescale them, or clamp rounding"),
    (TensorDataset(torch.zeros(4, 1, 2, 2, dtype=torch.uint8)), "divide bytes by 255"),
    (Items(BYTES), "divide bytes by 255"),
    (IMAGES[:0], "images is an empty batch; give at least one image"),
    (4 * IMAGES - 2, r"images must lie in \[0, 1\], but these span"),
    (IMAGES * math.nan, "images holds NaN or infinite pixels"),
]


@pytest.mark.parametrize(("data", "message"), DATA, ids=[message for _, message in DATA])
def test_data_that_are_refused(data, message):
    check_refused(lambda: fit(*pair(), data, steps=1, **QUIET), message)
    if data is not None:
        call = lambda: fit(*pair(), IMAGES, validation=data, steps=1, **QUIET)  # noqa: E731
        check_refused(call, message.replace("data ", "validation "))


EXISTING = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
DECAYING = {"optimizer": torch.optim.SGD, "optim_args": {"lr": 0.1}, "gamma": 0.1}
DEVICE, PATHS = "device must be one of cpu", "checkpoint and resume are paths of a checkpoint"
SETTINGS = [
    ({"optimizer": "adam"}, r"a class such as torch\.optim\.Adam, .* not 'adam'"),
    ({"optimizer": EXISTING}, r"give the class torch\.optim\.Adam"),
    ({"optimizer": pyro.optim.Adam(lambda name: {"lr": 1.0})}, "a function of the parameter"),
    ({"optimizer": pyro.optim.Adam({}, {"clip_norm": 1.0})}, "use pace=Pace.clip="),
    ({"optimizer": pyro.optim.ExponentialLR(DECAYING)}, "a Pyro scheduler; give SGD alone"),
    ({"optimizer": pyro.optim.ClippedAdam({"lrd": 0.9})}, "optimizer has lrd"),
    ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times"),
    ({"optimizer": lambda groups: groups}, r"must return a torch\.optim\.Optimizer, not a li"),
    ({"objective": Trace_ELBO}, r"write Trace_ELBO\(\) with brackets"),
    ({"objective": RenyiELBO()}, r"ImportanceWeightedELBO\(num_particles=2, alpha=0\)"),
    ({"objective": RenyiELBO(0.5, num_particles=7)}, r"num_particles=7, alpha=0\.5\)$"),
    ({"objective": RenyiELBO(-1.0)}, "alpha=-1 gives no lower bound, and is not offered"),
    ({"objective": "elbo"}, "objective str offers no differentiable_loss"),
    ({"steps": None}, "give epochs, steps or minutes"),
    ({"steps": 0}, "steps must be positive"),
    ({"steps": True}, "steps must be a whole number, not True"),
    ({"epochs": 0.5}, "epochs must be a whole number, not 0.5; .* give steps"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"lr": -1.0}, "lr must be positive"),
    ({"lr": {"model": 1.0}}, "needs the keys 'model' and 'guide'"),
    ({"schedule": "stairs"}, "schedule must be one of 'constant', 'cosine', 'linear'"),
    ({"freeze": "both"}, "freeze must be one of None, 'model', 'guide', not 'both'"),
    ({"seed": "one"}, "seed must be a whole number, not 'one'"),
    ({"patience": 0}, "patience must be at least 1"),
    ({"minutes": "ten"}, "minutes must be positive and finite, not 'ten'"),
    ({"clock": "sun"}, "clock must be"),
    ({"device": "cuda:99"}, f"{DEVICE}.*, not 'cuda:99'"),
    ({"callbacks": print}, "callbacks must be a list of functions"),
    ({"checkpoint": True}, PATHS),
    ({"labels": torch.zeros(2)}, r"pass TensorDataset\(images, labels\) as data"),
    ({"labels": True}, "data has no labels, which are needed here"),
]


@pytest.mark.parametrize(
    ("settings", "message"), SETTINGS, ids=[pattern for _, pattern in SETTINGS]
)
def test_settings_that_are_refused_leave_the_pair_alone(settings, message):
    model, guide = pair()
    before = states(model, guide)
    check_refused(lambda: fit(model, guide, IMAGES, **QUIET | {"steps": 9} | settings), message)
    assert_same(before, states(model, guide))


class Labeled(Conjugate):
    """A model that explains labels."""

    supervised = True


def restless(images):
    restless.calls = getattr(restless, "calls", 0) + 1
    pyro.param(f"number {restless.calls}", torch.tensor(0.0))


def trained(guide, model=Conjugate, data=IMAGES, **settings) -> None:
    model = model().double()
    guide = guide(model) if isinstance(guide, type) else guide
    fit(model, guide, data, **{**QUIET, "steps": 1, **settings})


def staged(stages: int = 2, need: int = 3, **limits) -> None:
    parts = [Stage(f"stage {n}", need, *pair()) for n in range(stages)]
    fit_stages(parts, dataset(), **grouped(limits))


OF_IMAGES = "parameters for each image.* pass batch_size="
CALLS = [
    (lambda: trained(ExactGuide, freeze="model"), "no parameter to train"),
    (lambda: trained(AutoNormal, batch_size=2), OF_IMAGES + "4"),
    (lambda: trained(AutoNormal, data=dataset(3), batch_size=2), OF_IMAGES + "3"),
    (
        lambda: fit(
            (m := pair()[0]), FreeForm(m, IMAGES), IMAGES, **QUIET | {"batch_size": 2}, steps=1
        ),
        OF_IMAGES + "4",
    ),
    (lambda: trained(LinearGuide, data=DataLoader(IMAGES)), "16 is given, but a DataLoader"),
    *(
        (
            lambda data=data: inference.fit(
                *pair(), data, steps=1, **grouped({"labels": True, "progress": False})
            ),
            "data has no labels, which are needed here",
        )
        for data in (TensorDataset(IMAGES), Items(IMAGES), DataLoader(IMAGES, 4))
    ),
    (
        lambda: trained(ExactGuide, Labeled, Split(IMAGES, torch.arange(4))),
        "needed: Labeled explains",
    ),
    (lambda: inference.fit(*pair(), IMAGES, schedule=1), r"pace=Pace\(schedule=...\); import Pace"),
    (lambda: inference.fit(*pair(), IMAGES, labels=1), r"inputs=Inputs\(labels=...\)"),
    *(
        (
            lambda name=name: inference.fit(*pair(), IMAGES, steps=1, **{name: "cosine"}),
            f"{name} must be a {name.capitalize()} of .*, not 'cosine'",
        )
        for name in ("pace", "inputs", "checks")
    ),
    (lambda: trained(3), r"guide must be a torch\.nn\.Module or a function with pyro\.param, not"),
    (
        lambda: fit(pair()[0], LinearGuide, IMAGES, steps=1, **QUIET),
        r"not the class LinearGuide; make one by LinearGuide\(\.\.\.\)",
    ),
    (lambda: trained(lambda: None), "<lambda> cannot run on these images"),
    (lambda: trained(lambda images: None), "site 'code' is missing in the guide"),
    (lambda: trained(restless), "pyro.param 'number 2' of restless is not among those of the fir"),
    (lambda: staged(0, steps=3), "stages is empty"),
    (lambda: staged(), "give epochs, steps or minutes"),
    (lambda: staged(need=0), "steps must be at least 1"),
    (lambda: Stage("few", 3, *pair(), most=0), "most must be at least 1"),
]


@pytest.mark.parametrize("refusal", CALLS, ids=lambda refusal: refusal[1])
def test_calls_that_are_refused(refusal):
    check_refused(*refusal)
