"""Templates of constellations learned from unlabeled scenes, and a set transformer on top of them.

The published constellation autoencoder learns its templates too (Kosiorek et al. 2019), and is
compared in Nazabal, Tsagkas and Williams 2021. Scenes are those of `constellations/parse`, and
names end in their noise in the same way.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pyro

from capsule_zoo.data import Split
from capsule_zoo.data.constellations import Scenes, draw_scenes
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import single
from capsule_zoo.experiments.constellations.headline import hard_scenes, measures
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import train
from capsule_zoo.guides import AmortizedMatching, ExactMatching, RansacMatching, SinkhornMatching
from capsule_zoo.guides.constellations.matching import MatchingGuide
from capsule_zoo.inference import SleepPhase
from capsule_zoo.inference.evaluation.segmentation import relabeled
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, create, load
from capsule_zoo.zoo.constellations.entry import learn_from
from capsule_zoo.zoo.constellations.figures import scene_rows, template_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = "01"  # the noise of the entry that is kept


@experiment("constellations/learned", data="constellations")
def learned(
    options: Options,
    *,
    scenes: int = 256,
    sigmas: tuple[float, ...] = (0.0, 0.1, 0.25),
    examples: int = 256,
    updates: int = 800,
    batch_size: int = 256,
    proposals: int = 32,
) -> Result:
    """Learn templates and noise from unlabeled scenes, and a set transformer (10 minutes a noise).

    Templates are learned by exact EM. `exact`, `ransac` and `sinkhorn` parse with what was learned.
    `amortized` is a set transformer that was trained on samples of the learned model; `proposals`
    compares several of its draws by their evidence. Measures are those of `constellations/parse`.
    `found_noise` is the noise that was learned, `learning` and `training` are seconds of one core
    for the templates and for the set transformer.

    Args:
        scenes: scenes for each noise that are parsed.
        sigmas: noises on the templates of the scenes.
        examples: unlabeled scenes from which templates are learned.
        updates: of the set transformer.
        batch_size: samples of the model for each update.
        proposals: number of draws of the set transformer that are compared.
    """
    suffixes = {f"{sigma:g}".replace(".", ""): sigma for sigma in sigmas}
    study = Study(suffixes)
    task = partial(learn, examples=examples, updates=updates, batch_size=batch_size)
    outcomes, folders = study.run(task, options), study.folders(options)
    metrics: dict[str, Number | Numbers | Table] = {}
    figures, laws = {}, {}
    for suffix, sigma in suffixes.items():
        options.say(f"Parsing scenes with noise {sigma:g}")
        entry = load(folders[suffix])
        drawn = draw_scenes(scenes, sigma, seed=options.seed)
        grid, figures[suffix] = _parsed(entry, drawn, proposals, sigma)
        metrics[f"noise {sigma:g}"] = Table(grid, "{quantity}_{variant}_" + suffix)
        laws[f"noise {sigma:g}"] = entry.model.law()
    numbers: dict[str, Numbers] = {}
    for (suffix, _), outcome in outcomes.items():
        for quantity, value in outcome.items():
            numbers.setdefault(quantity, {})[suffix] = single(value)
    metrics["learning, noise"] = Table(numbers)
    title = "Templates that were learned, with their noise"
    figures["templates"] = template_rows(laws, title)
    kept = load(folders[PUBLISHED]) if PUBLISHED in folders else None
    return Result(metrics, figures, None, kept)


def learn(job: Job[float], *, examples: int, updates: int, batch_size: int) -> dict[str, float]:
    """Learn templates and then train the set transformer.

    Args:
        job: its variant is the noise on the templates, which is not given to the model.
        examples: unlabeled scenes for learning templates.
        updates, batch_size: of the set transformer.
    """
    options = job.options
    pyro.set_rng_seed(options.seed)
    entry = create("constellations", learned=True).use_guide("amortized")
    seen = draw_scenes(max(examples, batch_size), job.variant, seed=options.seed + 1)
    points = seen.points.float()
    began = time.process_time()
    learn_from(entry.model, points[:examples], options.seed)
    learning = time.process_time() - began
    split = Split(points[:batch_size], seen.present[:batch_size].sum(1))
    settings: dict[str, Any] = {
        "objective": SleepPhase(),
        "freeze": "model",
        "batch_size": batch_size,
        "epochs": None,
        **options.limit(updates),
    }
    train(entry, split, options, **settings)
    found = entry.model.log_sigma.exp().item()
    return {
        "found_noise": found,
        "learning": learning,
        "training": time.process_time() - began - learning,
    }


def _parsed(
    entry: Entry, drawn: Scenes, proposals: int, sigma: float
) -> tuple[dict[str, dict[str, Number]], Figure]:
    """Return all measures of all guides on scenes, and a picture."""
    network = entry.guide_of(AmortizedMatching)
    exact = entry.model.double()
    guides: dict[str, MatchingGuide] = {
        "exact": ExactMatching(exact),
        "ransac": RansacMatching(exact),
        "sinkhorn": SinkhornMatching(exact),
        "amortized": network,
        "proposals": network.with_proposals(proposals),
    }
    truth, law = create("constellations").model.law(), exact.law()
    grid: dict[str, dict[str, Number]] = {}
    parses = {}
    for name, guide in guides.items():
        found = guide.parse(drawn.points)
        parses[name] = (found.objects, found.corners)
        for measure, row in measures(found, drawn, truth.kinds).items():
            grid.setdefault(measure, {})[name] = row
    chosen = hard_scenes(parses, drawn, truth)
    shown = {"true": (drawn.objects[chosen], drawn.corners[chosen])}
    for name, (objects, corners) in parses.items():
        alike = relabeled(objects[chosen], drawn.objects[chosen], truth.kinds)
        shown[name] = (alike, corners[chosen])
    title = f"Scenes with noise {sigma:g}, parsed with learned templates"
    return grid, scene_rows(law, drawn.points[chosen], shown, title, {"true": truth})
