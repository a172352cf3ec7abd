"""The objective of stacked capsule autoencoders: two likelihoods, five regularizers, switches.

    loss = - w image:  log p(image | parts)
           - w parts:  sum_m d_m log sum_k p(parent k) N(x_m | v_km, lambda_km)
           + w prior_within:       mean_b (sum_k a_bk - present)^2
           + w prior_between:      mean_k (sum_b a_bk - B / classes)^2
           + w posterior_within:   mean_b entropy_k of the fraction of parts that object k explains
           - w posterior_between:  entropy_k of the same fraction, summed over the batch
           + w deformation:        sum of squares of the dynamic relations / 2

a_bk is the presence of object k in image b, times the presence of its surest vote. All terms
are means over the images of the batch, except the terms between images. A weight of 0 switches a
term off.

>>> objective = StackedCapsuleObjective(posterior_within=0)         # an ablation
>>> objective.terms(model, guide, images)                           # each term, without its weight

References:
    Kosiorek, Sabour, Teh & Hinton 2019 (arXiv 1906.06818), sections 2.1 to 2.4. The weights are
    taken from the authors' program for MNIST. There the weights of the mixture over parents are not
    normalized, in the paper they are; `normalized` chooses.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from pyro.poutine import Trace
from torch import Tensor

from capsule_zoo.inference.objectives.base import Objective
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.parts.object_votes import FeaturedCapsules, ObjectVotes, log_parents
from capsule_zoo.models.parts.parent_selection import as_presence
from capsule_zoo.models.stacked_capsule_autoencoder import StackedCapsuleAutoencoder

if TYPE_CHECKING:
    from capsule_zoo.inference.training.settings import Check

SPARSITY = ("prior_within", "prior_between", "posterior_within", "posterior_between")
TERMS = ("image", "parts", *SPARSITY, "deformation")


class StackedCapsuleObjective(Objective):
    """The paper's loss, described at the top of this file, with a weight for each term.

    It is not a bound on log p(image). Use it with a `StackedCapsuleAutoencoder` and any guide to
    it. The switches of inputs and noise need a `StackedCapsuleGuide`, and other guides keep theirs.

    Args:
        image: weight of the likelihood of pixels.
        parts: weight of the likelihood of part poses.
        prior_within: weight of the penalty on presences of an image whose sum is not `present`.
        prior_between: weight of the penalty on objects present in more, or fewer, images of a batch
            than a class has.
        posterior_within: weight of the entropy of the fractions of an image's parts that the
            objects explain.
        posterior_between: weight of the negated entropy, over a batch, of the fractions of parts
            that the objects explain.
        deformation: weight of the penalty on dynamic relations.
        present: objects that are present in an image; by default objects / classes of the model.
        stop_inputs: whether the encoder of objects sees parts without their gradients.
        stop_targets: whether the likelihood of part poses leaves the parts as they are.
        noise: width of the uniform noise on the logits of presences, or "concrete" or "none".
        normalized: whether the weights of a part's parents sum to one.

    Raises:
        ValueError: a weight below 0, `present` or a width not positive, or an unknown noise.
    """

    def __init__(
        self,
        *,
        image: float = 1.0,
        parts: float = 1.0,
        prior_within: float = 2.0,
        prior_between: float = 0.35,
        posterior_within: float = 0.7,
        posterior_between: float = 0.2,
        deformation: float = 10.0,
        present: float | None = None,
        stop_inputs: bool = True,
        stop_targets: bool = True,
        noise: float | str = 4.0,
        normalized: bool = False,
    ) -> None:
        super().__init__()
        weights = {
            "image": image,
            "parts": parts,
            "prior_within": prior_within,
            "prior_between": prior_between,
            "posterior_within": posterior_within,
            "posterior_between": posterior_between,
            "deformation": deformation,
        }
        check_at_least(0, **weights)
        if present is not None:
            check_positive(present=present)
        if isinstance(noise, str):
            check_one_of("noise", noise, ("concrete", "none"))
        else:
            check_positive(noise=noise)
        self.weights = weights
        self.present = present
        self.stop_inputs = stop_inputs
        self.stop_targets = stop_targets
        self.noise = noise
        self.normalized = normalized

    @property
    def width(self) -> float:
        """The width of the uniform noise on presence logits, 0 without noise."""
        return 0.0 if isinstance(self.noise, str) else self.noise

    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the weighted sum of all terms of the loss."""
        losses = self.terms(model, guide, *args, **kwargs)
        return torch.stack([self.weights[name] * term for name, term in losses.items()]).sum()

    def terms(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Compute every term of the loss, without its weight, as a scalar to minimize, by name.

        Of a model in the scope "parts" or "objects" they are the terms of that level.

        Raises:
            ValueError: the model is not a `StackedCapsuleAutoencoder`.
        """
        if not isinstance(model, StackedCapsuleAutoencoder):
            raise ValueError(
                "model must be a StackedCapsuleAutoencoder for StackedCapsuleObjective, not "
                f"{type(model).__name__}; for other models use Trace_ELBO"
            )
        if hasattr(guide, "with_switches"):
            kind = ("uniform", self.noise) if self.width else (self.noise,)
            guide = guide.with_switches(self.stop_inputs, *kind)
        drawn = poutine.trace(guide).get_trace(*args, **kwargs)
        trace = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*args, **kwargs)
        losses = {}
        if model.scope != "objects":
            trace.compute_log_prob(site_filter=lambda name, site: name == "image")
            log_image = trace.nodes["image"]["log_prob"]
            losses["image"] = -log_image.sum() / len(log_image)
        if model.scope == "parts":
            return losses
        objects, parts = (drawn_capsules(trace, level.name) for level in model.levels)
        votes = model.votes(objects, self.width if model.relaxed else 0.0)
        return {**losses, **self._object_terms(model, votes, parts)}

    def _object_terms(
        self, model: StackedCapsuleAutoencoder, votes: ObjectVotes, parts: FeaturedCapsules
    ) -> dict[str, Tensor]:
        """Compute the terms of the loss that involve the objects."""
        part_presence, pose = as_presence(parts.presence, model.relaxed), parts.pose
        if self.stop_targets:
            part_presence, pose = part_presence.detach(), pose.detach()
        log_joint = log_parents(votes, pose, *model.dummy, self.normalized)
        log_parts = (part_presence * log_joint.logsumexp(-1)).sum(-1)  # (B,)
        explained = log_joint.softmax(-1)[..., 1:].mean(-2)  # (B, objects), fraction of all parts
        presence = votes.log_presence.exp().amax(-2)  # (B, objects)
        present = self.present or model.levels[0].size / model.classes
        prior_within, prior_between = squared_sparsity(presence, present, model.classes)
        posterior_within, posterior_between = entropy_sparsity(explained)
        batch = len(log_parts)
        return {
            "parts": -log_parts.sum() / batch,
            "prior_within": prior_within,
            "prior_between": prior_between,
            "posterior_within": posterior_within,
            "posterior_between": -posterior_between,
            "deformation": votes.dynamic.square().sum() / (2 * batch),
        }


class TermHistory:
    """A callback for `fit` that records the objective's terms on some images at every check.

    >>> history = TermHistory(objective, images)
    >>> fit(model, guide, data, objective=objective, checks=Checks(callbacks=[history]))
    >>> history.rows                                 # dicts with "step" and one number for a term

    Args:
        objective: the objective.
        images: (B, C, H, W).
    """

    def __init__(self, objective: StackedCapsuleObjective, images: Tensor) -> None:
        self.objective = objective
        self.images = images
        self.rows: list[dict[str, float]] = []

    def __call__(self, check: "Check") -> None:
        with torch.no_grad(), torch.random.fork_rng():
            losses = self.objective.terms(check.model, check.guide, self.images)
        numbers = {name: term.item() for name, term in losses.items()}
        self.rows.append({"step": float(check.step), **numbers})


def drawn_capsules(trace: Trace, level: str) -> FeaturedCapsules:
    """Return the sampled capsules of one level from a trace."""
    quantities = ("presence", "pose", "feature")
    return FeaturedCapsules(
        *(trace.nodes[f"{level}_{quantity}"]["value"] for quantity in quantities)
    )


def squared_sparsity(presence: Tensor, present: float, classes: int) -> tuple[Tensor, Tensor]:
    """Return the prior sparsity losses of presences (B, objects), within and between images.

    Args:
        present: objects that should be present in each image.
        classes: an object should be present in one of this many images.
    """
    within = (presence.sum(1) - present).square().mean()
    between = (presence.sum(0) - len(presence) / classes).square().mean()
    return within, between


def entropy_sparsity(explained: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean entropy over objects within an image, and the entropy between images.

    Args:
        explained: fraction of an image that each object explains, (B, objects), not negative.
    """
    within = entropy(explained / explained.sum(1, keepdim=True).clamp_min(1e-8)).mean()
    total = explained.sum(0)
    return within, entropy(total / total.sum().clamp_min(1e-8))


def entropy(probability: Tensor) -> Tensor:
    """Return the entropy in nats over the last dim; a probability of zero adds nothing."""
    tiny = torch.finfo(probability.dtype).tiny
    return -(probability * probability.clamp_min(tiny).log()).sum(-1)
