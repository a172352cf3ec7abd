"""Pyro's automatic guides to shape codes, with the kind of the object summed out by the model."""

from typing import Any

import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal

from capsule_zoo.data import Split
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.part_whole.headline import automatic as fitted
from capsule_zoo.experiments.part_whole.headline import measures
from capsule_zoo.experiments.zoo.guide_swaps import opened
from capsule_zoo.guides import ShapeCodesGuide
from capsule_zoo.inference import Checks, compare, fit
from capsule_zoo.registry import Entry


@experiment("shape-codes/automatic", data="mnist", minutes=20, role="comparison", of_runs=True)
def automatic(
    options: Options,
    *,
    images: int = 50,
    particles: int = 10,
    fitting: int = 3000,
    tuning: int = 40,
    training: int = 3000,
) -> Result:
    """Compare Pyro's automatic guides with the network, on few held-out digits (20 minutes).

    AutoNormal and AutoDelta support no discrete site: presences are relaxed, and the model sums out
    the kind. They are fitted to these very images from a draw of the prior, without any network of
    the zoo. `network` has normal poses and codes. All rows are on the model with relaxed presences.

    Args:
        images: number of held-out images.
        particles: number of draws of the IWAE bound.
        fitting: updates of the automatic guides.
        tuning: updates of the network with normal laws.
        training: updates of the pair, if there are no published weights.
    """
    entry, data = opened("shape-codes", options, options.shortened(training))
    held_out, model = data.test[:images], entry.model.with_enumerated_kinds()
    options.say(f"Tuning the network for {tuning} updates")
    network = normal_network(entry, data.train, options, options.shortened(tuning))
    steps = options.shortened(fitting)
    pairs: dict[str, tuple[Any, Any]] = {"network": (entry.model, network)}
    how: dict[str, Any] = dict(hide=["object_kind"], objective=TraceEnum_ELBO(max_plate_nesting=2))
    for kind in (AutoNormal, AutoDelta):
        options.say(f"Fitting {kind.__name__} for {steps} updates")
        torch.manual_seed(options.seed)  # it starts at a draw from the prior
        guide = fitted(kind, model, held_out, options, steps, **how)
        pairs[kind.__name__] = (model, guide)
    table = compare(pairs, held_out, discrete=False, num_particles=particles, seed=options.seed)
    return Result(measures(table), {"": table.draw()}, table, entry)


def normal_network(entry: Entry, train: Split, options: Options, steps: int) -> ShapeCodesGuide:
    """Return the entry's guide with normal laws, tuned with the model frozen."""
    network = entry.guide.with_laws("normal", "normal")
    how: dict[str, Any] = dict(
        batch_size=128, seed=options.seed, checks=Checks(progress=options.progress)
    )
    fit(entry.model, network, train, objective=Trace_ELBO(), steps=steps, freeze="model", **how)
    return network
