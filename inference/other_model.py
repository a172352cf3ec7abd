"""Detection of guides that use the parameters of another model than the given one.

A guide holds the model that it was made from. Where the two are copied, or loaded from two files,
one without the other, the guide holds another model: training changes one, and the guide goes on
using the other. A guide whose networks use images alone is right with either.

>>> copy.deepcopy((model, guide)); torch.save((model, guide), file)       # right: both at once
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capsule_zoo.inference.log_weight import call_arguments
from capsule_zoo.models.common.modes import eval_mode

REMEDY = (
    "make the guide anew from this model, or copy and save the two at once: "
    "copy.deepcopy((model, guide)), torch.save((model, guide), file)"
)
_aten = torch.ops.aten
_TAKE_THE_SHAPE_ALONE = {
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like),
    *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.randn_like),
}


def foreign_parameters(model: Callable, guide: Callable) -> dict[str, Tensor]:
    """Return the parameters of `guide.model` that `model` does not share, by name.

    Buffers are among them where the model has another value under their name. There are none if
    the guide holds no model, or the model is a function, whose parameters are not its own.
    """
    if isinstance(guide, AutoGuide) and not guide._model:  # Pyro forgets it in a pickle
        return {}
    model, other = poutine.unwrap(model), poutine.unwrap(getattr(guide, "model", None))
    if other is model or not isinstance(model, nn.Module) or not isinstance(other, nn.Module):
        return {}
    shared = {_storage(parameter) for parameter in model.parameters()}
    constants = dict(model.named_buffers())
    foreign: dict[str, Tensor] = {}
    for name, parameter in other.named_parameters():
        if parameter.numel() and _storage(parameter) not in shared:
            foreign[name] = parameter
    for name, buffer in other.named_buffers():
        if buffer.numel() and not _same(buffer, constants.get(name)):
            foreign[name] = buffer
    return foreign


def warn_of_another_model(
    model: Callable, guide: Callable, images: Tensor, labels: Tensor | None = None
) -> None:
    """Warn if the guide uses parameters of `guide.model` that `model` does not share.

    Its density is a density all the same, so that bounds stay bounds. The random state is left as
    it was. The guide runs only if it holds another model.

    Args:
        images: (B, C, H, W), a small batch is enough.
        labels: (B,), passed to the guide unless None.
    """
    if not (foreign := foreign_parameters(model, guide)):
        return
    reads = _Reads(foreign)
    try:
        with poutine.block(), torch.random.fork_rng(), torch.no_grad(), eval_mode(guide), reads:
            guide(*call_arguments(images, labels))
    except Exception:
        return  # the check of the pair reports it
    if reads.names:
        warnings.warn(other_model_message(model, guide, reads.names), UserWarning, stacklevel=2)


def refuse_another_model(model: Callable, guide: Callable) -> None:
    """Raise ValueError if the guide holds parameters of another model.

    For objectives that take a part of the model's own density from the guide.
    """
    if foreign := foreign_parameters(model, guide):
        raise ValueError(other_model_message(model, guide, list(foreign)))


def other_model_message(model: Callable, guide: Callable, names: list[str]) -> str:
    """Return the message about a guide that uses these parameters of another model."""
    listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    model_class = type(poutine.unwrap(model)).__name__
    return (
        f"{type(guide).__name__} was made from another {model_class} than the one that is given, "
        f"and reads parameters of that other one ({listed}); {REMEDY}"
    )


class _Reads(TorchDispatchMode):
    """The torch mode that records which of these tensors an operation reads.

    Attributes:
        names: names of the tensors that were read, in the order of reading.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.names: list[str] = []
        self._unread = {_storage(tensor): name for name, tensor in tensors.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in _TAKE_THE_SHAPE_ALONE:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and (name := self._unread.pop(_storage(value), None)):
                    self.names.append(name)
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor, which its views share."""
    return tensor.untyped_storage().data_ptr()


def _same(buffer: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(buffer, other.to(buffer.device))
