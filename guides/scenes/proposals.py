"""Proposals for the slots of a scene, and the exact distribution of which of them are present.

A guide to scenes draws a proposal u_s for every slot s, with weight v_s = p(u_s) / q(u_s | ...).
Given all proposals the presences z have a distribution in closed form,

    log w_z  = log p(image | z, u) + log p(z) + sum_s z_s log v_s
    q(z | u) = w_z / sum_z' w_z'

A slot that is off is drawn from the prior instead. Then the importance weight of a draw is
sum_z w_z whatever z is drawn, and its mean is p(image): the proposals that are not used cancel. So
-log sum_z w_z is the loss, its mean is a bound, and no gradient of a discrete draw is needed.
With the divergences KL(q || p) in place of -log v_s, which have less noise, the sum is no bound any
more: a test holds a case in which its mean exceeds log p.
"""

import copy
import math
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import pyro_method
from pyro.poutine import Trace
from pyro.poutine.runtime import get_plates
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.progress import track
from capsule_zoo.guides.base import Guide
from capsule_zoo.models.common.chunks import map_in_chunks
from capsule_zoo.models.common.missing_pixels import fill_missing
from capsule_zoo.models.common.spaces import tile_batch
from capsule_zoo.models.common.trace_density import (
    latent_sites,
    log_score,
    plain_log_density,
    scored_sites,
)
from capsule_zoo.models.scenes import Scenes
from capsule_zoo.models.scenes.counts import CountDistribution, prefixes_of, subsets_of
from capsule_zoo.models.scenes.pictures import AsObject, Pictures, together

MOST_SUBSETS = 64  # largest number of subsets of slots over which the sum is exact
AT_ONCE = 256  # subsets that are painted at once, if there are more
MOST_TRAINED = 32  # MOST_SUBSETS during training, where a subset costs three times as much


class PrivateTrace(TraceMessenger):
    """A trace that hides its sites from outer handlers; parameters pass through unrecorded."""

    def _pyro_sample(self, msg: Any) -> None:
        msg["stop"] = True

    def _pyro_post_param(self, msg: Any) -> None:
        pass


class Proposal(NamedTuple):
    """The proposal for a slot: an object of each scene, and its sites; or the ground.

    Attributes:
        guide_trace: its sites in the guide, with names without a slot.
        drawn: the object; the picture of the ground.
        placed: its picture where it stands.
        log_ratio: log p / q, (B,), in nats.
    """

    guide_trace: Trace
    drawn: Any
    placed: Any
    log_ratio: Tensor

    @property
    def sites(self) -> dict[str, dict]:
        """The sampled sites of the guide by name."""
        return latent_sites(self.guide_trace)

    @property
    def values(self) -> dict[str, Tensor]:
        """The sampled values of the sites by name."""
        return {name: site["value"] for name, site in self.sites.items()}

    @property
    def score(self) -> Tensor:
        """The log density of the sites that are not reparametrized, (B,)."""
        return log_score(self.guide_trace, self.log_ratio)


@dataclass(frozen=True, eq=False)
class SceneProposals:
    """Proposals for all slots of a batch of scenes.

    Attributes:
        proposals: one for each slot.
        ground: the proposal for the ground.
        states: what sampled presences depend on, (B, S, hidden); None if they are summed out.
    """

    proposals: list[Proposal]
    ground: Proposal
    states: Tensor | None = None

    @cached_property
    def pictures(self) -> Pictures:
        """The pictures of all slots' objects."""
        return together([proposal.placed for proposal in self.proposals])

    @cached_property
    def log_ratio(self) -> Tensor:
        """The log ratio log p(u_s) / q(u_s | ...) of every slot, (B, S), in nats."""
        return torch.stack([proposal.log_ratio for proposal in self.proposals], -1)

    @property
    def score(self) -> Tensor:
        """The log density of the sites that are not reparametrized, (B,)."""
        return sum((p.score for p in self.proposals), self.ground.score)


class SlotDistribution(dist.TorchDistribution):
    """The distribution of a slot's site: the proposal if the slot is on, otherwise the prior.

    Its sample was drawn before: the proposal, or a sample of the prior.

    Args:
        on: (B,).
        proposal, prior: the site in the traces of the guide and of the model.
    """

    arg_constraints: dict = {}

    def __init__(self, on: Tensor, proposal: dict, prior: dict) -> None:
        self.proposal, self.prior = proposal["fn"], prior["fn"]
        shape = torch.broadcast_shapes(self.proposal.batch_shape, self.prior.batch_shape)
        self.on = on.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)
        self.has_rsample = self.proposal.has_rsample
        self.has_enumerate_support = self.prior.has_enumerate_support
        super().__init__(shape, self.prior.event_shape, validate_args=False)
        here = self.on.reshape(*shape, *(1,) * self.event_dim)
        self.value = torch.where(here, proposal["value"], prior["value"])

    @property
    def support(self) -> Any:
        return self.prior.support

    def expand(self, batch_shape: Any, _instance: Any = None) -> "SlotDistribution":
        return self

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self.value.reshape(self.batch_shape + self.event_shape)

    sample = rsample

    def log_prob(self, value: Tensor) -> Tensor:
        flat = value.reshape(self.value.shape)
        log_density = torch.where(self.on, self.proposal.log_prob(flat), self.prior.log_prob(flat))
        return log_density.reshape(self.batch_shape)


class SubsetDistribution(dist.TorchDistribution):
    """The distribution q(z | u) over rows of presences, by default w_z / sum_z' w_z'.

    A draw of the default distribution has no gradient and needs none: the log weight is the same
    for all of them, so that the score, whose mean is zero, has a constant factor. `has_rsample`
    tells Pyro to leave it out. A draw of another distribution has the gradient of its score, less a
    baseline.

    Args:
        log_weight: log w_z, (B, M), in nats; -inf for rows that do not count.
        rows: presences, (M, S) or (B, M, S).
        inner: sizes of the dims of the object model's plates.
        log_q: log q(z | u) of another distribution, (B, M).
        baseline: a prediction of log w_z - log q(z | u), (B,), in nats, by a separate network.

    Attributes:
        log_weight, log_q, baseline: as given.
        log_total: log sum_z w_z, (B,), in nats.
    """

    arg_constraints: dict = {}
    support = CountDistribution.support
    has_enumerate_support = True  # marks the distribution as discrete

    def __init__(
        self,
        log_weight: Tensor,
        rows: Tensor,
        inner: tuple[int, ...] = (),
        log_q: Tensor | None = None,
        baseline: Tensor | None = None,
    ) -> None:
        self.log_weight, self.log_total = log_weight, log_weight.logsumexp(-1)
        self.has_rsample = log_q is None
        self.log_q = log_weight - self.log_total[:, None] if log_q is None else log_q
        self.baseline = baseline
        self.rows = rows.expand(*log_weight.shape, rows.shape[-1])
        shape = torch.Size((*log_weight.shape[:-1], *inner))
        super().__init__(shape, rows.shape[-1:], validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "SubsetDistribution":
        return self

    @torch.no_grad()
    def draw_rows(self) -> Tensor:
        """Sample the index of a row for each scene, (B, 1)."""
        return torch.distributions.Categorical(logits=self.log_q).sample()[:, None]

    @torch.no_grad()
    def rsample(self, sample_shape: Any = ()) -> Tensor:
        presences = self.rows.take_along_dim(self.draw_rows()[..., None], 1)
        return presences.reshape(self.batch_shape + self.event_shape)

    sample = rsample

    def log_prob(self, value: Tensor) -> Tensor:
        same = (self.rows == value.reshape(len(self.rows), 1, -1)).all(-1)
        log_mass = torch.where(same, self.log_q, -math.inf).logsumexp(-1)
        return log_mass.reshape(self.batch_shape)

    @property
    def mean(self) -> Tensor:
        """The probability that a slot is on, (B, S)."""
        return (self.log_q.exp()[..., None] * self.rows).sum(-2)

    @property
    def log_weight_of_counts(self) -> Tensor:
        """The log of the summed weights for each number of objects, 0 to S, (B, S + 1), in nats."""
        number = torch.arange(self.rows.shape[-1] + 1, device=self.rows.device)
        same = self.rows.sum(-1, keepdim=True) == number
        return torch.where(same, self.log_weight[..., None], -math.inf).logsumexp(-2)


def fold_batch(distribution: SlotDistribution | SubsetDistribution, outer: torch.Size) -> Any:
    """Reshape a distribution of P copies of a batch, (P B, ...), to (*outer, B, ...).

    Args:
        outer: sizes of the plates outside the guide.
    """
    distribution, (number, *inner) = copy.copy(distribution), distribution.batch_shape
    distribution._batch_shape = torch.Size((*outer, number // outer.numel(), *inner))
    return distribution


class SceneGuide(Guide[Scenes]):
    """The base class of guides that propose an object per slot; subclasses write `draw_proposals`.

    Its density rests on the proposals, which are not sites: see `Guide.auxiliary`. In the form
    `with_enumerated_presences` they are.
    """

    auxiliary = True
    fill: Tensor | float | None = None

    def with_missing_pixels(self, fill: Tensor | float = 0.0) -> Self:
        """Return the guide for images with missing pixels (NaN), with shared parameters.

        Networks see `fill` there. It is not scored, nor unexplained, so that no slot looks there.
        """
        return self.sharing_parameters(_model=(self.model.with_missing_pixels(),), fill=fill)

    def whole(self, images: Tensor) -> Tensor:
        """Replace missing pixels of images by `fill`."""
        return images if self.fill is None else fill_missing(images, self.fill)

    def with_enumerated_presences(self) -> Self:
        """Return the guide, with shared parameters, whose sites are the proposals of all slots.

        It is for the model's `with_enumerated_presences`. Its density is known at given latents, so
        that general guides can start there. Its bound is looser: slots that are off are drawn from
        their proposals too, and not from the prior.
        """
        model = self.model.with_enumerated_presences()
        return self.sharing_parameters(_model=(model,), auxiliary=False)

    def with_objects(self, number: int) -> Self:
        """Return the guide for `model.with_objects`, with shared parameters."""
        model = self.model.with_objects(number)
        return self.sharing_parameters(_model=(model,), auxiliary=False)

    def draw_proposals(self, images: Tensor) -> SceneProposals:
        """Sample proposals of an object for every slot of images (B, C, H, W)."""
        raise NotImplementedError(f"{type(self).__name__} must define draw_proposals")

    def plate(self, images: Tensor) -> pyro.plate:
        """Return the plate of a batch for `propose`, hidden from outer handlers."""
        with PrivateTrace():
            return self.model.plate(len(images))

    def propose(
        self, slot: int | None, read: Any, plate: pyro.plate, images: Tensor, *arguments: Tensor
    ) -> Proposal:
        """Return the proposal for a slot (or the ground) that the function `read` samples.

        Args:
            slot: None for the ground.
            read: called as `read(images, *arguments, plate)`, it draws the sites of one object of
                each scene, or of the ground, with names without a slot.
            plate: see `plate`.
        """
        model, name = self.model, "ground" if slot is None else f"slot_{slot}"
        draw = model.draw_ground if slot is None else model.draw_object
        named = AsObject("" if self.auxiliary else name)
        with nullcontext() if self.auxiliary else named:
            recorded = PrivateTrace() if self.auxiliary else poutine.trace()
            guide_trace = recorded(read).get_trace(images, *arguments, plate)
        replayed = poutine.replay(named(draw), trace=guide_trace)
        model_trace = PrivateTrace()(replayed).get_trace(plate)
        drawn = model_trace.nodes["_RETURN"]["value"]
        placed = drawn if slot is None else model.place_object(drawn)
        log_p, log_q = (
            plain_log_density(scored_sites(trace), images) for trace in (model_trace, guide_trace)
        )
        return Proposal(guide_trace, drawn, placed, log_p - log_q)

    @pyro_method
    def presence_distribution(
        self, images: Tensor, scene_proposals: SceneProposals
    ) -> SubsetDistribution:
        """Return q(z | u) over all rows of presences or, if they are many, over a subset.

        The subset of training holds the first n slots for every n, also without one of these slots.
        Otherwise it holds all presences on the way to the best ones. Each is a guide.
        """
        slots, trained = len(scene_proposals.proposals), self.training and torch.is_grad_enabled()
        if trained or 2**slots <= MOST_SUBSETS:
            all_fit = 2**slots <= (MOST_TRAINED if trained else MOST_SUBSETS)
            rows = (subsets_of if all_fit else prefixes_of)(slots, images)
            return SubsetDistribution(
                self.log_weights(images, scene_proposals, rows), rows, self.model.inner
            )
        rows = self._climb(images, scene_proposals)
        parts = track(rows.split(AT_ONCE, 1), "weighing objects", "parts")
        weight = torch.cat([self.log_weights(images, scene_proposals, part) for part in parts], 1)
        powers = 3 ** torch.arange(slots, device=rows.device)  # 2^s is 0 from slot 64 on
        code = (rows.long() * powers).sum(-1)
        code, order = code.sort(dim=1, stable=True)
        same = F.pad(code.diff() == 0, (1, 0))
        again = same.gather(1, order.argsort(1))  # each row counts once
        return SubsetDistribution(weight.masked_fill(again, -math.inf), rows, self.model.inner)

    def log_weights(self, images: Tensor, scene_proposals: SceneProposals, rows: Tensor) -> Tensor:
        """Compute the log weights log w_z, (B, M), of presences (M, S) or (B, M, S), in nats."""
        model, ground = self.model, scene_proposals.ground.drawn
        presences = rows.expand(len(images), *rows.shape[-2:])

        def likelihood(
            batch: Tensor, presences: Tensor, ground: Tensor, *pictures: Tensor
        ) -> tuple:
            means = model.blend(presences, Pictures(*pictures), ground)
            return (model.log_likelihood(batch, means),)

        grounds = ground.expand(len(images), *ground.shape[-3:])
        pictures = [x for x in scene_proposals.pictures if x is not None]
        numbers = rows.shape[-2] * images[0].numel()
        (log_image,) = map_in_chunks(
            likelihood, (images, presences, grounds, *pictures), (), numbers
        )
        prior = model.presence_distribution(images).log_prob(presences)
        used = (presences * scene_proposals.log_ratio[:, None]).sum(-1)
        return log_image + prior + used + scene_proposals.ground.log_ratio[:, None]

    @torch.no_grad()
    def _climb(self, images: Tensor, scene_proposals: SceneProposals) -> Tensor:
        """Return the presences that a greedy search by flips of one or two visits, (B, M, S)."""
        slots = len(scene_proposals.proposals)
        flips = subsets_of(slots, images, most=2)  # the first row flips none
        now = images.new_zeros(len(images), 1, slots)
        visited = [now]
        for _ in track(range(2 * slots), "choosing objects", "rounds at most"):
            near = (now - flips).abs()
            best = self.log_weights(images, scene_proposals, near).argmax(1)
            visited.append(near[:, 1:])
            now, before = near.take_along_dim(best[:, None, None], 1), now
            if torch.equal(now, before):
                break
        return torch.cat(visited, 1)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | None:
        """Sample all sites and return the presences, (*batch, B, S), if they are not enumerated."""
        if not self.auxiliary:
            self.draw_proposals(images)
            return None
        model, plate = self.model, self.model.plate(len(images))
        dim = model.plate_dims["images"]
        sizes = {frame.dim - dim: frame.size for frame in get_plates() if frame.dim is not None}
        outer = torch.Size(sizes.get(place, 1) for place in range(min([0, *sizes]), 0))
        copies = tile_batch(images, outer.numel())
        scene_proposals = self.draw_proposals(copies)
        presences = self.presence_distribution(copies, scene_proposals)
        distribution, infer_options = fold_batch(presences, outer), {}
        if presences.baseline is not None:
            infer_options["baseline"] = {
                "baseline_value": presences.baseline.reshape(distribution.batch_shape)
            }
        with plate:
            drawn = pyro.sample("scene_presence", distribution, infer=infer_options)
        presence = drawn.reshape(len(copies), -1)
        always = torch.ones_like(presence[:, 0]) > 0
        self._draw(
            "ground", scene_proposals.ground, scene_proposals.ground.sites, always, outer, plate
        )
        for slot, proposal in enumerate(scene_proposals.proposals):
            with poutine.block(hide_types=["sample"]):
                prior = poutine.trace(AsObject()(self.model.draw_object))
                sites = latent_sites(prior.get_trace(self.model.plate(len(copies))))
            self._draw(f"slot_{slot}", proposal, sites, presence[:, slot] > 0, outer, plate)
        return model.without_inner(drawn, 1)

    def _draw(
        self,
        name: str,
        proposal: Proposal,
        prior: dict[str, dict],
        on: Tensor,
        outer: torch.Size,
        plate: pyro.plate,
    ) -> None:
        """Sample the sites of an object: the proposal where `on` (B,) is True, else the prior."""
        plates = {"images": plate}
        for site_name, site in proposal.sites.items():
            distribution = fold_batch(SlotDistribution(on, site, prior[site_name]), outer)
            with AsObject(name), ExitStack() as scope:
                for frame in sorted(site["cond_indep_stack"], key=lambda frame: frame.dim):
                    if frame.name not in plates:
                        plates[frame.name] = pyro.plate(frame.name, frame.size, dim=frame.dim)
                    scope.enter_context(plates[frame.name])
                pyro.sample(site_name, distribution)
