"""The Helmholtz machine's experiments (Li and Zhu 2019); see `energy` for the data.

`samples` compares Gibbs chains with ancestral draws, which are exact because the machine is
directed. A chain alternates recognition of all layers and generation from the top one. Its draws
are the machine's only if recognition equals the posterior.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor

from capsule_zoo.data import Binarize, Dataset, load_dataset
from capsule_zoo.experiments import (
    Job,
    Options,
    Result,
    Study,
    begun,
    experiment,
    in_turn,
    train,
    trained,
)
from capsule_zoo.experiments.common.energy import (
    binary_mnist,
    figures_of,
    measured,
    pixel_error,
    reconstruction_error,
    spectra,
    standard_fashion,
    use_of_switches,
)
from capsule_zoo.experiments.common.findings import (
    Bounded,
    bounds_of_rows,
    by_quantity,
    mean_and_error,
    means_of,
)
from capsule_zoo.experiments.part_whole.prior import judged
from capsule_zoo.figures.curves import losses_in_time
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference import (
    Checks,
    Inputs,
    ReweightedWakeSleep,
    ScoreFunctionELBO,
    WakeSleep,
    pretrain,
)
from capsule_zoo.inference.evaluation.ancestral import draw_images, infer, mean_images
from capsule_zoo.models.common.modes import seeded
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, create, load
from capsule_zoo.runs.measurements import draws_binary_pixels

CLOCK = "processor"  # of all trainings, whose minutes other work does not shorten
GAUSSIAN = dict(visible_family="gaussian", hidden_family="gaussian")


@dataclass(frozen=True)
class Pretrained(Bounded):
    """The settings of trainings with bounds: `Bounded`, and how long layers are pre-trained.

    Args:
        share: share of the time in which layers are pre-trained as capsule RBMs.
    """

    images: int = 500
    particles: int = 1000
    share: float = 0.1

    def through_all_layers(
        self, entry: Entry, data: Dataset, options: Options, scale: float = 1.0
    ) -> Numbers:
        """Return the error through all layers, and the bounds."""
        error = pixel_error(entry.guide.reconstruct, data.test.images, scale)
        return {"reconstruction_error_top": error, **self.bounds(entry, data, options.seed)}


def after_pretraining(options: Options, minutes: float, share: float) -> dict[str, Any]:
    """Return arguments of `train` with which layers are pre-trained as RBMs, one after the other.

    Args:
        minutes: length of the whole training.
        share: share of the minutes for the pre-training, divided equally among the layers, or 0.
    """

    def start(entry: Entry, images: Tensor) -> None:
        options.say("Pre-training every layer as a capsule RBM")
        each = share * minutes / len(entry.model.layers)
        inputs = Inputs(Binarize() if draws_binary_pixels(entry.model) else None)
        checks = Checks(progress=options.progress, clock=CLOCK)
        how: dict[str, Any] = dict(seed=options.seed, checks=checks)
        pretrain(entry.model, entry.guide, images, minutes=each, inputs=inputs, **how)

    length = dict(minutes=(1 - share) * minutes, checks=Checks(clock=CLOCK))
    return dict(start=start if share else None, **length)


@experiment("capsule-helmholtz/mnist", minutes=60, of_runs=True)
def mnist(options: Options, chosen: Pretrained) -> Result:
    """Pre-train two layers of 40 capsules, train them by wake-sleep and bound log p (an hour)."""
    how = after_pretraining(options, options.budget, chosen.share)
    return measured("capsule-helmholtz", options, chosen.through_all_layers, **how)


FEWER = dict(particles=200)


@dataclass(frozen=True)
class FromStart(Pretrained):
    """The settings of `pretraining`.

    Args:
        seeds: number of seeds.
    """

    seeds: int = 1


@experiment("capsule-helmholtz/pretraining", data="mnist", minutes=30, defaults=FEWER)
def pretraining(options: Options, chosen: FromStart) -> Result:
    """Compare training with and without pre-training, at equal minutes (half an hour).

    The figure shows the loss on held-out images during training, of the first seed. The minutes of
    a run are of its processor, and include its pre-training.
    """
    study = Study({"random_start": 0.0, "pretrained": chosen.share}, chosen.seeds)
    timed = replace(options, minutes=options.budget)
    found = study.run(from_start, timed, chosen=chosen)
    curves = {name: own[0][1] for name, own in found.items()}
    numbers = means_of({name: [run for run, _ in own] for name, own in found.items()})
    kept = load(study.folders(timed)["pretrained"])
    return Result(by_quantity(numbers), {"": losses_in_time(curves)}, None, kept)


def from_start(
    job: Job[float], *, chosen: Pretrained
) -> tuple[Numbers, tuple[list[float], list[float]]]:
    """Train after a share of pre-training; return bounds, silent switches, and held-out losses."""
    options = job.options
    data = binary_mnist(options)
    entry = begun("capsule-helmholtz", data, options)
    how = after_pretraining(options, options.budget, job.variant)
    run = train(entry, data, options, inputs=Inputs(Binarize()), **how)
    numbers = chosen.bounds(entry, data, options.seed)
    silent = use_of_switches(spectra(entry, data.test.images)).numbers["silent"]
    numbers |= {f"{site}_silent": number for site, number in silent.items()}
    checks = run.history.dropna(subset="held_out")
    passed = options.budget - how["minutes"] + checks["seconds"] / 60
    return numbers, (passed.tolist(), checks["held_out"].tolist())


@experiment("capsule-helmholtz/objectives", data="mnist", minutes=60, defaults=FEWER)
def objectives(options: Options, chosen: Pretrained) -> Result:
    """Compare wake-sleep, reweighted wake-sleep and the ELBO on one machine (an hour).

    In the sleep phase of `wake_sleep` the machine dreams from what its top layer has recognized, as
    in the paper; in the sleep phase of `classical` it dreams from its prior.
    """
    data = binary_mnist(options)
    rows: dict[str, ELBO] = {
        "wake_sleep": WakeSleep(),
        "classical": WakeSleep(recycle_top=False),
        "reweighted": ReweightedWakeSleep(5),
        "elbo": ScoreFunctionELBO(5),
    }
    pairs: dict[str, tuple] = {}
    for name, objective, minutes in in_turn(options, rows):
        entry = create("capsule-helmholtz", image_shape=data.image_shape)
        how = after_pretraining(options, minutes, chosen.share)
        how |= dict(objective=objective, inputs=Inputs(Binarize()))
        train(entry, data, options, name=name, **how)
        pairs[name] = (entry.model, entry.guide)
    table = chosen.compare(pairs, data, options.seed)
    return Result(bounds_of_rows(table), {"": table.draw()}, table, entry)


@experiment("capsule-helmholtz/fashion", data="fashion-mnist", minutes=3)
def fashion(options: Options, chosen: Pretrained) -> Result:
    """Train two layers of 20 capsules with Gaussian pixels and units (3 minutes).

    Pixels are standardized. The error is on the scale of the pixels, and nats are on the scale of
    the scores. The training is short because the gap between ELBO and IWAE grows with the precision
    of the pixels.
    """
    data, standard = standard_fashion(options)
    sizes = {"capsules": (20, 20), **GAUSSIAN}
    start = after_pretraining(options, options.budget, chosen.share)
    entry = trained("capsule-helmholtz", data, options, sizes, lr=1e-3, **start)
    found = spectra(entry, data.test.images)
    metrics: Metrics = {
        "reconstruction_error": reconstruction_error(entry, data.test.images, standard.scale),
        **chosen.through_all_layers(entry, data, options, standard.scale),
        "switches": use_of_switches(found),
    }
    return Result(metrics, figures_of(entry, data.test, found), None, entry)


@experiment("capsule-helmholtz/gray", data="mnist")
def gray(options: Options, *, weights: str = "capsule-helmholtz-mnist") -> Result:
    """Reconstruct gray test digits, as the source does, and count awake capsules (a minute).

    `reconstruction_error_gray` goes up to the first layer of capsules and back, as the authors'
    program does, `reconstruction_error_gray_top` up to the top. `awake_1` and `awake_2` are the
    mean numbers of switches of a layer that are on, for each class, on binarized test digits; the
    first layer is the nearest to the image.

    Args:
        weights: name of the trained weights.
    """
    entry = load(weights)
    images = load_dataset("mnist", root=options.data_root).test.images
    binary = binary_mnist(options).test
    awake: dict[str, Numbers] = {}
    for layer, switches in enumerate(reversed(list(spectra(entry, binary.images).values())), 1):
        count = switches.sum(1)
        awake[f"awake_{layer}"] = {
            f"digit_{digit}": mean_and_error(count[binary.labels.numpy() == digit])
            for digit in range(10)
        }
    metrics: Metrics = {
        "reconstruction_error_gray": reconstruction_error(entry, images),
        "reconstruction_error_gray_top": pixel_error(entry.guide.reconstruct, images),
        **awake,
    }
    return Result(metrics)


WEIGHTS = "capsule-helmholtz-mnist"
RARE = 0.001  # share of the digits with less ink than a blank image, and with more than a full one


@experiment("capsule-helmholtz/samples", data="mnist", of_runs=True)
def samples(
    options: Options, *, images: int = 5000, sweeps: tuple[int, ...] = (1, 10, 100), epochs: int = 3
) -> Result:
    """Compare Gibbs chains with ancestral draws by a classifier's features (some 10 minutes).

    It measures the published machine or the given run. All samples are mean images. A chain starts
    at an ancestral draw or at a training digit. The Frechet distances are those to test digits, as
    in `part-whole/prior`. A sample is blank if it has less ink than all but a thousandth of the
    digits, and full if it has more.

    Args:
        images: number of images in every Frechet distance, at most half of the test images.
        sweeps: numbers of Gibbs sweeps after which chains are compared, in rising order.
        epochs: epochs of the classifier whose features are compared.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = load(options.run or WEIGHTS)
    number, seed = min(images, len(data.test) // 2), options.seed
    digits = data.train.images[:number]
    rows = {"train": digits, "ancestral": mean_images(entry.model, number, seed=seed)}
    starts = {
        "gibbs": draw_images(entry.model, number, seed=seed),
        "from_digits": digits.bernoulli(generator=torch.Generator().manual_seed(seed)),
    }
    for name, start in starts.items():
        options.say(f"Running {number} chains: {name}")
        found = chains(entry, start, sweeps, seed)
        rows |= {f"{name}_{count}": drawn for count, drawn in found.items()}
    options.say("Training a classifier on the digits, for its features")
    accuracy, seen = judged(rows, data, number, epochs, seed)
    for name, drawn in rows.items():
        seen[name] |= extremes(drawn, data.train.images)
    metrics: Metrics = {"classifier_accuracy": accuracy, "draws": Table(by_quantity(seen))}
    shown = {name: drawn[:12] for name, drawn in rows.items()}
    figure = image_rows(shown, "Digits, ancestral draws, and Gibbs chains by their sweeps")
    return Result(metrics, {"": figure}, None, entry)


@torch.no_grad()
def chains(entry: Entry, images: Tensor, sweeps: Sequence[int], seed: int) -> dict[int, Tensor]:
    """Return the mean images (N, C, H, W) of the last draw of Gibbs chains, by number of sweeps.

    Args:
        images: where the chains start, (N, C, H, W).
        sweeps: in rising order, from 1 on.
    """
    found, done = {}, 0
    with seeded(seed):
        for count in sweeps:
            steps = count - 1 - done
            images = torch.cat([entry.guide.gibbs(x, steps) for x in images.split(500)])
            done = count - 1
            upward, downward = seed + 2 * count, seed + 2 * count + 1  # seeds that differ
            top = infer(entry.guide, images, list(entry.model.top_sites), upward)
            found[count] = mean_images(entry.model, len(images), top, downward)
    return found


def extremes(drawn: Tensor, digits: Tensor) -> Numbers:
    """Return the shares of images that have less ink, and more, than digits (N, C, H, W) have."""
    low, high = digits.flatten(1).mean(1).quantile(torch.tensor([RARE, 1 - RARE]).to(digits))
    ink = drawn.flatten(1).mean(1)
    return {
        "blank": mean_and_error((ink < low).double()),
        "full": mean_and_error((ink > high).double()),
    }
