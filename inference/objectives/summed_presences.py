"""The loss of scenes with all presences summed out, tempered while decoders begin to learn."""

from typing import Any

import torch
from torch import Tensor

from capsule_zoo.guides.scenes.proposals import SceneGuide, SubsetDistribution
from capsule_zoo.inference.objectives.base import Objective
from capsule_zoo.inference.other_model import refuse_another_model
from capsule_zoo.models.checks import check_at_least


class SummedPresences(Objective):
    """The loss -log sum_z w_z of a guide to scenes, with the sum over all presences.

    During the first updates q(z | u) is flattened, proportional to w_z^(1/T) with T falling from
    `temperature` to 1: then every subset of the proposals trains, so that objects are learned
    before presences are decided. The loss is sum_z q(z | u) (log q(z | u) - log w_z), a bound too.

    A guide that draws presences (`AttendInferRepeat`) is trained as by Pyro's `TraceGraph_ELBO`, by
    the score of its draw less its baseline. The baseline descends its squared error.

    Args:
        temperature: T of the first update.
        updates: number of updates after which T is 1.
    """

    is_bound = True

    def __init__(self, temperature: float = 200.0, updates: int = 400) -> None:
        super().__init__()
        check_at_least(1, temperature=temperature)
        check_at_least(0, updates=updates)
        self.temperature, self.updates, self.done = temperature, updates, 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = int(state["done"])

    def check_pair(self, model: Any, guide: Any) -> None:
        """Raise ValueError unless the guide proposes objects of this model."""
        if not isinstance(guide, SceneGuide):
            raise ValueError(
                f"guide must propose objects of Scenes for SummedPresences, not "
                f"{type(guide).__name__}; for other models use Trace_ELBO"
            )
        refuse_another_model(model, guide)

    def remark_on_end(self) -> str | None:
        """Return that presences are not decided yet, while T is above 1."""
        if not 0 < self.done < self.updates:  # a guide that draws presences leaves it at 0
            return None
        return (
            f"training was cut short ({self.done} steps), before presences of objects are decided "
            f"at step {self.updates}, so that counts are wrong; train for {5 * self.updates} steps "
            f"(of a run: --resume --steps {5 * self.updates})"
        )

    def differentiable_loss(
        self, model: Any, guide: SceneGuide, images: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss of images (B, C, H, W), in nats per image.

        Raises:
            ValueError: a guide that proposes no objects, or to another model.
        """
        self.check_pair(model, guide)
        scene_proposals = guide.draw_proposals(images)
        distribution = guide.presence_distribution(images, scene_proposals)
        if distribution.baseline is not None:
            return _loss_of_a_draw(distribution, distribution.baseline, scene_proposals.score)
        bound = distribution.log_total
        if torch.is_grad_enabled() and guide.training:
            left = max(0.0, 1 - self.done / self.updates)
            self.done += 1
            if left:
                heat = 1 + (self.temperature - 1) * left
                log_q = (distribution.log_q.detach() / heat).log_softmax(-1)
                weight = distribution.log_q + distribution.log_total[:, None]
                bound = (log_q.exp() * (weight - log_q)).sum(-1)
        score = scene_proposals.score
        return -(bound + (bound.detach() * (score - score.detach()))).mean()


def _loss_of_a_draw(distribution: SubsetDistribution, baseline: Tensor, score: Tensor) -> Tensor:
    """Return the mean of log q(z | u) - log w_z for one sample of z in each scene, in nats.

    Args:
        baseline: prediction of log w_z - log q(z | u), in nats, (B,).
        score: the log density of other samples that are not reparametrized, (B,).
    """
    row = distribution.draw_rows()
    log_q, weight = (x.gather(1, row)[:, 0] for x in (distribution.log_q, distribution.log_weight))
    bound = weight - log_q
    credit = (bound - baseline).detach() * log_q + bound.detach() * score
    credit = credit - (bound.detach() - baseline).square()
    return -(bound + credit - credit.detach()).mean()
