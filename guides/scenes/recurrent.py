"""AIR: a recurrent network attends to one object after the other, and infers when to stop.

For s = 1 .. S, with h_s the state of an LSTM that has seen the image and the draws of slot s - 1:

    stay_s ~ Bernoulli(logit = linear(h_s))   # the first 0 ends the sequence: z is a prefix
    look   : log size, x and y (and angle, color, depth) ~ Normal distributions, linear in h_s
    read   : the object model's guide encodes the window of that pose in the image

    q(z | u) = prod_{s <= n} stay_s (1 - stay_{n + 1}),  z = (1, .., 1, 0, .., 0) with n ones

It does not see what it has painted. The number of objects is drawn, and its gradient is a
score-function estimate with a baseline that a network predicts from image and states (NVIL); it is
added to the log weight of the empty scene. As stay_s depends on earlier slots only, all S
proposals are drawn first. Proposals after the end are not used: see `guides.scenes.proposals`.

References:
    Eslami, Heess, Weber, Tassa, Szepesvari, Kavukcuoglu & Hinton 2016, "Attend, Infer, Repeat"
    (arXiv 1603.08575), section 2; Pyro's tutorial of the same name. Mnih & Gregor 2014, "Neural
    Variational Inference and Learning in Belief Networks" (arXiv 1402.0030), for the baseline.
"""

import math
from typing import Any, Self

import torch
from pyro import poutine
from pyro.nn import PyroModule, pyro_method
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.scenes.proposals import Proposal, SceneProposals, SubsetDistribution
from capsule_zoo.guides.scenes.windows import WindowReader, pose_head
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.trace_density import latent_sites
from capsule_zoo.models.networks.layers import ELU
from capsule_zoo.models.scenes import Scenes
from capsule_zoo.models.scenes.pictures import AsObject

_UNIT = 100.0  # nats for a unit of the output of the baseline's network


def drawn_values(trace: Trace) -> list[Tensor]:
    """Return the sampled values of one object of each scene, (B, size) for each site."""
    values = [site["value"] for site in latent_sites(trace).values()]
    return [value.reshape(len(value), -1) for value in values]


def prefix_log_probs(stay: Tensor) -> Tensor:
    """Compute the log probability of stopping after n objects, n from 0 to S, (B, S + 1).

    Args:
        stay: logits of going on to one more object, (B, S); nothing follows the last one.
    """
    none = torch.zeros_like(stay[:, :1])
    reached = torch.cat([none, logsigmoid(stay).cumsum(-1)], -1)
    return reached + torch.cat([logsigmoid(-stay), none], -1)


class AttendInferRepeat(WindowReader):
    """AIR's guide, a recurrent network that samples object after object, and their number.

    Args:
        model, reader, ground_reader: see `WindowReader`.
        hidden: units of the LSTM, and of the network of the baseline.

    Raises:
        ValueError: `hidden` is below 1.
    """

    def __init__(
        self, model: Scenes, reader: Guide, *, hidden: int = 256, ground_reader: Guide | None = None
    ) -> None:
        super().__init__(model, reader, ground_reader)
        check_at_least(1, hidden=hidden)
        pixels = math.prod(model.image_shape)
        with poutine.block(), torch.random.fork_rng(), torch.no_grad():
            trace = poutine.trace(AsObject()(model.draw_object)).get_trace(model.plate(1))
        self.last = sum(value.shape[1] for value in drawn_values(trace))
        self.cell = PyroModule[nn.LSTMCell](pixels + self.last, hidden)
        self.where = pose_head(hidden, sum(self.numbers))
        self.stay = PyroModule[nn.Linear](hidden, 1)
        self.expected = PyroModule[nn.Sequential](
            PyroModule[nn.Linear](pixels + hidden, hidden), ELU(), PyroModule[nn.Linear](hidden, 1)
        )

    def on_model(self, model: Any, **changes: Any) -> Self:
        """Return the guide for another form of the model, with shared parameters.

        Raises:
            ValueError: the model has another canvas.
        """
        if model.image_shape != self.model.image_shape:
            raise ValueError(
                f"model has images of {model.image_shape}, not of {self.model.image_shape} as this "
                "guide's LSTM; train this guide on that canvas, or use Peeling"
            )
        return super().on_model(model, **changes)

    @pyro_method
    def draw_proposals(self, images: Tensor) -> SceneProposals:
        """Sample proposals of an object for every slot of images (B, C, H, W)."""
        ground = self.backdrop(images)
        left = self.measure_residual(images, ground.drawn)
        about = images.new_zeros(len(images), self.model.pose_size)
        last, state = images.new_zeros(len(images), self.last), None
        whole, plate = self.whole(images).flatten(1), self.plate(images)
        proposals: list[Proposal] = []
        states = []
        for slot in range(self.model.slots):
            state = self.cell(torch.cat([whole, last], -1), state)
            states.append(state[0])
            look = left, about, self.where(state[0])
            proposals.append(self.propose(slot, self.read, plate, images, *look))
            last = torch.cat(drawn_values(proposals[-1].guide_trace), -1).to(images)
        return SceneProposals(proposals, ground, torch.stack(states, 1))

    @pyro_method
    def presence_distribution(
        self, images: Tensor, scene_proposals: SceneProposals
    ) -> SubsetDistribution:
        """Return q(z | u) over prefixes: the first n slots are on."""
        states, slots = scene_proposals.states, len(scene_proposals.proposals)
        if states is None:
            raise ValueError("scene_proposals must hold states; use this guide's draw_proposals")
        log_q = prefix_log_probs(self.stay(states)[..., 0])
        rows = images.new_ones(slots + 1, slots).tril(-1)
        weight = self.log_weights(images, scene_proposals, rows)
        features = torch.cat([self.whole(images).flatten(1), states.mean(1)], -1).detach()
        baseline = weight[:, 0].detach() + _UNIT * self.expected(features)[:, 0]
        return SubsetDistribution(weight, rows, self.model.inner, log_q, baseline)
