"""A test that training starts at every seed: first losses, and the bound on digits at ten seeds.

A pair that does not start draws nothing: its parts lie outside the image, and its loss stays at the
loss of a blank canvas.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Normal

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    held_out_bounds,
    mean_and_error,
    single,
)
from capsule_zoo.experiments.common.seeds import from_seeds, spread
from capsule_zoo.experiments.part_whole.headline import (
    DIGITS_STEPS,
    JITTER,
    TIGHTENING_STEPS,
    learn_digits,
    tighten,
)
from capsule_zoo.experiments.training import checkpoints
from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference import Inputs, fit
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.records import Numbers
from capsule_zoo.sizes import sized

SETS_OF_SIZES: Mapping[str, Mapping[str, Any]] = {  # "few" as in the README and `part-whole/digits`
    "few": dict(objects=16, parts=12),
    "entry": {},
}


class Start(NamedTuple):
    """The losses of all steps, and the loss of a blank canvas (nats per training image)."""

    losses: list[float]
    blank: float

    @property
    def step(self) -> int:
        """The first step under half of the blank canvas's loss; one more than all steps if none."""
        under = (i for i, loss in enumerate(self.losses, start=1) if loss < self.blank / 2)
        return next(under, len(self.losses) + 1)

    @property
    def loss(self) -> float:
        """The mean of ten steps, because a batch's noise is as large as some seeds' differences."""
        return mean_and_error(self.losses[-10:])[0]


def start(options: Options, *, data: str, sizes: Mapping[str, Any], steps: int) -> list:
    """Train constructors' defaults by plain `fit`; return the losses, and a blank canvas's loss."""
    digits = load_dataset(data, root=options.data_root)
    model = sized(PartWholeCapsules, digits.image_shape, **sizes)
    saved = checkpoints(options, "")  # a job shows no progress
    guide = PartWholeGuide(model)
    run = fit(model, guide, digits.train, steps=steps, seed=options.seed, checks=saved)
    return [run.history["loss"].tolist(), blank_loss(model, digits.train.images)]


def blank_loss(model: PartWholeCapsules, images: Tensor) -> float:
    """Return the loss of images on a blank canvas, in nats per image."""
    law = Normal(torch.zeros(()), model.sigma_image)
    return -law.log_prob(images).sum((1, 2, 3)).mean().item()


def summary(starts: list[Start]) -> Numbers:
    """Return the metrics of runs that differ in their seed only."""
    losses, steps = [s.loss for s in starts], [float(s.step) for s in starts]
    blank = sum(s.step > len(s.losses) for s in starts)
    return {
        "loss": mean_and_error(losses),
        "worst_loss": single(max(losses), len(losses)),
        "step": mean_and_error(steps),
        "latest_step": single(max(steps), len(steps)),
        "blank": single(blank, len(starts)),
    }


def _register(name: str, data: str, words: str) -> Callable[..., Result]:
    """Register the first steps on a data set; those on digits also on two threads."""

    def starts(
        options: Options,
        *,
        seeds: int = 10,
        steps: int = 200,
        sizes: Mapping[str, Mapping] = SETS_OF_SIZES,
    ) -> Result:
        rows: dict[str, Numbers] = {}
        for kind, own in sizes.items():
            task = partial(start, data=data, sizes=own, steps=options.shortened(steps))
            numbers = {kind: 1}
            if (kind, data) == ("few", "digits"):
                numbers["few_two_threads"] = 2
            found = from_seeds(task, options, seeds, numbers)
            begun = {row: [Start(*outcome) for outcome in own] for row, own in found.items()}
            rows |= {row: summary(own) for row, own in begun.items()}
        return Result({"blank_canvas": single(begun[kind][0].blank), **by_quantity(rows)})

    starts.__doc__ = f"""Measure the loss after 200 steps on {words}, and when training starts.

    Args:
        seeds: number of seeds.
        steps: updates of every run in a full run of 20 minutes.
        sizes: sets of sizes by name, "few" among them; on digits it is also trained on two threads.
    """
    return experiment(f"part-whole/{name}", data=data, minutes=20)(starts)


_register("starts", "digits", "digits")
_register("starts-mnist", "mnist", "MNIST")


@experiment("part-whole/demo-seeds", data="digits", minutes=30)
def demo_seeds(
    options: Options,
    *,
    seeds: int = 10,
    steps: int = DIGITS_STEPS,
    tightening: int = TIGHTENING_STEPS,
    particles: int = 50,
) -> Result:
    """Measure the bound on held-out digits at ten seeds: median, largest distance (30 minutes).

    Args:
        seeds: number of seeds.
        steps: updates of the pair; these and the next shrink with minutes.
        tightening: updates of the guide with normal poses.
        particles: number of draws of the IWAE bound.
    """
    length, more = options.shortened(steps), options.shortened(tightening)
    task = partial(demo_bound, steps=length, tightening=more, particles=particles)
    bounds = from_seeds(task, options, seeds, {"demo": 1})["demo"]
    found = {f"elbo_{name}": number for name, number in spread(bounds).items()}
    farthest = max(abs(bound - found["elbo_median"][0]) for bound in bounds)
    return Result({**found, "largest_distance": single(farthest, seeds)})


def demo_bound(options: Options, *, steps: int, tightening: int, particles: int) -> float:
    """Return the `elbo` of `part-whole/digits` from one seed."""
    data = load_dataset("digits")
    entry = learn_digits(data, options, steps=steps)
    normal = tighten(entry, data, options, steps=tightening, inputs=Inputs(JITTER))
    return held_out_bounds(normal, data.test, particles, options.seed)["elbo"][0]
