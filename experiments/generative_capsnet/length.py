"""The experiments on requests at length: one seed of each decoder, for thousands of updates.

The article trains for 100,000 updates, and the other records for hundreds. These records say how
much of a difference between them and the article is the length alone. `variants` has what the
article also tried: a code of 128 numbers, and learned addresses, its first attempt, which failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import by_quantity
from capsule_zoo.experiments.generative_capsnet.headline import (
    DECODERS,
    VARIANTS,
    Errors,
    Task,
    Trainings,
    as_table,
    curves,
    errors_of_rare,
    learn,
    measured,
    of_runs,
    painted,
)
from capsule_zoo.experiments.generative_capsnet.requests import PROTOCOLS, on_canvas
from capsule_zoo.experiments.study import Study, choose
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROTATIONS = ("rotate", "one-shot", "rotate-beyond")
FAST: Mapping[str, Any] = dict(lr=3e-3, batch_size=32)
RATES = {"continuous": 1e-3, "continuous_linear": 1e-3}  # at .003 they draw nothing any more


@dataclass(frozen=True)
class Lengths(Trainings):
    """The settings of the runs at length: `Trainings`, and the experiments that they repeat.

    Args:
        protocols: names of the experiments on requests.
        inferred: not used here.
        fitting: arguments of `fit` that replace batches of 32 and a rate of .003, with which errors
            fall fastest; the rate of continuous capsules is .001.
    """

    protocols: tuple[str, ...] = ROTATIONS
    decoders: tuple[str, ...] = tuple(name for name in DECODERS if name not in ("vae", "broadcast"))
    seeds: int = 1
    steps: int = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("protocol", self.protocols, PROTOCOLS)

    def of(self, decoder: str) -> Trainings:
        """Return the settings of one decoder's training."""
        own = {"lr": RATES[decoder]} if decoder in RATES else {}
        return replace(self, fitting={**FAST, **own, **(self.fitting or {})})


@dataclass(frozen=True)
class LongShifts(Lengths):
    """The settings of shifts at length: `Lengths`, with another experiment and fewer decoders.

    Args:
        decoders: names of the decoders that are trained; linear motion has one of them.
    """

    protocols: tuple[str, ...] = ("shift",)
    decoders: tuple[str, ...] = (
        "autoencoder",
        "digit_capsules",
        "continuous",
        "digit_capsules_linear",
    )


@dataclass(frozen=True)
class LongVariants(Lengths):
    """The settings of the variants at length: `Lengths`, with one experiment and other decoders."""

    protocols: tuple[str, ...] = ("rotate",)
    decoders: tuple[str, ...] = tuple(VARIANTS)


@experiment("generative-capsnet/at-length", data="mnist", takes=Lengths)
def at_length(options: Options, **settings: Any) -> Result:
    """Repeat `rotate`, `one-shot` and `rotate-beyond` with 20,000 updates (120 core-minutes)."""
    return repeated(options, Lengths(**settings))


@experiment("generative-capsnet/shift-at-length", data="mnist", takes=LongShifts)
def shift_at_length(options: Options, **settings: Any) -> Result:
    """Repeat `shift` with 20,000 updates (65 core-minutes)."""
    return repeated(options, LongShifts(**settings))


@experiment("generative-capsnet/variants", data="mnist", takes=LongVariants)
def variants(options: Options, **settings: Any) -> Result:
    """Repeat `rotate` at length with a code of 128 numbers, and with learned addresses."""
    return repeated(options, LongVariants(**settings))


def repeated(options: Options, chosen: Lengths) -> Result:
    """Train every decoder on every experiment, and measure all as the experiments do."""
    options.refuse_run()
    tasks = {
        f"{name}-{decoder}": Task(decoder, PROTOCOLS[name], chosen.of(decoder))
        for name in chosen.protocols
        for decoder in chosen.decoders
    }
    options.say(f"Training {len(tasks)} decoders for {chosen.steps} updates each")
    study = Study(tasks, chosen.seeds)
    found = study.run(learn, options)
    entries = {name: load(folder) for name, folder in study.folders(options).items()}
    metrics: dict[str, Table] = {}
    runs: dict[str, Numbers] = {}
    figures: dict[str, Figure] = {}
    shown: list[pd.DataFrame] = []
    for name in chosen.protocols:
        protocol, words = PROTOCOLS[name], name.replace("-", "_")
        data = on_canvas(protocol, options)
        blank = errors_of_rare(None, data, protocol, chosen.images)
        own = {decoder: entries[f"{name}-{decoder}"] for decoder in chosen.decoders}
        errors: dict[str, Errors] = {}
        for decoder, entry in own.items():
            outcomes = [run for (task, _), run in found.items() if task == f"{name}-{decoder}"]
            errors[decoder], runs[f"{words}_{decoder}"] = of_runs(outcomes, entry)
        tables = measured(errors, blank, protocol, f"{words}_")
        metrics |= {f"{name}, {title}": table for title, table in tables.items()}
        shown.append(as_table(tables).add_prefix(f"{words}_"))
        line = next(iter(protocol.lines))
        figures[words] = curves(errors, blank, protocol, line)
        figures[f"{words}_painted"] = painted(own, data, protocol)
    metrics["training"] = Table(by_quantity(runs), names="{variant}_{quantity}")
    return Result(metrics, figures, pd.concat(shown, axis=1), next(iter(entries.values())))
