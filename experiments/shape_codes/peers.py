"""Shape codes beside real digits, VAEs with a fitted prior, k-means, and automatic guides."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import Tensor

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, train
from capsule_zoo.experiments.common.findings import by_quantity, single
from capsule_zoo.experiments.part_whole.headline import automatic, measures, principal_components
from capsule_zoo.experiments.part_whole.prior import looks
from capsule_zoo.experiments.shape_codes.headline import (
    ObjectSettings,
    classes_found,
    on_published_parts,
    read_objects,
    train_objects,
)
from capsule_zoo.experiments.zoo.guide_swaps import opened
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides import ShapeCodesGuide
from capsule_zoo.inference import Checks, compare, fit, infer, mean_images, train_classifier
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import load
from capsule_zoo.zoo.shape_codes.entry import parsed

LATENT = 22  # as many as an object has: six numbers of its pose, sixteen of its code
COMPONENTS = 64  # Gaussians of a fitted prior: as many as there are kinds


@experiment("shape-codes/peers", data="mnist", minutes=20)
def peers(
    options: Options,
    *,
    weights: tuple[str, ...] = ("shape-codes-mnist", "part-whole-mnist"),
    steps: int = 5000,
    sigmas: tuple[float, ...] = (0.15, 0.3),
    images: int = 5000,
) -> Result:
    """Compare samples of published weights and of VAEs with real digits (20 minutes).

    The test images are divided at random into two halves. Every Frechet distance is to the first
    half, also the distances of training digits and of the second half: samples cannot be ranked
    below these. A VAE has a code as long as an object's pose and code together. It is sampled
    from its own prior and from a mixture of 64 Gaussians, fitted to codes of the training images.
    `late_gain` is the fall of the loss on validation images over the last quarter of the training,
    in nats an image.

    Args:
        weights: names of trained weights whose priors are sampled.
        steps: updates of 128 images for each VAE; they shrink with minutes.
        sigmas: deviations of a pixel, with a VAE for each.
        images: images in every Frechet distance, at most half of the test images.
    """
    data = load_dataset("mnist", root=options.data_root)
    number = min(images, len(data.test) // 2)
    first, second = halves(data.test.images, number, options.seed)
    known, _ = halves(data.train.images, number, options.seed)
    rows = {"training digits": known, "other test digits": second}
    for name in weights:
        rows[name] = mean_images(load(name).model, number, seed=options.seed)
    study = Study({f"vae sigma {sigma:g}": (sigma, options.shortened(steps)) for sigma in sigmas})
    outcomes = study.run(learn, replace(options, minutes=None))
    trained: dict[str, Numbers] = {name: found for name, (found,) in outcomes.items()}
    for name, folder in study.folders(options).items():
        entry = load(folder)
        rows[name] = mean_images(entry.model, number, seed=options.seed)
        codes = infer(entry.guide, data.train.images, ["image_code"], options.seed)["image_code"]
        drawn = {"image_code": from_mixture(codes, number, options.seed)}
        rows[f"{name}, fitted"] = mean_images(entry.model, number, drawn, options.seed)
    classifier = train_classifier(data.train, data.num_classes, epochs=3, seed=options.seed)
    real = classifier.read(first)
    seen = {name: looks(classifier.read(drawn), real) for name, drawn in rows.items()}
    metrics: Metrics = {
        "samples": Table(by_quantity({as_key(name): found for name, found in seen.items()})),
        "VAEs": Table(by_quantity({as_key(name): found for name, found in trained.items()})),
    }
    shown = {name: drawn[:12] for name, drawn in rows.items()}
    return Result(metrics, {"": image_rows(shown, "Digits and samples")})


def learn(job: Job[tuple[float, int]]) -> Numbers:
    """Train a VAE, and tell how far its loss still fell."""
    (sigma, steps), options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    entry = begun("vae", data, options, latent=LATENT, sigma_image=sigma)
    run = train(entry, data, options, steps=steps, checks=Checks(every=max(1, steps // 40)))
    held = run.history["held_out"].dropna()
    gain = float(held[run.history["step"] <= 3 * steps / 4].min() - held.min())
    number = len(data.validation)
    return {
        "updates": single(run.steps),
        "minutes": single(run.seconds / 60),
        "validation_loss": single(held.min(), number),
        "late_gain": single(gain, number),
    }


def halves(images: Tensor, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return two sets of `number` images each, drawn from images (N, ...) without repetition."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images[order[:number]], images[order[number : 2 * number]]


def from_mixture(codes: Tensor, number: int, seed: int) -> Tensor:
    """Draw codes (number, D) from a mixture of Gaussians that is fitted to codes (N, D)."""
    from sklearn.mixture import GaussianMixture  # takes a second, and few need it

    mixture = GaussianMixture(min(COMPONENTS, len(codes) // 10 or 1), random_state=seed)
    drawn, _ = mixture.fit(codes.numpy()).sample(number)  # in the order of the mixture
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
    return torch.from_numpy(drawn).to(codes)[order]


def as_key(name: str) -> str:
    """Return a row's name as a part of a metric's name, with its digits."""
    return name.replace(", ", "_").replace(" ", "_").replace("-", "_").replace(".", "")


@experiment("shape-codes/clusters", data="mnist", minutes=5)
def clusters(
    options: Options,
    *,
    weights: str = "shape-codes-mnist",
    components: int = 50,
    numbers: tuple[int, ...] = (10, 64),
) -> Result:
    """Find classes by k-means, on what shape codes see, beside their kinds (5 minutes).

    Clusters are fitted to training images and named like kinds: each counts as its commonest class
    among training images, where there are ten also one to one.

    Args:
        weights: name of the weights that find the parts and the kinds.
        components: principal components of the pixels.
        numbers: numbers of clusters.
    """
    data = load_dataset("mnist", root=options.data_root)
    guide = load(weights).guide
    sets = parsed(data, options.seed, guide=guide, tested=None)
    labels = sets.train.labels, sets.test.labels
    kinds = [read_objects(guide, split.images).belief for split in (sets.train, sets.test)]
    found = {"kinds_64": classes_found(kinds, labels)}
    read = principal_components(data.train.images, components, options.seed)
    features = {
        "pixels": [read(guide, split.images) for split in (data.train, data.test)],
        "parts": [present(split.images) for split in (sets.train, sets.test)],
    }
    for number in numbers:
        for name, (train_rows, test_rows) in features.items():
            options.say(f"Fitting {number} clusters to {name}")
            belief = cluster(train_rows, test_rows, number, options.seed)
            found[f"k_means_{name}_{number}"] = classes_found(belief, labels)
    return Result(by_quantity(found))


def present(sets: Tensor) -> np.ndarray:
    """Return part sets (N, 1, P, 7) as rows: presences, and poses, 0 where a part is off."""
    presence, pose = sets[..., :1], sets[..., 1:]
    return torch.cat([presence, presence * pose], -1).flatten(1).numpy()


def cluster(
    train_rows: np.ndarray, test_rows: np.ndarray, number: int, seed: int
) -> Sequence[Tensor]:
    """Return the clusters of rows (N, D), one-hot (N, number), which training rows alone make."""
    from sklearn.cluster import KMeans

    made = KMeans(number, n_init=10, random_state=seed).fit(train_rows)
    both = (made.labels_, made.predict(test_rows))
    return [F.one_hot(torch.from_numpy(each).long(), number).float() for each in both]


@experiment("shape-codes/choices", data="mnist", minutes=15)
def choices(
    options: Options,
    *,
    kinds: tuple[int, ...] = (10, 32, 64),
    sigmas: tuple[float, ...] = (0.0125, 0.025, 0.05),
    steps: int = 200,
) -> Result:
    """Choose the number of kinds and the least deviation on validation images (15 minutes).

    Objects are learned on the parsed parts of published weights. Kinds are named on training
    images, and the classes that they find are counted on 5,000 validation images. No test image is
    read.

    Args:
        kinds: numbers of kinds, tried at the least deviation of the published weights.
        sigmas: least deviations of a part's pose, tried with the most kinds.
        steps: updates after the start from factor analyzers.
    """
    chosen = ObjectSettings(steps=steps)
    data = load_dataset("mnist", root=options.data_root)
    published = on_published_parts(max(kinds), chosen, options.seed).guide
    sets = parsed(data, options.seed, guide=published)
    found: dict[str, Numbers] = {}
    tried = [(number, chosen.sigma_min) for number in kinds]
    tried += [(max(kinds), sigma) for sigma in sigmas if sigma != chosen.sigma_min]
    for number, sigma in tried:
        own = replace(chosen, main=number, sigma_min=sigma)
        entry = on_published_parts(number, own, options.seed)
        train_objects(entry, sets, own, options)
        splits = sets.train, sets.validation
        beliefs = [read_objects(entry.guide, split.images).belief for split in splits]
        row = f"{number}_kinds_sigma_{sigma:g}".replace(".", "")
        found[row] = classes_found(beliefs, [split.labels for split in splits])
    return Result(by_quantity(found))


@experiment("shape-codes/automatic", data="mnist", minutes=20, of_runs=True)
def automatic_guides(
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
    network = entry.guide_of(ShapeCodesGuide).with_laws("normal", "normal")
    fit(
        entry.model,
        network,
        data.train,
        objective=Trace_ELBO(),
        steps=options.shortened(tuning),
        freeze="model",
        batch_size=128,
        seed=options.seed,
        checks=Checks(progress=options.progress),
    )
    pairs: dict[str, tuple[Any, Any]] = {"network": (entry.model, network)}
    steps = options.shortened(fitting)
    how: dict[str, Any] = dict(hide=["object_kind"], objective=TraceEnum_ELBO(max_plate_nesting=2))
    for kind in (AutoNormal, AutoDelta):
        options.say(f"Fitting {kind.__name__} for {steps} updates")
        torch.manual_seed(options.seed)  # it starts at a draw from the prior
        guide = automatic(kind, model, held_out, options, steps, **how)
        pairs[kind.__name__] = (model, guide)
    table = compare(pairs, held_out, discrete=False, num_particles=particles, seed=options.seed)
    return Result(measures(table), {"": table.draw()}, table, entry)
