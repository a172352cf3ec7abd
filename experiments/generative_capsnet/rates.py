"""The learning rates of the runs at length, compared on validation images.

Every decoder is trained at every rate on the requests of `rotate`, with a tenth of the updates.
Errors are means over validation images of both rare classes, and test images choose nothing: the
rate to take is the one with the lowest error inside the range of training.
"""

from dataclasses import dataclass, replace

import numpy as np

from capsule_zoo.experiments import Options, Result, Study, experiment
from capsule_zoo.experiments.common.findings import by_quantity, mean_and_error
from capsule_zoo.experiments.generative_capsnet.headline import Lengths, Task, learn
from capsule_zoo.experiments.generative_capsnet.requests import PROTOCOLS
from capsule_zoo.records import Numbers, Table


@dataclass(frozen=True)
class Rates(Lengths):
    """The settings of the comparison of rates: `Lengths`, shorter, and the rates.

    Args:
        rates: learning rates.
        images: number of validation images of each rare class.
    """

    protocols: tuple[str, ...] = ("rotate",)
    steps: int = 2000
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)


@experiment("generative-capsnet/rates", data="mnist")
def rates(options: Options, chosen: Rates) -> Result:
    """Compare three learning rates of every decoder on validation images (25 core-minutes)."""
    tasks = {
        (name, decoder, rate): Task(
            decoder,
            PROTOCOLS[name],
            replace(chosen, fitting={**(chosen.fitting or {}), "lr": rate}),
            split="validation",
        )
        for name in chosen.protocols
        for decoder in chosen.decoders
        for rate in chosen.rates
    }
    study = Study({"-".join(map(str, key)): task for key, task in tasks.items()}, chosen.seeds)
    runs = study.run(learn, options)
    found: dict[str, dict[str, Numbers]] = {name: {} for name in chosen.protocols}
    for (name, decoder, rate), key in zip(tasks, study.variants, strict=True):
        line, points = next(iter(PROTOCOLS[name].lines.items()))
        seen = PROTOCOLS[name].inside(points)
        errors = np.array([run["errors"][line] for run in runs[key]]).mean(1)  # (seeds, points)
        for where, asked in (("inside", seen), ("outside", ~seen)):
            quantity = f"{where}_{rate:g}".replace(".", "_")
            number = mean_and_error(errors[:, asked].mean(1))
            found[name].setdefault(decoder, {})[quantity] = number
    return Result(
        {
            name: Table(by_quantity(numbers), f"{name}_{{variant}}_{{quantity}}".replace("-", "_"))
            for name, numbers in found.items()
        }
    )
