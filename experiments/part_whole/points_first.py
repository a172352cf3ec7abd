"""Part-whole capsules whose poses are points first and sampled later, or sampled throughout.

The paper (Smith et al. 2020) trains a guide of points, gives its poses densities later, and reports
a tighter bound than with poses that are sampled from the start.
"""

from dataclasses import dataclass, replace

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import group_by_quantity, held_out_bounds, means_of
from capsule_zoo.experiments.part_whole.augment import BATCH_SIZE
from capsule_zoo.experiments.part_whole.classification import PROBED, READERS, fit_probes
from capsule_zoo.records import Numbers


@dataclass(frozen=True)
class Settings:
    """Settings of the experiment.

    Args:
        seeds: number of seeds.
        points: updates with points as poses.
        sampled: updates with sampled poses after them; sampled throughout, the sum of both.
        images: number of test images of the bounds.
        particles: number of draws of the IWAE bound.
    """

    seeds: int = 3
    points: int = 3000
    sampled: int = 600
    images: int = 1000
    particles: int = 50


@experiment("part-whole/points-first", data="mnist", minutes=40)
def points_first(options: Options, settings: Settings) -> Result:
    """Learn poses as points first, or sample them throughout, in equal updates (40 core-minutes).

    The model is trained in all updates. Each part of a training has its own warm-up and its own
    fall of the learning rate. `probe_...` are accuracies of linear probes on inferred objects.
    """
    timed = replace(options, minutes=None)
    steps = {n: options.shorten_steps(getattr(settings, n)) for n in ("points", "sampled")}
    variants = {"points_first": True, "sampled": False}
    study = Study(variants, settings.seeds)
    outcomes = study.run(learn, timed, settings=replace(settings, **steps))
    return Result({**group_by_quantity(means_of(outcomes))})


def learn(job: Job[bool], *, settings: Settings) -> Numbers:
    """Train with points first or without, and measure bounds and probes."""
    options, steps = job.options, settings.sampled
    data = load_dataset("mnist", root=options.data_root)
    entry = create_untrained("part-whole", data, options)
    if job.variant:
        train(entry, data, options, steps=settings.points, batch_size=BATCH_SIZE)
        guide = entry.guide.with_poses("normal")
        entry = replace(entry, guide=guide, default_guide="normal")
    else:
        entry, steps = entry.use_guide("normal"), steps + settings.points
    train(entry, data, options, name="sampled", steps=steps, batch_size=BATCH_SIZE)
    bounds = held_out_bounds(entry, data.test[: settings.images], settings.particles, options.seed)
    readers = {f"probe_{name}": READERS[f"probe_{name}"] for name in ("presence", "presence_pose")}
    subset = replace(data, train=data.train[:PROBED])
    return {**fit_probes(entry, subset, readers), **bounds}
