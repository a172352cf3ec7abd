"""The experiments of the part-whole paper (Smith et al. 2020), and the zoo's first light."""

from __future__ import annotations

from torch import Tensor

from capsule_zoo import figures
from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.guides import FreeForm
from capsule_zoo.inference import compare, evaluate, fit, summarize, widen
from capsule_zoo.inference.probe import Accuracy, latents, linear_probe
from capsule_zoo.inference.refine import refine
from capsule_zoo.registry import Entry, create, load

PRESENCES, WITH_POSES = ["object_presence"], ["object_presence", "object_pose"]


def probes(entry: Entry, data: Dataset, number: int = 10_000) -> dict[str, Accuracy]:
    """Linear probes on the objects' presences, alone and with poses, fitted on training latents."""
    train, found = data.train[:number], {}
    for name, sites in (("probe_presence", PRESENCES), ("probe_presence_pose", WITH_POSES)):
        features = [latents(entry.guide, split.images, sites) for split in (train, data.test)]
        found[name] = linear_probe(features[0], train.labels, features[1], data.test.labels)
    return found


def bounds(summary: dict) -> dict[str, tuple[float, float, int]]:
    """ELBO and IWAE of a summary as metrics: value, standard error, images."""
    n, k = summary["num_images"], summary["num_particles"]
    return {
        "elbo": (summary["elbo"], summary["elbo_se"], n),
        f"iwae_{k}": (summary["iwae"], summary["iwae_se"], n),
    }


def tighten(entry: Entry, data: Dataset, options: Options, pose: str = "normal", **limits) -> Entry:
    """The same model with the trained guide's points turned into densities, the model frozen."""
    guide = entry.guide.with_poses(pose)
    settings = {**entry.training, "lr": 1e-3, "freeze": "model", "seed": options.seed, **limits}
    fit(entry.model, guide, data, objective=entry.objective, progress=options.progress, **settings)
    return Entry(**{**vars(entry), "guide": guide, "default_guide": pose})


def free_form(entry: Entry, images: Split, options: Options, steps: int, pose: str) -> FreeForm:
    """A guide of its own for every one of these images, started at the entry's guide."""
    guide = FreeForm(entry.model, images.images, entry.guide, pose)
    fit(
        entry.model,
        guide,
        images,
        steps=steps,
        lr=0.01,
        schedule="linear",
        batch_size=len(images),
        freeze="model",
        seed=options.seed,
        progress=options.progress,
    )
    return guide


def steps(full: int, length: float) -> int:
    """Optimizer steps of a run that is `length` times as long as a full one."""
    return max(2, round(full * min(length, 1)))


def pictures(entry: Entry, images: Tensor) -> dict:
    """Every picture that the entry offers, by name."""
    return {name: draw(entry, images) for name, draw in entry.figures.items()}


@experiment("part-whole/digits", data="digits")
def digits(options: Options) -> Result:
    """First light: learn scikit-learn's digits, swap the guide, read held-out nats (5 minutes)."""
    data = load_dataset("digits")
    entry = create("part-whole", image_shape=data.image_shape, objects=16, parts=12)
    jitter = transforms.Affine(degrees=10, shear=0.1, scale=(0.9, 1.1), shift=1)
    settings = {**entry.training, "seed": options.seed, "progress": options.progress}
    length = (options.minutes or 3) / 3  # everything after training shrinks with it
    limit = {"minutes": options.minutes} if options.minutes else {"steps": 900}
    size = f"{entry.model.num_parameters:,} model parameters"
    options.say(f"Training {size} on {len(data.train):,} digits")
    objective = entry.objective
    fit(entry.model, entry.guide, data, objective=objective, transform=jitter, **limit, **settings)

    options.say("Tightening: the guide's points become normals, the model stays as it is")
    normal = tighten(entry, data, options, steps=steps(150, length), transform=jitter)
    few = data.test[:48]
    options.say(f"Comparing guides on {len(few)} held-out digits")
    wide = widen(entry.model, entry.guide, data.train, steps=steps(60, length))
    free = free_form(normal, few, options, steps(150, length), "normal")
    pairs = {
        "normal": (entry.model, normal.guide),
        "delta": (entry.model, entry.guide),
        "delta, widened": (entry.model, wide),
        "free-form normal": (entry.model, free),
    }
    table = compare(pairs, few, num_particles=50, seed=options.seed)
    held_out = summarize(
        evaluate(entry.model, normal.guide, data.test, num_particles=50, seed=options.seed)
    )
    metrics = {**bounds(held_out), **probes(entry, data)}
    return Result(
        metrics, {**pictures(entry, data.test.images), "guides": table.plot()}, table, normal
    )


def trained(options: Options, data: Dataset, minutes: float, **settings) -> Entry:
    """The entry that the options name, or one trained on `data` for so long."""
    if options.run:
        return load(options.run)
    entry = create("part-whole", image_shape=data.image_shape)
    settings = {**entry.training, "seed": options.seed, "progress": options.progress, **settings}
    fit(
        entry.model,
        entry.guide,
        data,
        objective=entry.objective,
        minutes=options.minutes or minutes,
        device=options.device,
        **settings,
    )
    return entry


@experiment("part-whole/classify", data="mnist")
def classify(options: Options) -> Result:
    """MNIST without labels: how well a linear probe reads the class off objects (30 minutes)."""
    data = load_dataset("mnist", root=options.data_root)
    entry = trained(options, data, minutes=30)
    return Result(probes(entry, data), pictures(entry, data.test.images), None, entry)


@experiment("part-whole/refine", data="mnist")
def refinement(options: Options) -> Result:
    """Test-time inference on 256 upright and 256 turned digits: scheduled against plain Adam."""
    data = load_dataset("mnist", root=options.data_root)
    entry = trained(options, data, minutes=30)
    images = data.test.images[:256]
    metrics, paths = {}, {}
    for name, shown in (("upright", images), ("rotated", images.rot90(1, (2, 3)))):
        for method, settings in METHODS.items():
            options.say(f"{name}: {method}")
            found = refine(entry.model, entry.guide, shown, seed=options.seed, **settings)
            paths[f"{name}, {method}"] = found.path
            key = f"{name}_{method}"
            metrics[key] = mean_and_error(found.end)
            metrics.setdefault(f"{name}_start", mean_and_error(found.start))
    return Result(metrics, {"": figures.climbs(paths)}, None, entry)


METHODS = {
    "plain": dict(method="adam", steps=1000, lr=0.003),
    "scheduled": dict(method="scheduled", steps=80),
    "scheduled_8_starts": dict(method="scheduled", steps=80, starts=8),
}


def mean_and_error(values: Tensor) -> tuple[float, float, int]:
    """Mean over images, its standard error, and how many there are."""
    return values.mean().item(), (values.std() / len(values) ** 0.5).item(), len(values)
