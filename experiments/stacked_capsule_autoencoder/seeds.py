"""Stacked capsule autoencoders from several seeds: the published weights and their twins."""

from __future__ import annotations

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import by_quantity, over_seeds
from capsule_zoo.experiments.stacked_capsule_autoencoder.headline import Settings, measure
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import load, read_recipe

WEIGHTS = "stacked-capsule-autoencoder-mnist"
RUNS = (WEIGHTS, f"runs/{WEIGHTS}-1", f"runs/{WEIGHTS}-2")


@experiment("stacked-capsule-autoencoder/seeds", data="mnist")
def seeds(
    options: Options,
    *,
    runs: tuple[str, ...] = RUNS,
    probed: int = Settings.probed,
    tested: int = Settings.tested,
) -> Result:
    """Measure the published weights and runs of other seeds as `mnist` does (10 minutes).

    The other runs are trained first, each by the command on the card of the weights with another
    seed: `capsule-zoo train stacked-capsule-autoencoder --data mnist --batch-size 32 --steps 45000
    --seed 1`. Rows are seeds; `mean` is over the seeds, with the standard error of the mean.

    Args:
        runs: names of weights, or run folders.
        probed: number of training images that probes and clusters are fitted on.
        tested: number of test images.
    """
    options.refuse_run()
    data = load_dataset("mnist", root=options.data_root)
    found: dict[str, Numbers] = {}
    for run in runs:
        options.say(f"Measuring {run}")
        found[f"seed_{read_recipe(run)['seed']}"] = measure(load(run), data, probed, tested)
    rows = {**found, "mean": over_seeds(list(found.values()))}
    metrics: Metrics = {"weights": Table(by_quantity(rows))}
    return Result(metrics)
