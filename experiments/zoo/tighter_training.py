"""Training of a VAE under laws that are tighter than its encoder's, for the same processor time.

A guide that loses nats pulls its model towards posteriors that the guide can follow. Here the model
learns under Gauss-Newton laws one step from the encoder's answers, and the encoder under its own
bound beside it. What was learned is log p of test images, annealed, so that no guide flatters it.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from pyro.infer import ELBO
from torch import Tensor

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, train
from capsule_zoo.experiments.common.findings import by_quantity, over_seeds, single
from capsule_zoo.experiments.zoo.guide_swaps import numbers_of
from capsule_zoo.inference import Checks, ImportanceWeightedELBO, Objective, Pace, gauss_newton
from capsule_zoo.inference.objectives.base import loss_per_image
from capsule_zoo.models.common.modes import frozen
from capsule_zoo.records import Numbers
from capsule_zoo.runs.annealing import guide_losses

SIZES = dict(latent=8, channels=8, hidden=128)
ANNEALING = dict(images=64, simulated=8, chains=2, temperatures=30, particles=100, modes=1)
STAGES = 7  # trainings of a seed, of equal length: two starts, and five that go on from them


class Tightened(Objective):
    """The bound of Gauss-Newton laws, for the model, plus a guide's own objective, for the guide.

    Args:
        own: the guide's objective.
        particles: draws of the laws for each image; one gives their ELBO.
    """

    def __init__(self, own: ELBO, particles: int) -> None:
        super().__init__()
        self.own, self.tighter = own, ImportanceWeightedELBO(particles)

    def differentiable_loss(
        self, model: Any, guide: Any, images: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Return the sum of both losses, in nats per image."""
        laws = gauss_newton(model, guide, images, steps=0, climb=1, check=False)
        tighter = self.tighter.differentiable_loss(model, laws, images)
        with frozen(model):
            return tighter + loss_per_image(self.own, model, guide, images)


@experiment("zoo/tighter-training", data="mnist", minutes=10)
def tighter_training(
    options: Options,
    *,
    seeds: int = 3,
    particles: int = 8,
    batch_size: int = 64,
    sizes: Mapping[str, int] = SIZES,
    annealing: Mapping[str, int] = ANNEALING,
) -> Result:
    """Train a small VAE under tighter laws, and anneal test images (14 core-minutes).

    Every row takes as long as the others, by the clock of the processor. The first half is training
    with the encoder. Half of the time later `encoder` has gone on like that, `importance_weighted`
    under the bound of several draws of it, `gauss_newton` under Gauss-Newton laws, and
    `weighted_newton` under the bound of several draws of these, as `throughout` from the start.

    `lower` is the annealed log p of test images, in nats, `gain` how far it lies over `encoder`,
    `gap` the largest error of annealing, and `lost_elbo` what the encoder trained beside loses.

    Args:
        seeds: number of seeds.
        particles: draws of the importance-weighted bounds.
        batch_size: images of an update.
        sizes: sizes of the entry "vae".
        annealing: arguments of `guide_losses`.
    """
    minutes = replace(options, minutes=options.budget)
    how: dict[str, Any] = dict(particles=particles, batch_size=batch_size, annealing=annealing)
    found = Study({"vae": sizes}, seeds).run(from_one_seed, minutes, **how)["vae"]
    rows = {name: over_seeds([each[name] for each in found]) for name in found[0]}
    return Result(by_quantity(rows))


def from_one_seed(
    job: Job[Mapping[str, int]], *, particles: int, batch_size: int, annealing: Mapping[str, Any]
) -> dict[str, Numbers]:
    """Return the numbers of every row from one seed."""
    options, data = job.options, load_dataset("mnist", root=job.options.data_root)
    untrained = begun("vae", data, options, **job.variant)
    own = untrained.objective
    losses: dict[str, ELBO] = {
        "encoder": own,
        "importance_weighted": ImportanceWeightedELBO(particles),
        "gauss_newton": Tightened(own, 1),
        "weighted_newton": Tightened(own, particles),
    }
    how: dict[str, Any] = dict(batch_size=batch_size, checks=Checks(clock="processor"))
    kinds, counts = ("lower", "gap", "lost_elbo"), (annealing["images"], annealing["simulated"])
    found: dict[str, Numbers] = {}
    for first, further in {"encoder": tuple(losses), "weighted_newton": ("throughout",)}.items():
        start = deepcopy(untrained)
        how |= dict(objective=losses[first], pace=Pace("constant"), name=f"{first}-start")
        steps = train(start, data.train, options, options.budget / STAGES, **how).steps
        for name in further:
            entry = deepcopy(start)
            how |= dict(objective=losses.get(name, losses[first]), pace=Pace("linear"), name=name)
            run = train(entry, data.train, options, options.budget / STAGES, **how)
            bounds, rows = guide_losses(entry, data, (), seed=options.seed, **annealing)
            found[name] = numbers_of(bounds | rows["encoder"], kinds, *counts)
            found[name]["updates"] = single(steps + run.steps)
            if name != "encoder":
                found[name]["gain"] = single(bounds["lower"] - found["encoder"]["lower"][0])
    return found
