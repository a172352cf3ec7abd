"""How fast scenes and AIR learn to count the digits of the same pictures, in one run."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import torch

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, train
from capsule_zoo.experiments.common.findings import mean_and_error
from capsule_zoo.experiments.scenes.air import TutorialAir
from capsule_zoo.experiments.scenes.counts import PUBLISHED, accuracy
from capsule_zoo.inference import Checks, Pace
from capsule_zoo.models.common.modes import seeded
from capsule_zoo.records import Number
from capsule_zoo.zoo.scenes.figures import counts_against_time

DATA = "multi-mnist:train=30000"
MARKS = (1, 2, 3, 5, 8, 12, 20, 30, 60)  # minutes


class Curve(list[tuple[float, int, Number]]):
    """Measurements (processor seconds, updates, share of right counts); measuring takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = time.process_time()

    def note(self, updates: int, measure: Callable[[], Number]) -> float:
        """Measure after a number of updates, and return the minutes that they took."""
        seconds = time.process_time() - self.begun
        self.append((seconds, updates, measure()))
        self.begun = time.process_time() - seconds
        return seconds / 60


@experiment("scenes/beside-air", data="multi-mnist", minutes=17)
def beside_air(
    options: Options, *, ours: float = 5.0, air: float = 12.0, every: int = 200, tested: int = 1000
) -> Result:
    """Train scenes and AIR, as Pyro's tutorial has it, and count digits meanwhile (17 minutes).

    Seconds are of the processor. One draw of each guide counts the digits of a scene.

    Args:
        ours, air: minutes of the processor for each.
        every: updates between two measurements.
        tested: test scenes whose digits are counted.
    """
    study = Study({"scenes": (ours, every, tested), "air": (air, every, tested)})
    curves = {name: curve for name, (curve,) in study.run(curve_of, options).items()}
    found: dict[str, Any] = {}
    for name, curve in curves.items():
        for mark in MARKS:
            within = [row[2] for row in curve if row[0] <= 60 * mark]
            if within and curve[-1][0] > 54 * mark:
                found.setdefault(f"count_accuracy_{mark}_minutes", {})[name] = within[-1]
        found.setdefault("updates", {})[name] = (float(curve[-1][1]), None, 1)
        found.setdefault("seconds", {})[name] = (curve[-1][0], None, 1)
    lines = [[(seconds, number[0]) for seconds, _, number in c] for c in curves.values()]
    return Result(found, {"": counts_against_time(lines, PUBLISHED, list(curves))})


def curve_of(job: Job[tuple[float, int, int]]) -> Curve:
    """Train one of the two, and return its measurements."""
    (minutes, every, tested), options, curve = job.variant, job.options, Curve()
    data = load_dataset(DATA, options.data_root)
    test = data.test[:tested]
    if job.name == "scenes":
        entry = begun("scenes", data, options, counts="learned")
        counts = partial(accuracy, entry, test, draws=1)
        checks = Checks(every=every, callbacks=[lambda c: curve.note(c.step, counts) >= minutes])
        how: dict[str, Any] = dict(steps=10**6, pace=Pace("constant"), checks=checks)
        train(entry, data.train, replace(options, runs=None), **how)  # the curve would be lost
        return curve
    pyro.set_rng_seed(options.seed)
    network, images = TutorialAir(data.image_shape[-1]), data.train.images

    @torch.no_grad()
    def counted() -> Number:
        with seeded(0):
            found = torch.cat([network.guide(some) for some in test.images.split(100)])
        return mean_and_error((found == test.objects.counts).float())

    svi, updates, passed = network.svi(), 0, 0.0
    while passed < minutes:
        for _ in range(every):
            svi.step(images[torch.randint(len(images), (64,))])
        updates += every
        passed = curve.note(updates, counted)
    return curve
