"""The square of routings: train with each, read with each, on equal updates.

If routings were interchangeable inference, all readings of one trained network would be alike. If
they are a part of the function that was learned, only the diagonal of the square is good.
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, begun, choose, experiment, train
from capsule_zoo.experiments.common.findings import calibration_error, mean_and_error, over_seeds
from capsule_zoo.experiments.matrix_capsules.headline import NETWORK
from capsule_zoo.experiments.zoo.equal_network import reader_of
from capsule_zoo.figures.grids import heat_maps
from capsule_zoo.guides import Belief, ExactLabel, Routing, Votes, best_belief, free_energy
from capsule_zoo.inference import Inputs, error_rate
from capsule_zoo.models.common.modes import in_eval_mode
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry
from capsule_zoo.zoo.capsule_network.entry import ROUTINGS as OF_VECTORS
from capsule_zoo.zoo.matrix_capsules.entry import ROUTINGS as OF_MATRICES
from capsule_zoo.zoo.matrix_capsules.entry import routing_of

SHIFT = transforms.Shift(1)  # pixels, of training images
QUANTITIES = {
    "error": "test error",
    "calibration": "calibration error",
    "free_energy": "free energy over uniform couplings' (nats)",
    "agreement": "agreement of couplings",
    "tightened": "test error after tightening",
}


@dataclass(frozen=True)
class Square:
    """The settings of a square.

    Args:
        routings: names of the routings; all of the entry's if none is named.
        seeds: number of seeds for each routing that is trained with.
        steps: updates of every training, unless minutes are given, which all of them share.
        images: number of test images of the errors.
        votes: number of test images whose votes have free energies and couplings.
        tightened: updates of the votes alone for another routing, of the first seed.
        sizes: sizes of the entry; by default a small network for matrix capsules.
    """

    routings: tuple[str, ...] = ()
    seeds: int = 3
    steps: int = 250
    images: int = 1000
    votes: int = 200
    tightened: int = 50
    sizes: Mapping[str, Any] | None = None


@experiment("capsule-network/routing-square", data="mnist")
def of_vectors(options: Options, chosen: Square) -> Result:
    """Train the capsule network with each routing and read it with each (10 core-minutes).

    See `matrix-capsules/routing-square` for the quantities.
    """
    return square("capsule-network", OF_VECTORS, chosen, options)


@experiment("matrix-capsules/routing-square", data="mnist")
def of_matrices(options: Options, given: Square) -> Result:
    """Train matrix capsules with each routing and read them with each (15 core-minutes).

    `error` is of test images. `calibration` is the expected calibration error of the winning
    class's presence, in ten bins. `free_energy` is of the votes for the class capsules, whose
    couplings are those of the routing that reads: the votes are those of the routing that was
    trained with, in nats per image, and with uniform couplings it would be zero. `agreement` is the
    part of the children's couplings with the classes that both routings share. `tightened` is the
    error after some updates of the votes (and of the couplings, where these are learned) by the
    routing that reads, while all below them is kept. `seconds_per_update` is processor time.
    """
    given = replace(given, sizes=NETWORK) if given.sizes is None else given
    known = {name: routing_of(name) for name in OF_MATRICES}
    return square("matrix-capsules", known, given, options)


def square(entry: str, known: Mapping[str, Routing], given: Square, options: Options) -> Result:
    """Run the square of one entry."""
    names = given.routings or tuple(known)
    study = Study(choose("routing", names, known), given.seeds)
    how: dict[str, Any] = dict(name=entry, given=given, first_seed=options.seed)
    outcomes = study.run(learn, options, readers=study.variants, **how)
    found: dict[str, dict[str, Numbers]] = {}
    for name in names:
        for quantity in outcomes[name][0]:
            rows = [each[quantity] for each in outcomes[name] if quantity in each]
            found.setdefault(quantity, {})[name] = over_seeds(rows)
    speed = {name: row["own"] for name, row in found.pop("seconds").items()}
    tables = {
        f"{QUANTITIES[quantity]}, trained with": Table(grid, f"{quantity}_{{quantity}}_{{variant}}")
        for quantity, grid in found.items()
    }
    maps = {QUANTITIES[quantity]: frame(grid, names) for quantity, grid in found.items()}
    figure = heat_maps(maps, "read with", "trained with")
    return Result({**tables, "seconds_per_update": speed}, {"": figure})


def frame(grid: Mapping[str, Numbers], names: tuple[str, ...]) -> pd.DataFrame:
    """Return values with a row for each routing trained with, and a column for each reading."""
    values = {row: {name: number[0] for name, number in grid[row].items()} for row in names}
    return pd.DataFrame(values).T.reindex(index=names, columns=names)


def learn(
    job: Job[Routing], *, name: str, readers: Mapping[str, Routing], given: Square, first_seed: int
) -> dict[str, Numbers]:
    """Train an entry with the job's routing, and return the readings by all, by quantity."""
    options = job.options
    data = load_dataset("mnist", root=options.data_root)
    sizes = {"routing": job.variant, **(given.sizes or {})}
    entry = begun(name, data, options, **sizes)
    began = time.process_time()
    run = train(entry, data, options, inputs=Inputs(SHIFT), **options.limit(given.steps))
    seconds = (time.process_time() - began) / run.steps
    test = data.test[: given.images]
    found: dict[str, Numbers] = {"seconds": {"own": (seconds, None, run.steps)}}
    for other, routing in readers.items():
        reader = reading(entry, routing)
        for quantity, number in measures(entry, reader, test, given.votes).items():
            found.setdefault(quantity, {})[other] = number
        if options.seed == first_seed and other != job.name:
            error = tightened(entry, routing, data, test, options, given.tightened, other)
            found.setdefault("tightened", {})[other] = error
    return found


def reading(entry: Entry, routing: Routing) -> Entry:
    """Return an entry with the same parameters that reads its votes by another routing."""
    if not entry.model.supervised:
        return replace(entry, guide=entry.guide.with_routing(routing))
    model = entry.model.with_routing(routing)
    return replace(entry, model=model, guide=ExactLabel(model))


def tightened(
    entry: Entry,
    routing: Routing,
    data: Dataset,
    test: Split,
    options: Options,
    steps: int,
    name: str,
) -> Number:
    """Return the error after updates of a copy's votes and couplings, by the routing that reads."""
    other = reading(copy.deepcopy(entry), routing)
    for module in (other.model, other.guide):
        for full, parameter in module.named_parameters():
            learns = full.rpartition(".")[2] in ("transform", "connections")
            parameter.requires_grad_(learns)
    train(other, data, options, name=f"tightened-{name}", inputs=Inputs(SHIFT), steps=steps)
    return error_rate(other.model, other.guide, test)


@torch.no_grad()
def measures(entry: Entry, reader: Entry, test: Split, number: int) -> Numbers:
    """Return the numbers of one reading; see `of_matrices`."""
    own, other = reader_of(entry), reader_of(reader)
    with in_eval_mode(own), in_eval_mode(other):
        scores = torch.cat([other.scores(few) for few in test.images.split(200)])
        votes, law = own.class_votes(test.images[:number])
        first, there = (getattr(program, "classes", program) for program in (own, other))
        base = first.routing(votes, law)
        law = law._replace(connections=there.connected())
        belief = there.routing(votes, law)
        uniform = free_energy(votes, best_belief(votes, votes.uniform(), law), law)
        energy = there.routing.free_energies(votes, law)[-1] - uniform
    right = scores.argmax(1) == test.labels
    return {
        "error": mean_and_error((~right).float()),
        "calibration": (calibration_error(scores.amax(1).sigmoid(), right), None, len(test)),
        "free_energy": mean_and_error(energy),
        "agreement": mean_and_error(shared_couplings(votes, base, belief)),
    }


def shared_couplings(votes: Votes, first: Belief, second: Belief) -> Tensor:
    """Return sum_ij w_i min(R_ij, R'_ij) / sum_i w_i of two beliefs, (N,)."""
    least = torch.minimum(*torch.broadcast_tensors(first.responsibility, second.responsibility))
    return (votes.presence * least).sum((1, 2, 3)) / votes.presence.sum((1, 2, 3))
