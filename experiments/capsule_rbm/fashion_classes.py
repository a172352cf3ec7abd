"""Classes of clothes among samples of capsule RBMs; see figure 5 of Li and Zhu (2019).

Pixels are standard scores, and their distribution given the hidden units has a variance of 1, as
Hinton (2010, "A Practical Guide to Training Restricted Boltzmann Machines", section 13.2)
recommends. Hidden units are binary. A classifier of Fashion-MNIST names the class of each sample.
There are three ways to draw from a machine:

    chain     Gibbs chains that start from independent pixels;
    ladder    tempered chains that start from independent pixels;
    training  the chains of training go on.

If they differ, chains stay near the clothes that they meet first.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from capsule_zoo.data import Standardize, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.energy import load_standard_fashion, spectra
from capsule_zoo.experiments.common.findings import group_by_quantity, looks, means_of, single
from capsule_zoo.figures.energy import spectra as draw_spectra
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference import Checks
from capsule_zoo.inference.energy.tempering import TemperedChains
from capsule_zoo.inference.sample_quality import FeatureClassifier, Reading, train_classifier
from capsule_zoo.models import CapsuleRBM
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.records import Number, Numbers
from capsule_zoo.registry import Entry, load

LEVELS = (1.0, 0.98, 0.95, 0.91, 0.86, 0.8, 0.72, 0.63, 0.53, 0.42, 0.25, 0.0)
PERSISTENT: dict[str, Any] = dict(centered=False)  # 100 chains at one temperature
TEMPERED: dict[str, Any] = dict(centered=False, tempering=LEVELS, chains=20)
SIZES: dict[str, dict] = {"capsule-rbm": dict(capsules=20, units=16), "rbm": dict(hidden=320)}
MACHINES: dict[str, tuple[str, dict[str, Any]]] = {  # entry and objective
    "capsules": ("capsule-rbm", PERSISTENT),
    "rbm": ("rbm", PERSISTENT),
    "tempered_capsules": ("capsule-rbm", TEMPERED),
    "tempered_rbm": ("rbm", TEMPERED),
}
SAMPLES = 2000  # samples of each machine, and test images that they are compared with
SWEEPS = 500  # of chains that start from independent pixels
CHAINS = 100  # tempered chains that start from independent pixels
BETWEEN = 20  # sweeps between two samples of one chain
EPOCHS = 3  # passes of the classifier over the training images
DRAWN = 12  # samples of each machine in the figure
SPECTRA = 1000  # test images whose switches are drawn
DRAWINGS = "samples.safetensors"


@experiment("capsule-rbm/fashion-classes", data="fashion-mnist", minutes=36)
def fashion_classes(options: Options, *, seeds: int = 3) -> Result:
    """Count the classes of clothes among samples of four machines (an hour of one core).

    `classes` is the effective number of classes, the exponential of their entropy, and `rarest` the
    fraction of samples in the rarest class. `..._chain` are of Gibbs chains from independent
    pixels, `..._ladder` of tempered chains from independent pixels, and `..._training` of the
    training's own tempered chains. `..._images` are of other test images. Samples are mean images,
    given the capsules.

    Args:
        seeds: number of seeds, among which the minutes are divided.
    """
    pixels = load_dataset("fashion-mnist", root=options.data_root)
    options.say("Training the classifier")
    judge = train_classifier(pixels.train, pixels.num_classes, EPOCHS)
    study, timed = Study(MACHINES, seeds), replace(options, minutes=options.budget)
    numbers = means_of(study.run(judge_machine, timed, judge=judge))
    real, others = (judge.read(images) for images in pixels.test.images.split(SAMPLES)[:2])
    numbers["images"] = judge_samples(others, real)
    rows, folders = {"test images": pixels.test.images[:DRAWN]}, study.folders(timed)
    for name, folder in folders.items():
        rows[name.replace("_", " ")] = load_file(folder / DRAWINGS)["chain"]
    samples = image_rows(rows, "Samples of four machines")
    images = Standardize.of(pixels.train.images)(pixels.test.images[:SPECTRA])
    switches = {
        name: spectra(load(folder), images)["capsule_switch"]
        for name, folder in folders.items()
        if MACHINES[name][0] == "capsule-rbm"
    }
    classes = pixels.test.labels[:SPECTRA].numpy()
    return Result(
        group_by_quantity(numbers), {"": samples, "spectra": draw_spectra(switches, classes)}
    )


def judge_machine(
    job: Job[tuple[str, dict[str, Any]]], *, judge: FeatureClassifier
) -> dict[str, Number]:
    """Train the job's machine on standard scores of clothes, and judge its samples."""
    options, (name, objective) = job.options, job.variant
    data, standard = load_standard_fashion(options)
    sizes = dict(visible_family="gaussian", objective=objective, **SIZES[name])
    entry = create_untrained(name, data, options, **sizes)
    entry.model.visible.log_precision.requires_grad_(False)  # which stays 0
    descent: dict[str, Any] = dict(optimizer=torch.optim.Adam, lr=1e-3)
    run = train(entry, data, options, options.budget, checks=Checks(clock="processor"), **descent)
    real = judge.read(standard.inverse(data.test.images[:SAMPLES]))
    numbers: Numbers = {"updates": single(run.steps)}
    drawn = {
        way: standard.inverse(means).clamp(0, 1) for way, means in draw(entry, options.seed).items()
    }
    for way, samples in drawn.items():
        judged = judge_samples(judge.read(samples), real)
        numbers |= {f"{quantity}_{way}": number for quantity, number in judged.items()}
    if options.runs is not None:
        save_file({"chain": drawn["chain"][:DRAWN].contiguous()}, options.runs / DRAWINGS)
    return numbers


@torch.no_grad()
def draw(entry: Entry, seed: int) -> dict[str, Tensor]:
    """Draw mean images (SAMPLES, C, H, W), given the capsules, in each of the ways."""
    model, state = entry.model, entry.objective.state_dict()
    with use_seed(seed):
        drawn = {"chain": model.gibbs(model.base_images(SAMPLES), SWEEPS)}
        ladder = TemperedChains(LEVELS, model.base_images(CHAINS))
        for _ in range(SWEEPS):
            ladder.sweep(model)
        drawn["ladder"] = go_on(ladder, model)
        if "exchanges" in state:
            drawn["training"] = go_on(TemperedChains(LEVELS, state["images"]), model)
        return {
            way: model.mean_image(model.posterior(images).sample()) for way, images in drawn.items()
        }


def go_on(chains: TemperedChains, model: CapsuleRBM) -> Tensor:
    """Return the images (SAMPLES, C, H, W) that tempered chains meet in further sweeps."""
    parts, number = [], chains.images.shape[1]
    for _ in range(-(-SAMPLES // number)):
        for _ in range(BETWEEN):
            chains.sweep(model)
        parts.append(chains.images[0])
    return torch.cat(parts)[:SAMPLES]


def judge_samples(samples: Reading, real: Reading) -> Numbers:
    """Return the numbers of `looks`, and the fraction of samples in the rarest class."""
    counts = np.bincount(samples.classes, minlength=10)
    rarest = single(counts.min() / len(samples.classes), len(samples.classes))
    return {**looks(samples, real), "rarest": rarest}
