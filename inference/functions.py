"""Modules that own the parameters of plain functions with `pyro.param`."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import constraints, transform_to

from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference.check import latent_sites, name_of, shorten_errors
from capsule_zoo.inference.log_weight import call_arguments
from capsule_zoo.models.base import Model
from capsule_zoo.models.common.modes import eval_mode, evaluate_calls
from capsule_zoo.models.common.param_store import take_over

Taken = ParamSpec("Taken")
Result = TypeVar("Result")


class FunctionModule(nn.Module):
    """A torch module that wraps a Pyro function and owns its parameters; made by `as_module`.

    The parameters are in unconstrained space. They are the same tensor objects that Pyro's
    parameter store holds, so training the module trains the function.

    Attributes:
        function: the function, called as `function(images)` or `function(images, labels)`.
        unconstrained: parameters by name; each dot in a name is replaced by a slash.
    """

    def __init__(
        self,
        function: Callable,
        parameters: dict[str, nn.Parameter],
        supports: dict[str, constraints.Constraint],
    ) -> None:
        super().__init__()
        self.__name__ = name_of(function)
        self.function = function
        self.unconstrained = nn.ParameterDict({_key(n): p for n, p in parameters.items()})
        self._supports = supports

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        with _OwnParameters(self), nullcontext() if self.training else evaluate_calls():
            return self.function(*arguments, **keywords)

    def value(self, name: str) -> Tensor:
        """Return a parameter as the function sees it, within its constraint.

        Raises:
            ValueError: the function had no such parameter when the module was made.
        """
        if name not in self._supports:
            raise ValueError(
                f"pyro.param {name!r} of {self.__name__} is not among those of the first call, "
                f"which are {', '.join(map(repr, self._supports)) or 'none'}; name the same "
                "parameters in every call"
            )
        return transform_to(self._supports[name])(self.unconstrained[_key(name)])


class _OwnParameters(Messenger):
    """The messenger that sets every `pyro.param` to the module's value."""

    def __init__(self, module: FunctionModule) -> None:
        super().__init__()
        self.module = module

    def _pyro_param(self, msg: Any) -> None:
        msg["value"] = self.module.value(msg["name"])
        msg["done"] = True
        msg["stop"] = True


@accept_arrays("images", "labels")
def as_module(program: Callable, images: Tensor, labels: Tensor | None = None) -> nn.Module:
    """Convert a model or guide to a torch module that owns its parameters.

    A torch module is returned unchanged. A function is run once, which creates its parameters in
    Pyro's store unless they already exist. The module shares these parameters with the store, so
    the function uses the trained values afterwards. The random state is left as it was.

    >>> guide = as_module(guide_function, images[:2])
    >>> torch.optim.Adam(guide.parameters())

    Args:
        program: a torch module, or a function of images (and labels) with `pyro.param`.
        images: (B, C, H, W), the images that the function is run on.
        labels: (B,), passed on unless None.

    Raises:
        ValueError: the program is neither, or the function cannot run.
    """
    if isinstance(program, nn.Module):
        return program
    arguments = call_arguments(images, labels)
    try:
        with eval_mode(program), torch.random.fork_rng(), torch.no_grad(), poutine.block():
            trace = poutine.trace(program, param_only=True).get_trace(*arguments)
    except Exception as error:
        raise ValueError(f"{name_of(program)} cannot run on these images: {error}") from error
    names = [name for name, site in trace.nodes.items() if site["type"] == "param"]
    return FunctionModule(program, *_to_parameters(names))


def check_program(role: str, program: object) -> None:
    """Raise ValueError unless `program` can be a model or a guide."""
    if isinstance(program, nn.Module):
        return
    if isinstance(program, type):
        raise ValueError(
            f"{role} must be an instance, not the class {program.__name__}; make one by "
            f"{program.__name__}(...)"
        )
    if not callable(program):
        raise ValueError(
            f"{role} must be a torch.nn.Module or a function with pyro.param, not "
            f"{type(program).__name__}"
        )


def require_model(verb: Callable[Taken, Result]) -> Callable[Taken, Result]:
    """Decorate a function so that it refuses a model that is not a `Model` of the zoo.

    A plain program next to a guide that was made for it becomes `guide.model`, and its data rows.
    """
    verb_signature = signature(verb)
    form = f"{verb.__name__}({', '.join(list(verb_signature.parameters)[:3])})"

    @wraps(verb)
    def wrapper(*args: Taken.args, **kwargs: Taken.kwargs) -> Result:
        try:
            bound = verb_signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{error}; call {form}") from None
        replace_in(bound.arguments)
        check_declared(form, bound.arguments)
        model = bound.arguments["model"]
        take_over(model)
        with shorten_errors(model):
            return verb(*bound.args, **bound.kwargs)

    return wrapper


def replace_in(arguments: dict[str, Any]) -> None:
    """Put a model of the zoo and rows in place of a plain program and its data, if there are any.

    The guide next to the program was made for it, or is None in a function that fits guides.
    """
    from capsule_zoo.inference.examination.pairs import model_of_program, replace_program

    model, data = arguments["model"], arguments.get("images")
    guides = [arguments[name] for name in ("guide", "start") if name in arguments]
    if guides == [None]:
        pair = model_of_program(model, data)
    else:
        pair = replace_program(model, guides[0] if guides else None, data)
    arguments |= {n: v for n, v in zip(("model", "images"), pair, strict=True) if n in arguments}


def check_declared(form: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError unless `model` is a `Model` of the zoo, which declares its sites.

    Args:
        form: text of the function's call, for the error.
        arguments: arguments of the call by name, `model` and perhaps `images`.
    """
    model = arguments["model"]
    if isinstance(model, Guide) or not callable(model):
        kind = "a guide" if isinstance(model, Guide) else "no capsule_zoo.models.Model"
        raise ValueError(f"model is a {name_of(model)}, which is {kind}; call {form}")
    if not isinstance(model, Model):
        raise ValueError(
            f"model is a {name_of(model)}, a plain Pyro program, and {form.partition('(')[0]} "
            "needs one that declares its sites: subclass capsule_zoo.models.Model, "
            f"{_declaration(arguments)}; fit, evaluate and compare take the program as it is; "
            "or give guide.model and guide.model.rows_of(data), of guide = auto_encoder(program, "
            "data)"
        )


def _declaration(arguments: Mapping[str, Any]) -> str:
    """Return the text of a `Model`'s declarations for a plain program, from a run on images.

    Args:
        arguments: arguments of a call by name; without a run the result is general.
    """
    sites, space = 'Site("z", plates=("images",), event_dim=1)', "ImageSpace((1, 28, 28))"
    try:
        images = arguments["images"]
        images = getattr(images, "images", images)[:2]
        model = arguments["model"]
        with eval_mode(model), torch.random.fork_rng(), torch.no_grad(), poutine.block():
            drawn = latent_sites(poutine.trace(model).get_trace(images))
        declared = ", ".join(
            f'Site("{name}", plates=("images",), event_dim={site["fn"].event_dim})'
            for name, site in drawn.items()
        )
        sites = declared or sites
        space = f"ImageSpace({tuple(images.shape[1:])})"
    except Exception:  # no images, or images that the program refuses
        pass
    return (
        f'with sites = ({sites},), space = {space}, the plate "images" outermost, an observed '
        'site "image", and forward(images=None, labels=None, batch_size=1)'
    )


def check_module(guide: object) -> None:
    """Raise ValueError for a guide that is not a torch module."""
    if not isinstance(guide, nn.Module):
        raise ValueError(
            f"guide must be a torch module, not {type(guide).__name__}; of a function, "
            "as_module(guide, images) makes one"
        )


def _to_parameters(
    names: list[str],
) -> tuple[dict[str, nn.Parameter], dict[str, constraints.Constraint]]:
    """Convert entries of Pyro's store to `nn.Parameter`s, and return them with constraints."""
    store = pyro.get_param_store()
    state = store.get_state()
    supports = {name: state["constraints"][name] for name in names}
    parameters: dict[str, nn.Parameter] = {}
    for name in names:
        value = state["params"][name]
        if not isinstance(value, nn.Parameter):  # values of `pyro.module` are parameters already
            del store[name]
            value = nn.Parameter(value.detach().clone())
        parameters[name] = value
    store.set_state({"params": dict(parameters), "constraints": supports})
    return parameters, supports


def _key(name: str) -> str:
    return name.replace(".", "/")
