"""The sleep phase of the wake-sleep algorithm for scenes of points: a guide learns from samples.

    sleep   scenes and fractions of their points from the model; the guide learns log q(assignment |
    points)

The model is not trained. Its samples are scaled to [-1, 1], as the scenes of a data set are, and
samples of fewer than two points are left out. What the guide computes in closed form given the
assignment (corners and poses) takes no part.

References:
    Hinton, Dayan, Frey & Neal 1995, "The Wake-Sleep Algorithm for Unsupervised Neural Networks".
"""

from typing import Any

from torch import Tensor

from capsule_zoo.guides.constellations.amortized import AmortizedMatching, dreams
from capsule_zoo.inference.objectives.base import Objective


class SleepPhase(Objective):
    """The sleep-phase objective: an amortized guide to constellations learns from samples.

    Its value, the mean of -log q(assignment | points) over samples, bounds no quantity of the data.

    Raises:
        ValueError: on use, a guide of another class than `AmortizedMatching`.
    """

    units = "nats per scene"

    def differentiable_loss(
        self, model: Any, guide: Any, points: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Return the mean of -log q(assignment | points) over as many samples as scenes."""
        if not isinstance(guide, AmortizedMatching):
            raise ValueError(
                f"SleepPhase trains an AmortizedMatching, not {type(guide).__name__}, which has "
                "nothing to learn; use Trace_ELBO for the model's own parameters"
            )
        scenes, objects = dreams(model, len(points))
        return -guide.log_assignment(scenes, objects).mean()
