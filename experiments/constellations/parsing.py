"""Constellations parsed by every guide, on the same scenes (Nazabal, Tsagkas and Williams 2021).

Scenes hold a square, a triangle and a square, each present with probability 1/2, at least one of
them. In `parse` the templates and the noise are given; in `learned` templates are learned from
unlabeled scenes, as in the published constellation autoencoder (Kosiorek et al. 2019). Names end in
the noise sigma on the templates: 0, 01 for 0.1 and 025 for 0.25.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Scenes, Split, draw_scenes
from capsule_zoo.experiments import Job, Options, Result, Study, experiment, train
from capsule_zoo.experiments.common.findings import by_quantity, mean_and_error, single
from capsule_zoo.guides import AmortizedMatching, ExactMatching, RansacMatching, SinkhornMatching
from capsule_zoo.guides.constellations.exact import Group, Matchings, corners_of, groups
from capsule_zoo.guides.constellations.matching import MatchingGuide
from capsule_zoo.inference import SleepPhase
from capsule_zoo.inference.evaluation.segmentation import (
    adjusted_rand_index,
    relabeled,
    segmentation_accuracy,
    variation_of_information,
)
from capsule_zoo.models.constellations.scene_law import SceneLaw
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, create, load
from capsule_zoo.runs.objects import GUIDES
from capsule_zoo.zoo.constellations.entry import learn_from
from capsule_zoo.zoo.constellations.figures import SHOWN, scene_rows, template_rows

TIMED = 512  # scenes


@experiment("constellations/parse", data="constellations")
def parse(
    options: Options,
    *,
    scenes: int = 8192,
    sigmas: tuple[float, ...] = (0.0, 0.1, 0.25),
    guides: tuple[str, ...] = tuple(GUIDES),
) -> Result:
    """Scenes of points parsed by exact inference, RANSAC and two kinds of EM (ten minutes).

    `segmentation` is the share of points with the right object, where equal squares may be
    exchanged, `scenes` the share of scenes that are right altogether, `rand` the adjusted Rand
    index, `variation` the variation of information in nats. `evidence` is log p(points) in nats for
    the exact guide and a lower bound for the others; the mixture's is left out because it puts
    scenes into no matching at all. `expected_segmentation` and `expected_scenes` are what the exact
    posterior expects of its own parse: no method can do better on average. `ambiguous` is the share
    of scenes with a second reading at least half as likely as the first. `seconds` are seconds of
    one core for 512 scenes.

    Args:
        scenes: scenes for each noise.
        sigmas: noises on the templates.
        guides: names of the guides that parse the scenes.
    """
    grids: dict[str, Table] = {}
    own: dict[str, Numbers] = {}
    speed: Numbers = {}
    figures: dict[str, Figure] = {}
    for sigma in sigmas:
        suffix, drawn = suffix_of(sigma), draw_scenes(scenes, sigma, seed=options.seed)
        model = create("constellations", sigma=sigma).model.double()
        law = model.law()
        options.say(f"Parsing scenes with sigma {sigma:g}")
        parses: dict[str, Matchings] = {}
        for name in guides:
            parses[name], seconds = timed(GUIDES[name](model), drawn)
            if suffix == "01":
                speed[name] = (seconds, None, TIMED)
        grids[f"noise {sigma:g}"] = measured(parses, drawn, law.kinds, suffix)
        options.say("The exact posterior's own accuracy")
        own[suffix] = ceilings(law, drawn.points)
        title = f"Scenes with noise {sigma:g}, as each guide parses them"
        chosen = hard_scenes(parses, drawn, law)
        shown = beside_truth(parses, drawn, chosen, law.kinds)
        figures[f"noise_{suffix}"] = scene_rows(law, drawn.points[chosen], shown, title)
        if suffix == "025":
            figures["ambiguous"] = two_readings(law, drawn)
    metrics: Metrics = {
        **grids,
        "speed": Table({"seconds": speed}),
        "the exact posterior, noise": Table(by_quantity(own)),
    }
    return Result(metrics, figures)


def suffix_of(sigma: float) -> str:
    """Return the end of the names of numbers at this noise: .25 as `025`."""
    return f"{sigma:g}".replace(".", "")


def timed(guide: MatchingGuide, scenes: Scenes) -> tuple[Matchings, float]:
    """Return the guide's parse of all scenes, and the seconds of a core for the first 512."""
    began = time.process_time()
    first = guide.parse(scenes.points[:TIMED])
    seconds = time.process_time() - began
    if len(scenes) <= TIMED:
        return first, seconds
    rest = guide.parse(scenes.points[TIMED:])
    pairs = zip(vars(first).values(), vars(rest).values(), strict=True)
    return Matchings(*(torch.cat(pair) for pair in pairs)), seconds


def measured(
    parses: Mapping[str, Matchings], scenes: Scenes, kinds: Sequence[int], suffix: str
) -> Table:
    """Compare parses with the truth in all measures; objects of one kind may be exchanged."""
    rows: dict[str, Numbers] = {}
    for name, found in parses.items():
        compared = found.objects, scenes.objects, scenes.present
        accuracy = segmentation_accuracy(*compared, kinds)
        rows[name] = {
            "segmentation": mean_and_error(accuracy),
            "scenes": mean_and_error((accuracy > 1 - 1e-6).float()),
            "rand": mean_and_error(adjusted_rand_index(*compared)),
            "variation": mean_and_error(variation_of_information(*compared)),
        }
        if found.log_evidence.isfinite().all():
            rows[name]["evidence"] = mean_and_error(found.log_evidence)
    return Table(by_quantity(rows), "{quantity}_{variant}_" + suffix)


@torch.no_grad()
def ceilings(law: SceneLaw, points: Tensor) -> Numbers:
    """Compute what the exact posterior expects of its own parse; see `parse`."""
    rows = [row for group in groups(law, points) for row in _expected(group)]
    names = ("expected_segmentation", "expected_scenes", "ambiguous")
    found = zip(names, torch.tensor(rows).T, strict=True)
    return {name: mean_and_error(values) for name, values in found}


def _expected(group: Group) -> list[tuple[float, float, float]]:
    """Return a scene's expected accuracy, probability of its parse, and whether it is ambiguous."""
    objects, probability = group.posterior()
    here = torch.ones_like(objects, dtype=torch.bool)
    found = []
    for own in probability:
        parse = objects[own.argmax()].expand_as(objects)
        accuracy = segmentation_accuracy(parse, objects, here, group.law.kinds).to(own)
        same = accuracy > 1 - 1e-6
        first = own[same].sum()
        exchanged = same.sum()  # readings that differ by an exchange of equal objects only
        second = own[~same].max() * exchanged if (~same).any() else own.new_zeros(())
        found.append(((own * accuracy).sum().item(), first.item(), float(second > first / 2)))
    return found


@torch.no_grad()
def two_readings(law: SceneLaw, scenes: Scenes) -> Figure:
    """Draw scenes whose two likeliest readings are most nearly as likely as each other."""
    first, second = Matchings.empty(scenes.points), Matchings.empty(scenes.points)
    ratio = torch.zeros(len(scenes))
    for group in groups(law, scenes.points):
        objects, probability = group.posterior()
        best = probability.argmax(1)
        rest = probability.clone()
        for own, reading in zip(rest, objects[best], strict=True):
            here = torch.ones_like(objects, dtype=torch.bool)
            accuracy = segmentation_accuracy(reading.expand_as(objects), objects, here, law.kinds)
            own[accuracy > 1 - 1e-6] = 0
        ratio[group.rows] = (rest.amax(1) / probability.amax(1)).float()
        first.objects[group.rows[:, None], group.slots] = objects[best]
        second.objects[group.rows[:, None], group.slots] = objects[rest.argmax(1)]
    chosen = ratio.argsort(descending=True)[:SHOWN]
    for reading in (first, second):
        reading.corners.copy_(corners_of(law, scenes.points, reading.objects, best=True))
    readings = {"first reading": first, "second reading": second}
    shown = beside_truth(readings, scenes, chosen, law.kinds)
    title = "Scenes with two readings that are nearly as likely as each other"
    return scene_rows(law, scenes.points[chosen], shown, title)


def beside_truth(
    parses: Mapping[str, Matchings], scenes: Scenes, chosen: Tensor, kinds: Sequence[int]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the objects and corners of chosen scenes, true and parsed, with objects named alike.

    Args:
        chosen: numbers of the chosen scenes.
    """
    true = scenes[chosen]
    shown = {"true": (true.objects, true.corners)}
    for name, found in parses.items():
        objects = relabeled(found.objects[chosen], true.objects, kinds)
        shown[name] = objects, found.corners[chosen]
    return shown


def hard_scenes(parses: Mapping[str, Matchings], scenes: Scenes, law: SceneLaw) -> Tensor:
    """Return eight scenes with all objects or two: four that guides parse differently, four not."""
    right = [
        segmentation_accuracy(found.objects, scenes.objects, scenes.present, law.kinds)
        for found in parses.values()
    ]
    wrong = torch.stack(right).lt(1 - 1e-6).sum(0)
    many = scenes.present.sum(1) >= 2 * min(law.sizes)
    order = (wrong * many).argsort(descending=True, stable=True)
    easy = (many & (wrong == 0)).nonzero()[:, 0]
    return torch.cat([order[:4], easy[:4]])


@experiment("constellations/papers", data="constellations")
def papers(
    options: Options,
    *,
    scenes: int = 8192,
    sigmas: tuple[float, ...] = (0.0, 0.1, 0.25),
    guides: tuple[str, ...] = ("exact", "ransac", "sinkhorn", "mixture"),
) -> Result:
    """Parse the scenes of `parse` and measure as the papers do, beside our measure (ten minutes).

    The papers' program counts absent corners as right, and lets any two labels be exchanged in a
    scene (`papers`, and `papers_scenes` for whole scenes). Ours counts the corners that are there,
    and exchanges equal squares only (`segmentation`, `scenes`). Names end in the noise.

    Args:
        scenes: scenes for each noise; empty ones are left out.
        sigmas: noises on the templates.
        guides: names of the guides that parse the scenes.
    """
    grids: dict[str, Table] = {}
    for sigma in sigmas:
        drawn = draw_scenes(scenes, sigma, seed=options.seed)
        model = create("constellations", sigma=sigma).model.double()
        rows: dict[str, Numbers] = {}
        for name in guides:
            options.say(f"{name} on scenes with sigma {sigma:g}")
            objects = GUIDES[name](model).parse(drawn.points).objects
            compared = objects, drawn.objects, drawn.present
            ours = segmentation_accuracy(*compared, model.law().kinds)
            free = segmentation_accuracy(*compared)
            rows[name] = {
                "segmentation": mean_and_error(ours),
                "scenes": mean_and_error((ours > 1 - 1e-6).float()),
                "papers": mean_and_error(with_absent(free, drawn.present)),
                "papers_scenes": mean_and_error((free > 1 - 1e-6).float()),
            }
        names = "{quantity}_{variant}_" + suffix_of(sigma)
        grids[f"noise {sigma:g}"] = Table(by_quantity(rows), names)
    return Result({**grids})


def with_absent(accuracy: Tensor, present: Tensor) -> Tensor:
    """Return the share of right corners, (S,), where the absent ones of (S, N) count as right."""
    here = present.float().mean(1)
    return accuracy * here + (1 - here)


PUBLISHED = "01"  # the noise of the entry that is kept


@experiment("constellations/learned", data="constellations")
def learned(
    options: Options,
    *,
    scenes: int = 256,
    sigmas: tuple[float, ...] = (0.0, 0.1, 0.25),
    examples: int = 256,
    updates: int = 6400,
    batch_size: int = 256,
    proposals: int = 32,
) -> Result:
    """Learn templates and noise from unlabeled scenes, and a set transformer (8 minutes a noise).

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
    suffixes = {suffix_of(sigma): sigma for sigma in sigmas}
    study = Study(suffixes)
    how = dict(examples=examples, updates=updates, batch_size=batch_size)
    outcomes, folders = study.run(learn, options, **how), study.folders(options)
    metrics: dict[str, Table] = {}
    figures, laws = {}, {}
    truth = create("constellations").model.law()
    for suffix, sigma in suffixes.items():
        options.say(f"Parsing scenes with noise {sigma:g}")
        entry = load(folders[suffix])
        drawn = draw_scenes(scenes, sigma, seed=options.seed)
        parses = {n: g.parse(drawn.points) for n, g in learned_guides(entry, proposals).items()}
        title = f"noise {sigma:g}"
        metrics[title] = measured(parses, drawn, truth.kinds, suffix)
        chosen = hard_scenes(parses, drawn, truth)
        shown = beside_truth(parses, drawn, chosen, truth.kinds)
        figures[f"noise_{suffix}"] = scene_rows(
            entry.model.law(),
            drawn.points[chosen],
            shown,
            f"Scenes with {title}, parsed with learned templates",
            {"true": truth},
        )
        laws[title] = entry.model.law()
    numbers = {s: {q: single(value) for q, value in own.items()} for s, (own,) in outcomes.items()}
    metrics["learning, noise"] = Table(by_quantity(numbers))
    figures["templates"] = template_rows(laws, "Templates that were learned, with their noise")
    kept = load(folders[PUBLISHED]) if PUBLISHED in folders else None
    return Result({**metrics}, figures, None, kept)


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


def learned_guides(entry: Entry, proposals: int) -> dict[str, MatchingGuide]:
    """Return the guides that parse with what an entry has learned, its network among them."""
    network = entry.guide_of(AmortizedMatching)
    exact = entry.model.double()
    return {
        "exact": ExactMatching(exact),
        "ransac": RansacMatching(exact),
        "sinkhorn": SinkhornMatching(exact),
        "amortized": network,
        "proposals": network.with_proposals(proposals),
    }
