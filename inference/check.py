"""Check that a guide fits a model, and list all problems by site before training starts.

Pyro only warns when a guide forgets a site, and silently trains the rest. The zoo runs model and
guide once and refuses the pair with everything that is wrong with it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

import capsule_zoo.guides as guides
from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides import Guide
from capsule_zoo.guides.per_image.site_distributions import base_distribution
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import call_arguments, enumerated_sites
from capsule_zoo.inference.not_finite import NonFiniteGuide, non_finite
from capsule_zoo.inference.other_model import warn_of_another_model
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import told_apart
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.common.site_values import observed_names
from capsule_zoo.models.common.spaces import space_of
from capsule_zoo.models.common.trace_density import is_masked, scored_sites
from capsule_zoo.models.common.trace_density import latent_sites as latent_sites


class IncompatibleGuide(ValueError):
    """The error raised when a guide does not fit its model.

    Attributes:
        problems: every problem found, one line each.
    """

    problems: list[str]

    @classmethod
    def of(
        cls, model: Callable, guide: Callable, problems: list[str], suggest: bool = True
    ) -> "IncompatibleGuide":
        """Return the error of a pair, in a form that can be pickled."""
        head = f"{name_of(guide)} does not fit {name_of(model)}:"
        one = len(problems) == 1
        lines = [f"{head} {problems[0]}"] if one else [head, *(f"  - {p}" for p in problems)]
        if suggest and (fitting := guides_made_for(model)):
            lines.append(f"Guides made for this model: {', '.join(fitting)}.")
        error = cls("\n".join(lines))
        error.problems = problems
        return error


def guides_made_for(model: Callable) -> list[str]:
    """Return the names of the zoo's guides whose `model_class` covers this model.

    Guides to any model, such as `FreeForm`, are not among them.
    """
    kinds = [kind for kind in vars(guides).values() if isinstance(kind, type)]
    return sorted(
        kind.__name__
        for kind in kinds
        if issubclass(kind, Guide)
        and kind.model_class not in (nn.Module, Model)
        and isinstance(model, kind.model_class)
    )


@accept_arrays("images", "labels", like="model")
def check_pair(
    model: Callable, guide: Callable, images: Tensor, labels: Tensor | None = None
) -> None:
    """Run guide and model once and raise IncompatibleGuide unless the guide fits.

    A guide fits when it draws every latent site of the model except the enumerated ones, and draws
    or observes no other site (unless marked `infer={"is_auxiliary": True}`). At each site the
    shape, the event rank and whether values are discrete must agree, and a plate must hold every
    batch. Zoo guides and Pyro's AutoGuides are checked in the same way, in evaluation mode: the
    random state and running statistics are left as they were.

    Args:
        model, guide: the pair; a plain program may stand next to a guide that was made for it.
        images: (B, C, H, W), a small batch is enough; of a plain program its data.
        labels: (B,), passed to both unless None.

    Raises:
        IncompatibleGuide: lists all problems by site.
    """
    from capsule_zoo.inference.examination.pairs import replace_program  # which imports this module

    model, images = replace_program(model, guide, images)
    with isolated_parameters(model, guide), eval_mode(model, guide):
        refuse_misfit(model, guide, images, labels)


def refuse_misfit(
    model: Callable, guide: Callable, images: Tensor, labels: Tensor | None = None
) -> None:
    """Raise IncompatibleGuide unless the guide fits, using the current parameter store."""
    arguments = call_arguments(images, labels)
    refuse_non_finite_parameters(*(part for part in (model, guide) if isinstance(part, nn.Module)))
    warn_of_another_model(model, guide, images, labels)
    program = getattr(model, "function", model)  # the function of a FunctionModule
    if (site := space_of(program).site) in observed_names(program):
        raise IncompatibleGuide.of(
            model,
            guide,
            [
                f"site {site!r} is observed by name, but the guide infers the latents of what is "
                "passed; pass the observations, and the model without pyro.condition"
            ],
            suggest=False,
        )
    with poutine.block(), torch.random.fork_rng(), torch.no_grad():
        with shorten_errors(model):
            model_trace = _trace(model, arguments)
        try:
            guide_trace = _trace(guide, arguments)
        except Exception as error:
            message = _non_finite(model, guide, images, labels) or one_line(error)
            reason = f"the guide cannot run on these images: {message}"
            raise IncompatibleGuide.of(model, guide, [reason]) from error
        problems = _disagreements(model_trace, guide_trace)
        problems = problems or _hidden_observations(model, model_trace)
        if not problems and (problems := _failure_together(model, guide_trace, arguments)):
            message = _non_finite(model, guide, images, labels)
            problems = [message] if message else problems
    if problems:
        raise IncompatibleGuide.of(model, guide, problems)


def _trace(program: Callable, arguments: tuple) -> Trace:
    return prune_subsample_sites(poutine.trace(program).get_trace(*arguments))


def _disagreements(model_trace: Trace, guide_trace: Trace) -> list[str]:
    enumerated = enumerated_sites(model_trace)
    wanted, drawn = latent_sites(model_trace), latent_sites(guide_trace)
    auxiliary = {n for n, site in drawn.items() if site["infer"].get("is_auxiliary")}
    problems = [
        f"site {name!r} is observed in the guide, which only draws latents; leave it out of the "
        "guide (are model and guide swapped?)"
        for name, site in guide_trace.nodes.items()
        if site["type"] == "sample"
        and site["is_observed"]
        and not site["infer"].get("is_auxiliary")  # sites of `pyro.factor` are auxiliary
    ]
    problems += [
        f"site {name!r} is missing in the guide; the model draws it, without obs=, "
        f"with shape {_shape(site)}"
        for name, site in wanted.items()
        if name not in drawn and name not in enumerated
    ]
    problems += [
        f"site {name!r} is enumerated under a mask, which adds the logarithm of the number of its "
        "values to log p; mask observed sites alone"
        for name in enumerated
        if is_masked(model_trace.nodes[name])
    ]
    for name, site in drawn.items():
        if name in enumerated:
            problems.append(
                f"site {name!r} is enumerated by the model (summed out exactly); "
                "leave it out of the guide"
            )
        elif name in wanted:
            problems += _site_problems(name, wanted[name], site)
        elif name not in auxiliary:
            problems.append(
                f"site {name!r} is extra: the model draws no such latent site; leave it out "
                'or mark it infer={"is_auxiliary": True}'
            )
    return problems


def _hidden_observations(model: Callable, model_trace: Trace) -> list[str]:
    """Return the problem of a handler that hides a model's observed sites, or none.

    A bare model of the zoo may observe none: the objects of stacked capsules explain parts, which
    the guide reads.
    """
    if isinstance(model, Model) or any(
        site["is_observed"] for site in scored_sites(model_trace).values()
    ):
        return []
    return [
        "the model observes no site, so that the images have no density; give the bare model, "
        "not one in which poutine.block or poutine.uncondition hides them"
    ]


def _site_problems(name: str, model_site: dict, guide_site: dict) -> list[str]:
    problems = []
    sizes = zip_longest(_shape(model_site)[::-1], _shape(guide_site)[::-1], fillvalue=1)
    if any(model_size != guide_size for model_size, guide_size in sizes):
        problems.append(
            f"site {name!r} has shape {_shape(model_site)} in the model "
            f"but {_shape(guide_site)} in the guide"
        )
    ranks = model_site["fn"].event_dim, guide_site["fn"].event_dim
    if ranks[0] != ranks[1]:
        problems.append(
            f"site {name!r} has event rank {ranks[0]} in the model but {ranks[1]} in the guide; "
            f"use .to_event({ranks[0]}) in the guide"
        )
    scales = [torch.as_tensor(site["scale"]) for site in (model_site, guide_site)]
    comparable = not problems or scales[0].numel() == scales[1].numel() == 1
    if comparable and (scales[0] != scales[1]).any():
        ends = [torch.stack(s.aminmax()).unique().tolist() for s in scales]
        descriptions = [
            " to ".join(told_apart(x, *ends[0], *ends[1]) for x in numbers) for numbers in ends
        ]
        problems.append(
            f"site {name!r} is scaled by {descriptions[0]} in the model but by {descriptions[1]} "
            "in the guide; "
            "give the plates around it the same size in both, and the same poutine.scale"
        )
    problems += _plate_problems(name, model_site, guide_site)
    masks = [site["mask"] for site in (model_site, guide_site)]
    if any(mask is not None for mask in masks) and not _equal_masks(*masks):
        problems.append(
            f"site {name!r} is masked differently in model and guide; mask it by poutine.mask in "
            "both, or in neither"
        )
    kinds = is_discrete(model_site["fn"]), not draws_between(guide_site)
    if kinds[0] != kinds[1] and not (kinds[1] and is_delta(guide_site["fn"])):
        descriptions = ["discrete" if kind else "continuous" for kind in kinds]
        problems.append(
            f"site {name!r} is {descriptions[0]} in the model but {descriptions[1]} in the guide; "
            "use discretize() on both or on neither"
        )
    for where, site in ("model", model_site), ("guide", guide_site):
        shape, plates = site["fn"].batch_shape, {frame.dim for frame in site["cond_indep_stack"]}
        bare = {dim for dim in range(-len(shape), 0) if shape[dim] > 1} - plates
        if bare and not problems:
            problems.append(
                f"site {name!r} of batch shape {tuple(shape)} lies outside of a plate at dim "
                f"{max(bare)} in the {where}; draw it within pyro.plate(..., dim={max(bare)})"
            )
    return problems


def _plate_problems(name: str, model_site: dict, guide_site: dict) -> list[str]:
    """Return the problems of the names and dims of a site's plates in the guide."""
    plates, problems = _plates(model_site), []
    for plate, dim in _plates(guide_site).items() if plates else ():
        if plate not in plates:
            problems.append(
                f"site {name!r} lies in the plate {plate!r} in the guide, but in "
                f"{' and '.join(map(repr, plates))} in the model; give the plates of the guide "
                "the names that they have in the model"
            )
        elif plates[plate] != dim:
            problems.append(
                f"site {name!r} lies in the plate {plate!r} at dim {plates[plate]} in the model, "
                f"but at dim {dim} in the guide"
            )
    return problems


def _plates(site: dict) -> dict[str, int]:
    """Return the dim of each of a site's plates, by name."""
    return {frame.name: frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}


def _equal_masks(first: Tensor | bool | None, second: Tensor | bool | None) -> bool:
    """Return whether two masks hide the same values; None hides nothing."""
    masks = [torch.as_tensor(True if mask is None else mask) for mask in (first, second)]
    return bool((masks[0] == masks[1]).all())


def _failure_together(model: Callable, guide_trace: Trace, arguments: tuple) -> list[str]:
    """Return the error of running the model at the guide's sample, or an empty list."""
    try:
        trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*arguments)
        trace.compute_log_prob()
    except Exception as error:
        return [f"the model cannot run on the guide's draws: {one_line(error)}"]
    return []


def _non_finite(model: Callable, guide: Callable, images: Tensor, labels: Tensor | None) -> str:
    """Describe at which images and sites the pair is not finite; "" if it is finite."""
    try:
        rows, site = non_finite(model, guide, images, labels)
    except Exception:
        return ""
    return str(NonFiniteGuide.of("the log density", rows, len(images), site)) if rows else ""


def is_delta(fn: Any) -> bool:
    """Return True if a site's distribution is a point mass."""
    return isinstance(base_distribution(fn), Delta)


def is_discrete(fn: Any) -> bool:
    """Return True if a site's values are countable."""
    return bool(getattr(base_distribution(fn).support, "is_discrete", False))


def draws_between(site: dict) -> bool:
    """Return True if a site of a guide has values that are not whole numbers.

    A point mass is neither discrete nor continuous by itself, so its value decides.
    """
    if is_delta(site["fn"]):
        return bool((site["value"] != site["value"].round()).any())
    return not is_discrete(site["fn"])


def _shape(site: dict) -> tuple[int, ...]:
    return tuple(site["fn"].shape())


def refuse_non_finite_parameters(*modules: nn.Module) -> None:
    """Raise ValueError that names the first parameter or buffer that is not finite.

    A parameter may be minus infinity, as the logit of what is impossible, and a buffer infinite.
    """
    for module in modules:
        for name, parameter in module.named_parameters():
            if not bool((parameter < torch.inf).all()):  # False for NaN
                raise ValueError(_not_finite(module, name))
        for name, buffer in module.named_buffers():
            if bool(buffer.isnan().any()):
                raise ValueError(_not_finite(module, name))


def _not_finite(module: nn.Module, name: str) -> str:
    return (
        f"{name_of(module)} is ruined: its {name} holds values that are not finite, as after "
        "training at too high a learning rate; load an earlier checkpoint, or make it anew and "
        "train it with a lower lr or Pace(clip=...)"
    )


@contextmanager
def shorten_errors(model: Callable) -> Iterator[None]:
    """Re-raise a ValueError of Pyro that prints a tensor of bad values as one short line."""
    try:
        yield
    except ValueError as error:
        if "invalid values" not in str(error):
            raise
        raise ValueError(
            f"{name_of(model)} or its guide computes values that no distribution takes, as after "
            "training at too high a learning rate; load an earlier checkpoint, or train it anew "
            f"with a lower lr or Pace(clip=...): {one_line(error)}"
        ) from None


def one_line(error: Exception, longest: int = 300) -> str:
    """Return the message of an error without the contents of tensors, as one short line."""
    message = str(error).partition("Trace Shapes:")[0]
    message = re.sub(r":?\s*\btensor\(.*?\)(?=\s*$|\n[^\s\[])", "", message, flags=re.DOTALL)
    message = " ".join(message.split()) or type(error).__name__
    return message if len(message) <= longest else f"{message[: longest - 3]}..."


def name_of(program: Callable) -> str:
    """Return the name of a function, or of the class of a module, within effect handlers too."""
    program = poutine.unwrap(program)
    return getattr(program, "__name__", None) or type(program).__name__
