"""Two digits in a scene: which parts belong to which, and which classes the two objects have."""

from typing import NamedTuple

import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import mean_and_error
from capsule_zoo.experiments.shape_codes.headline import counted, read_objects
from capsule_zoo.guides.parts.routing_slots import RoutingSlots
from capsule_zoo.models import Belonging, Capsules, ObjectPose, Painting, ShapeCodes
from capsule_zoo.models.parts.part_sets import from_part_sets
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry, load
from capsule_zoo.zoo.shape_codes.entry import part_sets

WEIGHTS = "shape-codes-mnist"
NAMED = 10_000  # training images from which the classes of kinds are known


class Pairs(NamedTuple):
    """Part sets of two digits each, in which nothing says which part is whose.

    Attributes:
        parts: presences (N, 2 P) and poses (N, 2 P, 6); two neighbors share a template.
        owner: the digit, 0 or 1, to which each part belongs, (N, 2 P).
        labels: classes of the two digits, (N, 2).
        digits: part sets of the digits alone, (N, 2, P, 7).
    """

    parts: Capsules
    owner: Tensor
    labels: Tensor
    digits: Tensor


@experiment("shape-codes/overlap", data="mnist", minutes=10)
def overlap(options: Options, *, images: int = 100, starts: int = 2, rounds: int = 4) -> Result:
    """Two digits on top of each other, separated by their parts (10 minutes).

    The parts of two test digits of different classes, as they are parsed alone, are put together in
    one set, and neighbors that share a template are exchanged at random. The model with two slots
    has the objects of published weights. Routing finds two objects and says whose each part is.
    The parts are given: a reader of parts that parses the image of both digits is not trained here.

    Args:
        images: number of pairs.
        starts, rounds: of `RoutingSlots`.
    """
    entry = load(WEIGHTS)
    data = load_dataset("mnist", root=options.data_root)
    reader = entry.guide.with_scope("parts")
    options.say("Parsing digits")
    known = part_sets(reader, data.train[:NAMED], options.seed)
    pairs = paired(part_sets(reader, different(data, images, options.seed), options.seed))
    classes = counted(read_objects(entry.guide, known.images).belief, known.labels).argmax(1)
    options.say(f"Finding two objects in {images} pairs")
    model = with_two_slots(entry.model).with_scope("objects")
    guide = RoutingSlots(model, starts=starts, rounds=rounds)
    return Result(measured(guide, entry, pairs, classes))


def different(data: Dataset, pairs: int, seed: int) -> Split:
    """Return 2 N test images, in which image i and image N + i are of different classes.

    Raises:
        ValueError: there are not as many such pairs of test images.
    """
    order = torch.randperm(len(data.test), generator=seeded_generator(seed))
    first, second = order[: len(order) // 2 * 2].chunk(2)
    labels = data.test.labels
    fit = (labels[first] != labels[second]).nonzero()[:pairs, 0]
    if len(fit) < pairs:
        raise ValueError(f"images must be at most {len(fit)}, not {pairs}, with this data")
    return data.test[torch.cat([first[fit], second[fit]])]


def paired(sets: Split, seed: int = 0) -> Pairs:
    """Put the part sets of images i and N + i together."""
    digits = torch.stack(sets.images.squeeze(1).chunk(2), dim=1)  # (N, 2, P, 7)
    labels = torch.stack(sets.labels.chunk(2), dim=1)
    shape = digits[:, 0, :, 0].shape
    swap = torch.rand(shape, generator=seeded_generator(seed)) < 0.5
    both = digits.transpose(1, 2)  # (N, P, 2, 7)
    mixed = torch.where(swap[..., None, None], both.flip(2), both).flatten(1, 2)
    owner = torch.stack([swap, ~swap], dim=-1).flatten(1).long()
    return Pairs(from_part_sets(mixed[:, None]), owner, labels, digits)


def with_two_slots(model: ShapeCodes) -> ShapeCodes:
    """Return a model of two objects of the same kinds, with two instances of every part."""
    shapes = model.shapes
    two = ShapeCodes(
        model.image_shape,
        model.kinds,
        2 * model.levels[-1].size,
        model.codes,
        slots=2,
        painting=Painting(instances=2, template_size=model.template_logits.shape[-1]),
        belonging=Belonging(sigma_min=shapes.sigma_min),
        pose=ObjectPose(sigma_top=model.pose.sigma_top),
    )
    with torch.no_grad():
        two.kind_logits.copy_(model.kind_logits)
        two.template_logits.copy_(model.template_logits)
        for name, numbers in two.shapes.named_parameters():
            numbers.copy_(getattr(shapes, name).repeat_interleave(2, dim=1))
    return two


@torch.no_grad()
def measured(guide: RoutingSlots, entry: Entry, pairs: Pairs, classes: Tensor) -> Numbers:
    """Measure the classes of both digits and the share of parts that are given to the right one.

    The two slots count in the order that gives more parts to the right digit. `..._alone` is read
    of each digit's own parts, by the guide of one object.
    """
    found, shares = [], []
    for few in zip(pairs.parts.presence.split(50), pairs.parts.pose.split(50), strict=True):
        parts = Capsules(*few)
        scene = guide.find(parts)
        found.append(scene.kind)
        shares.append(guide.model.responsibilities(*scene[:3], parts)[..., 1:].argmax(-1))
    given, kind = torch.cat(shares), torch.cat(found)
    right = (given == pairs.owner).double().mean(-1)
    swapped = right < 0.5
    answers = classes[torch.where(swapped[:, None], kind.flip(1), kind)]
    alone = read_objects(entry.guide, pairs.digits.flatten(0, 1)[:, None])
    single = classes[alone.belief.argmax(-1)].view(-1, 2)
    both, either = (
        (each.sort(-1).values == pairs.labels.sort(-1).values).all(-1) for each in (answers, single)
    )
    return {
        "parts_right": mean_and_error(torch.where(swapped, 1 - right, right)),
        "both_classes": mean_and_error(both.double()),
        "both_classes_alone": mean_and_error(either.double()),
        "each_class": mean_and_error((answers == pairs.labels).double().flatten()),
        "each_class_alone": mean_and_error((single == pairs.labels).double().flatten()),
    }
