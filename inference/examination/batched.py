"""Vectorized runs of a Pyro program that is written for a single run.

`torch.vmap` runs the program once for all rows of a batch, so that it may write `x @ w` and
`loc[k]` as for one. At every sample statement the distribution is lifted: the dim of the rows
becomes a dim of its batch, in a plate `images` around the program. All handlers outside of the
program, such as traces, conditions, enumeration and guides, see this plate and nothing of `vmap`.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import validation_enabled
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.distributions import Distribution, Transform
from torch.distributions.transforms import _InverseTransform

from capsule_zoo.models.common.missing_pixels import ObservedPixels
from capsule_zoo.models.common.trace_density import IMAGES_PLATE, is_deterministic

_ROWS_PLATE = "plate of rows"  # the name of the plate inside of `Naming`
_UNEXPANDED = {  # event dims of parameters that may lack dims of the batch
    "_unbroadcasted_scale_tril": 2,
    "_unbroadcasted_cov_factor": 2,
    "_unbroadcasted_cov_diag": 1,
    "_capacitance_tril": 2,
}
Inputs = Mapping[Any, Any]  # tensors (B, ...), in lists or not


def run_batched(
    program: Callable[[Inputs], None],
    inputs: Inputs,
    number: int,
    nesting: int,
    names: Mapping[str, str],
    enumerated: set[str],
) -> None:
    """Run a program on all rows of its inputs, in a plate `images` at dim -1 - nesting.

    Args:
        program: a function of one row of the inputs.
        inputs: tensors (B, ...).
        number: B.
        nesting: number of dims that the plates of the program take up.
        names: new names of sites and plates, by their names in the program.
        enumerated: the sites that are enumerated in parallel, by their names in the program.
    """

    def run(row: Inputs, index: Tensor) -> Tensor:
        level = _functorch.maybe_current_level() or 0
        with Lifting(level, number, nesting, names, enumerated):
            program(row)
        return index

    # checks of values are branches, which vmap does not take
    dim = -1 - nesting
    with validation_enabled(False), Naming(), pyro.plate(_ROWS_PLATE, number, dim=dim):
        torch.vmap(run, randomness="same")(dict(inputs), torch.arange(number))


class Naming(Messenger):
    """The messenger that names the plate of the rows `images`, as a program may name its own."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == _ROWS_PLATE:
            msg["name"] = IMAGES_PLATE
        msg["cond_indep_stack"] = tuple(
            frame._replace(name=IMAGES_PLATE) if frame.name == _ROWS_PLATE else frame
            for frame in msg["cond_indep_stack"]
        )


class Lifting(Messenger):
    """The messenger that makes the rows of `vmap` a plate; see the top of this file.

    Args:
        level: the level of `vmap`.
        number, nesting, names, enumerated: see `run_batched`.
    """

    def __init__(
        self, level: int, number: int, nesting: int, names: Mapping[str, str], enumerated: set[str]
    ) -> None:
        super().__init__()
        self.level = level
        self.number = number
        self.nesting = nesting
        self.names = names
        self.enumerated = enumerated
        self._outside: Any = None  # the context outside of `vmap`, during a statement
        self._padding = 0

    def __exit__(self, *error: Any) -> Any:
        self._enter_again()
        return super().__exit__(*error)

    def _pyro_sample(self, msg: Any) -> None:
        if is_deterministic(msg):
            msg["stop"] = True  # a deterministic site has no density
            return
        if site_is_subsample(msg):  # of a plate, which may be called `images`
            msg["name"] = self.names.get(msg["name"], msg["name"])
        else:
            self._lift(msg)
        self._outside = temporarily_pop_interpreter_stack()
        self._outside.__enter__()

    def _lift(self, msg: Any) -> None:
        distribution, name = msg["fn"], msg["name"]
        self._padding = max(0, self.nesting - len(distribution.batch_shape))
        distribution = distribution.expand(
            torch.Size([1] * self._padding) + distribution.batch_shape
        )
        if isinstance(distribution, ObservedPixels) and distribution.observed is not None:
            distribution.observed = distribution.observed.expand(distribution.shape())
        place = len(distribution.batch_shape) - self.nesting
        msg["fn"] = self._lifted(distribution, place)
        if isinstance(msg["mask"], Tensor):
            msg["mask"] = self._lifted(msg["mask"].expand(distribution.batch_shape), place)
        if msg["value"] is not None:
            value = msg["value"].expand(distribution.shape())
            msg["value"] = self._lifted(value, place)
        msg["name"] = self.names.get(name, name)
        frames = msg["cond_indep_stack"]
        msg["cond_indep_stack"] = tuple(
            frame._replace(name=self.names.get(frame.name, frame.name)) for frame in frames
        )
        if not msg["is_observed"]:
            mode = "parallel" if name in self.enumerated else None
            msg["infer"] = {**msg["infer"], "enumerate": mode}

    def _lifted(self, thing: Any, place: int, rank: int = 0) -> Any:
        """Insert the rows as a batch dim at index `place` of a value or of a distribution.

        Args:
            rank: least number of dims of a tensor, which gets dims of size 1 in front.
        """
        if isinstance(thing, Tensor):
            padded = thing[(None,) * max(0, rank - thing.dim())]
            return _functorch._remove_batch_dim(padded, self.level, self.number, place)
        if isinstance(thing, list | tuple) and not isinstance(thing, torch.Size):
            return type(thing)(self._lifted(element, place, rank) for element in thing)
        if isinstance(thing, Transform):
            return self._lifted_transform(thing, place, rank)
        if not isinstance(thing, Distribution):
            return thing
        lifted, batch, event = copy.copy(thing), len(thing.batch_shape), len(thing.event_shape)
        for name, value in vars(thing).items():
            if name == "_batch_shape":
                value = torch.Size([*value[:place], self.number, *value[place:]])
            whole = isinstance(value, Transform | list)  # of a transformed distribution
            least = batch + event if whole else batch + _UNEXPANDED.get(name, 0)
            lifted.__dict__[name] = self._lifted(value, place, least)
        return lifted

    def _lifted_transform(self, transform: Transform, place: int, rank: int) -> Transform:
        """Insert the rows into the parameters of a transform of values with `rank` dims."""
        if isinstance(transform, _InverseTransform):
            return self._lifted_transform(transform.inv, place, rank).inv
        lifted = copy.copy(transform)
        for name, value in vars(transform).items():
            if name == "_inv":  # made again when it is asked for
                lifted.__dict__[name] = None
            elif name == "_cached_x_y":
                lifted.__dict__[name] = None, None
            else:
                lifted.__dict__[name] = self._lifted(value, place, rank)
        return lifted

    def _pyro_post_sample(self, msg: Any) -> None:
        self._enter_again()
        if is_deterministic(msg) or site_is_subsample(msg):
            return
        if (value := msg["value"]) is None:  # the run was left at this site
            return
        place = value.dim() - msg["fn"].event_dim - self.nesting - 1
        if place < 0:
            return
        if place == 0:  # otherwise dims of enumeration come first
            event = value.shape[1 + self._padding :]
            value = value.reshape(len(value), *event)
        if value.shape[place] == self.number:
            msg["value"] = _functorch._add_batch_dim(value, place, self.level)
        else:
            msg["value"] = value.squeeze(place)

    def _enter_again(self) -> None:
        if self._outside is not None:
            self._outside.__exit__(None, None, None)
            self._outside = None


class Observing(Messenger):
    """The messenger that sets observed sites to their values, or lets them be sampled.

    Args:
        sites: the observed sites.
        observed: values of the sites, with a mask if some are missing; None to sample them.
    """

    def __init__(self, sites: set[str], observed: Mapping[str, list[Tensor]] | None) -> None:
        super().__init__()
        self.sites = sites
        self.observed = observed

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.sites:
            return
        msg["is_observed"] = self.observed is not None
        msg["value"] = None
        if self.observed is not None:
            msg["value"], *mask = self.observed[msg["name"]]
            if mask:
                msg["fn"] = ObservedPixels(msg["fn"], mask[0])
