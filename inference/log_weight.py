"""Per-image log weights log p(x, z) - log q(z | x), the raw result of every evaluation.

A batch contains each image several times. Any model and guide that work on a batch can therefore
draw many particles in one pass, without particle plates of their own.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyro import poutine
from pyro.distributions import Categorical
from pyro.infer import infer_discrete
from pyro.poutine import Trace
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from capsule_zoo.models.common.sharing import sharing
from capsule_zoo.models.common.trace_density import log_density as log_density
from capsule_zoo.models.common.trace_density import scored_sites


def log_weights(
    model: Callable, guide: Callable, images: Tensor, labels: Tensor | None = None
) -> tuple[Tensor, Trace, Trace]:
    """Sample the guide once for each image of the batch, and return the log weights.

    Sites that the model enumerates are summed out exactly, image by image.

    Args:
        model, guide: the pair; a plain program may stand next to a guide that was made for it.
        images: (B, C, H, W); of a plain program its data.

    Returns:
        Log weights (B,) in nats, the model's trace and the guide's trace. The model's trace comes
        from a plain run: its enumerated sites, if any, are drawn from the prior.

    Raises:
        ValueError: a site lies outside the plate "images", and there are several.
    """
    from capsule_zoo.inference.examination.pairs import replace_program  # which imports this module

    model, images = replace_program(model, guide, images)
    arguments = call_arguments(images, labels)
    with sharing():
        guide_trace = poutine.trace(guide).get_trace(*arguments)
        plain = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*arguments)
    scored = plain
    if enumerated_sites(plain) - guide_trace.nodes.keys():
        first = -1 - max(plate_nesting(plain), plate_nesting(guide_trace))
        enumerated = poutine.replay(EnumMessenger(first)(model), trace=guide_trace)
        scored = poutine.trace(enumerated).get_trace(*arguments)
    log_weight = log_density(scored, images) - log_density(guide_trace, images)
    return log_weight, prune_subsample_sites(plain), prune_subsample_sites(guide_trace)


def with_summed_drawn(model: Callable, values: Mapping[str, Tensor], images: Tensor) -> Trace:
    """Trace the model at given latents; summed-out latents are sampled from their posterior.

    Args:
        values: (B, ...) by site, of all latent sites that the model does not enumerate.
        images: (B, C, H, W).
    """
    tracer = poutine.trace(poutine.condition(model, values))
    trace = tracer.get_trace(images)
    if enumerated_sites(trace):
        infer_discrete(_Numbered()(tracer), first_available_dim=-1 - plate_nesting(trace))(images)
    return tracer.trace


class _Numbered(Messenger):
    """The messenger by which enumerated vectors are sampled by index, as infer_discrete needs.

    It drops dims of size 1, such as the dim of a single image, which are restored.
    """

    def _pyro_sample(self, msg: Any) -> None:
        distribution = msg["fn"]
        if (
            msg["infer"].get("enumerate") == "parallel"
            and distribution.event_dim
            and not msg["is_observed"]
        ):
            vectors = distribution.enumerate_support(expand=False)
            msg["fn"] = Categorical(logits=distribution.log_prob(vectors).movedim(0, -1))
            msg["infer"]["vectors"] = (
                distribution,
                vectors.reshape(len(vectors), *distribution.event_shape),
            )

    def _pyro_post_sample(self, msg: Any) -> None:
        if (held := msg["infer"].get("vectors")) is not None:
            distribution, vectors = held
            number, plates, msg["fn"] = msg["value"], msg["fn"].batch_shape, distribution
            msg["value"] = vectors[number if number.dim() >= len(plates) else number.expand(plates)]


def only(trace: Trace, sites: Iterable[str]) -> Trace:
    """Return a trace of only these sites."""
    subtrace = Trace()
    for name in sites:
        subtrace.add_node(name, **trace.nodes[name])
    return subtrace


def not_a_number(values: Tensor) -> Tensor:
    """Return a mask of log densities or log weights that are NaN or plus infinity."""
    return ~(values < math.inf)


def site_not_finite(
    images: Tensor, model_trace: Trace, guide_trace: Trace, rows: Tensor
) -> str | None:
    """Return the first site, guide before model, whose log density is not finite in some row.

    In the model it may be minus infinity; where a guide draws, it may not.

    Args:
        images: (B, C, H, W), on which both were run.
        rows: mask of the rows that count, (B,).
    """
    for trace, is_wrong in (guide_trace, _is_infinite), (model_trace, not_a_number):
        for name in scored_sites(trace):
            if is_wrong(log_density(only(trace, [name]), images))[rows].any():
                return name
    return None


def _is_infinite(values: Tensor) -> Tensor:
    return ~values.isfinite()


def call_arguments(images: Tensor, labels: Tensor | None) -> tuple[Tensor, ...]:
    """Return the positional arguments of one call, which include labels only if there are any."""
    return (images,) if labels is None else (images, labels)


def plate_nesting(trace: Trace) -> int:
    """Return the number of dims that the plates of a trace take up."""
    frames = [f for site in trace.nodes.values() for f in site.get("cond_indep_stack", ())]
    return max((-frame.dim for frame in frames if frame.vectorized), default=0)


def enumerated_sites(trace: Trace) -> set[str]:
    """Return the names of the latent sites that the traced model sums out in parallel."""
    return {
        name
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
        and not site["is_observed"]
        and site["infer"].get("enumerate") == "parallel"
    }
