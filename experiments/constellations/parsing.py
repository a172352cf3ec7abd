"""Constellations parsed by every guide, on common scenes (Nazabal, Tsagkas and Williams 2021).

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
from capsule_zoo.experiments.common.findings import group_by_quantity, mean_and_error, single
from capsule_zoo.guides import AmortizedMatching, ExactMatching, RansacMatching, SinkhornMatching
from capsule_zoo.guides.constellations.exact import Matchings, corners_of, groups
from capsule_zoo.guides.constellations.matching import MatchingGuide
from capsule_zoo.inference import SleepPhase
from capsule_zoo.inference.segmentation import (
    adjusted_rand_index,
    relabel,
    segmentation_accuracy,
    variation_of_information,
)
from capsule_zoo.models.constellations.scene_distribution import SceneDistribution
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, create, load
from capsule_zoo.runs.objects import GUIDES
from capsule_zoo.zoo.constellations.entry import learn_from
from capsule_zoo.zoo.constellations.figures import MAX_SCENES, scene_rows, template_rows

TIMED = 512  # scenes whose parsing is timed
PROPOSALS = 32  # samples of the set transformer that are compared
SIGMAS = (0.0, 0.1, 0.25)  # standard deviations of noise on the templates of the scenes
PUBLISHED = 0.1  # noise whose entry is kept, and on which parsing is timed
UPDATES = 6400  # updates of the set transformer
PARSED_SCENES = 256  # scenes of each noise that are parsed with learned templates
EXAMPLES = 256  # unlabeled scenes from which templates are learned, and samples of an update
RIGHT = 1 - 1e-6  # accuracy above which a scene is entirely right


@experiment("constellations/parse", data="constellations")
def parse(options: Options, *, scenes: int = 8192) -> Result:
    """Parse scenes of points by exact inference, RANSAC and two variants of EM (ten minutes).

    `segmentation` is the fraction of points with the right object, where equal squares may be
    exchanged. `scenes` is the fraction of scenes that are entirely right, `rand` the adjusted Rand
    index, `variation` the variation of information in nats. `papers` and `papers_scenes` are the
    accuracies of the papers' program: absent corners count as right, and any two labels may be
    exchanged in a scene. `evidence` is log p(points) in nats for the exact guide and a lower bound
    for the others; the mixture has none because it assigns no matching. `expected_segmentation` and
    `expected_scenes` are the accuracies that the exact posterior expects of its own parse: no
    method can do better on average. `ambiguous` is the fraction of scenes with a second parse at
    least half as likely as the first. `seconds` are seconds of one core for 512 scenes.

    Args:
        scenes: number of scenes for each noise.
    """
    grids: dict[str, Table] = {}
    ceilings: dict[str, Numbers] = {}
    speed: Numbers = {}
    figures: dict[str, Figure] = {}
    for sigma in SIGMAS:
        suffix, drawn = name_noise(sigma), draw_scenes(scenes, sigma, seed=options.seed)
        model = create("constellations", sigma=sigma).model.double()
        distribution = model.distribution()
        options.say(f"Parsing scenes with sigma {sigma:g}")
        parses: dict[str, Matchings] = {}
        for name, make_guide in GUIDES.items():
            parses[name], seconds = time_parse(make_guide(model), drawn)
            if sigma == PUBLISHED:
                speed[name] = (seconds, None, TIMED)
        grids[f"noise {sigma:g}"] = compare_with_truth(parses, drawn, distribution.kinds, suffix)
        options.say("The exact posterior's own accuracy")
        ceilings[suffix] = expected_accuracy(distribution, drawn.points)
        title = f"Scenes with noise {sigma:g}, as each guide parses them"
        pair = distribution, distribution
        figures[f"noise_{suffix}"] = plot_hard_scenes(*pair, parses, drawn, title)
        if sigma == max(SIGMAS):
            figures["ambiguous"] = plot_two_readings(distribution, drawn)
    metrics: Metrics = {
        **grids,
        "speed": Table({"seconds": speed}),
        "the exact posterior, noise": Table(group_by_quantity(ceilings)),
    }
    return Result(metrics, figures)


def name_noise(sigma: float) -> str:
    """Return a noise as the end of a metric's name: .25 becomes `025`."""
    return f"{sigma:g}".replace(".", "")


def time_parse(guide: MatchingGuide, scenes: Scenes) -> tuple[Matchings, float]:
    """Parse all scenes with a guide; return the parse, and a core's seconds for the first 512."""
    began = time.process_time()
    first = guide.parse(scenes.points[:TIMED])
    seconds = time.process_time() - began
    if len(scenes) <= TIMED:
        return first, seconds
    rest = guide.parse(scenes.points[TIMED:])
    pairs = zip(vars(first).values(), vars(rest).values(), strict=True)
    return Matchings(*(torch.cat(pair) for pair in pairs)), seconds


def compare_with_truth(
    parses: Mapping[str, Matchings], scenes: Scenes, kinds: Sequence[int], suffix: str
) -> Table:
    """Measure parses against the truth; see `parse`."""
    rows: dict[str, Numbers] = {}
    for name, parse in parses.items():
        compared = parse.objects, scenes.objects, scenes.present
        accuracy = segmentation_accuracy(*compared, kinds)
        free = segmentation_accuracy(*compared)
        rows[name] = {
            "segmentation": mean_and_error(accuracy),
            "scenes": mean_and_error((accuracy > RIGHT).float()),
            "papers": mean_and_error(count_absent_as_right(free, scenes.present)),
            "papers_scenes": mean_and_error((free > RIGHT).float()),
            "rand": mean_and_error(adjusted_rand_index(*compared)),
            "variation": mean_and_error(variation_of_information(*compared)),
        }
        if parse.log_evidence.isfinite().all():
            rows[name]["evidence"] = mean_and_error(parse.log_evidence)
    return Table(group_by_quantity(rows), "{quantity}_{variant}_" + suffix)


@torch.no_grad()
def expected_accuracy(distribution: SceneDistribution, points: Tensor) -> Numbers:
    """Return the accuracies that the exact posterior expects of its own parse; see `parse`."""
    rows = []
    for group in groups(distribution, points):
        objects, probability = group.posterior()
        for p in probability:
            accuracy = accuracy_of_readings(objects[p.argmax()], objects, distribution).to(p)
            same = accuracy > RIGHT
            exchanged = same.sum()  # parses that differ only by an exchange of equal objects
            first = p[same].sum()
            second = p[~same].max() * exchanged if (~same).any() else p.new_zeros(())
            ambiguous = float(second > first / 2)
            rows.append(((p * accuracy).sum().item(), first.item(), ambiguous))
    names = ("expected_segmentation", "expected_scenes", "ambiguous")
    columns = zip(names, torch.tensor(rows).T, strict=True)
    return {name: mean_and_error(values) for name, values in columns}


def accuracy_of_readings(
    reading: Tensor, objects: Tensor, distribution: SceneDistribution
) -> Tensor:
    """Return the accuracies (S,) of one parse of a scene (N,), if each of `objects` were true."""
    present = torch.ones_like(objects, dtype=torch.bool)
    return segmentation_accuracy(reading.expand_as(objects), objects, present, distribution.kinds)


@torch.no_grad()
def plot_two_readings(distribution: SceneDistribution, scenes: Scenes) -> Figure:
    """Draw the scenes whose two likeliest parses are most nearly equally likely."""
    first, second = Matchings.empty(scenes.points), Matchings.empty(scenes.points)
    ratio = torch.zeros(len(scenes))
    for group in groups(distribution, scenes.points):
        objects, probability = group.posterior()
        best = probability.argmax(1)
        rest = probability.clone()
        for p, reading in zip(rest, objects[best], strict=True):
            p[accuracy_of_readings(reading, objects, distribution) > RIGHT] = 0
        ratio[group.rows] = (rest.amax(1) / probability.amax(1)).float()
        first.objects[group.rows[:, None], group.slots] = objects[best]
        second.objects[group.rows[:, None], group.slots] = objects[rest.argmax(1)]
    for reading in (first, second):
        reading.corners.copy_(corners_of(distribution, scenes.points, reading.objects, best=True))
    readings = {"first reading": first, "second reading": second}
    rows = ratio.argsort(descending=True)[:MAX_SCENES]
    title = "Scenes with two readings that are nearly as likely as each other"
    labels = label_alike(readings, scenes[rows], rows, distribution)
    return scene_rows(distribution, scenes.points[rows], labels, title)


def label_alike(
    parses: Mapping[str, Matchings], true: Scenes, rows: Tensor, distribution: SceneDistribution
) -> dict[str, tuple[Tensor, Tensor]]:
    """Relabel equal objects of true and parsed scenes alike; return objects and corners.

    Args:
        rows: indices of the scenes among the parsed scenes.
    """
    labels = {"true": (true.objects, true.corners)}
    for name, parse in parses.items():
        objects = relabel(parse.objects[rows], true.objects, distribution.kinds)
        labels[name] = objects, parse.corners[rows]
    return labels


def plot_hard_scenes(
    distribution: SceneDistribution,
    truth: SceneDistribution,
    parses: Mapping[str, Matchings],
    scenes: Scenes,
    title: str,
) -> Figure:
    """Draw eight scenes: four that guides parse differently, and four that they parse equally.

    Args:
        distribution: the templates of the parses.
        truth: the templates of the scenes.
    """
    accuracies = [
        segmentation_accuracy(parse.objects, scenes.objects, scenes.present, truth.kinds)
        for parse in parses.values()
    ]
    wrong = torch.stack(accuracies).lt(RIGHT).sum(0)
    many = scenes.present.sum(1) >= 2 * min(truth.sizes)
    order = (wrong * many).argsort(descending=True, stable=True)
    easy = (many & (wrong == 0)).nonzero()[:, 0]
    rows = torch.cat([order[:4], easy[:4]])
    labels = label_alike(parses, scenes[rows], rows, truth)
    distributions = {} if distribution is truth else {"true": truth}
    return scene_rows(distribution, scenes.points[rows], labels, title, distributions)


def count_absent_as_right(accuracy: Tensor, present: Tensor) -> Tensor:
    """Return the fraction of right corners, (S,); absent ones of (S, N) count as right."""
    fraction = present.float().mean(1)
    return accuracy * fraction + (1 - fraction)


@experiment("constellations/learned", data="constellations")
def learn_and_parse(options: Options) -> Result:
    """Learn templates and noise from unlabeled scenes, and a set transformer (8 minutes a noise).

    Templates are learned by exact EM. `exact`, `ransac` and `sinkhorn` parse with what was learned.
    `amortized` is a set transformer that was trained on samples of the learned model; `proposals`
    compares 32 of its samples by their evidence. Measures are defined in `constellations/parse`.
    `learned_noise` is the noise that was learned, `learning` and `training` are seconds of one core
    for the templates and for the set transformer.
    """
    noises = {name_noise(sigma): sigma for sigma in SIGMAS}
    study = Study(noises)
    outcomes, folders = study.run(learn, options), study.folders(options)
    metrics: dict[str, Table] = {}
    figures, distributions = {}, {}
    truth = create("constellations").model.distribution()
    for suffix, sigma in noises.items():
        title = f"noise {sigma:g}"
        options.say(f"Parsing scenes with {title}")
        entry = load(folders[suffix])
        drawn = draw_scenes(PARSED_SCENES, sigma, seed=options.seed)
        parses = {n: guide.parse(drawn.points) for n, guide in learned_guides(entry).items()}
        metrics[title] = compare_with_truth(parses, drawn, truth.kinds, suffix)
        distributions[title] = entry.model.distribution()
        caption = f"Scenes with {title}, parsed with learned templates"
        pair = distributions[title], truth
        figures[f"noise_{suffix}"] = plot_hard_scenes(*pair, parses, drawn, caption)
    numbers = {s: {q: single(v) for q, v in row.items()} for s, (row,) in outcomes.items()}
    metrics["learning, noise"] = Table(group_by_quantity(numbers))
    title = "Templates that were learned, with their noise"
    figures["templates"] = template_rows(distributions, title)
    return Result({**metrics}, figures, None, load(folders[name_noise(PUBLISHED)]))


def learn(job: Job[float]) -> dict[str, float]:
    """Learn templates and then train the set transformer; return the noise and the seconds.

    The job's variant is the noise on the templates, which is not given to the model.
    """
    options = job.options
    pyro.set_rng_seed(options.seed)
    entry = create("constellations", learned=True).use_guide("amortized")
    drawn = draw_scenes(EXAMPLES, job.variant, seed=options.seed + 1)
    split = Split(drawn.points.float(), drawn.present.sum(1))
    began = time.process_time()
    learn_from(entry.model, split.images, options.seed)
    learning = time.process_time() - began
    arguments: dict[str, Any] = dict(objective=SleepPhase(), freeze="model", batch_size=EXAMPLES)
    train(entry, split, options, **arguments, epochs=None, **options.limit(UPDATES))
    return {
        "learned_noise": entry.model.log_sigma.exp().item(),
        "learning": learning,
        "training": time.process_time() - began - learning,
    }


def learned_guides(entry: Entry) -> dict[str, MatchingGuide]:
    """Return the guides to an entry's learned templates, its set transformer among them."""
    network = entry.guide_of(AmortizedMatching)
    exact = entry.model.double()
    return {
        "exact": ExactMatching(exact),
        "ransac": RansacMatching(exact),
        "sinkhorn": SinkhornMatching(exact),
        "amortized": network,
        "proposals": network.with_proposals(PROPOSALS),
    }
