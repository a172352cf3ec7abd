"""A plain Pyro program as a model of the zoo.

A program is a function or a module with `pyro.sample` statements, as Pyro's users write them. Its
sites, plates and ranks are read from one run. There are two forms:

    by row   every site lies in one plate over the data: a row of the data is an observation, and
             its latents are its own
    whole    any other program, such as one with global latents: all data are one observation

Either is a model of a batch of rows, for which the program runs once (`batched`). It is compared
with the program itself on the given data before anything else is done, so that a program whose rows
depend on each other is taken as a whole, and none is measured wrongly.

>>> model, rows = as_model(program, x, observed={"y": y})
>>> evaluate(model, guide, rows)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import Signature, signature
from operator import attrgetter
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from capsule_zoo.inference.annealing.path import score_latents
from capsule_zoo.inference.check import is_discrete, name_of
from capsule_zoo.inference.examination.batched import Inputs, Observing, run_batched
from capsule_zoo.inference.examination.enumeration import enumerate_sites
from capsule_zoo.inference.examination.refusals import Statements, original, refuse_unserved
from capsule_zoo.inference.examination.refusals import UnservedProgram as UnservedProgram
from capsule_zoo.inference.examination.rows import Columns, Key, Rows, same_data
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.common.modes import eval_mode, frozen, use_seed
from capsule_zoo.models.common.spaces import tile_batch
from capsule_zoo.models.common.trace_density import (
    IMAGES_PLATE,
    is_deterministic,
    plain_log_density,
    scored_sites,
)

_RESERVED = {"modes", "chain", "draw", "image", "_continuous"}  # used by guides and evaluations


class _Unfit(ValueError):
    """The error for a form of model that does not fit a program."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a program, with the values of its parameters.

    Attributes:
        program: the function or module.
        args, kwargs: its arguments.
        conditions: values of sites that are observed by name.
        parameters: values of its `pyro.param` statements, by name.
    """

    program: Callable
    args: tuple
    kwargs: dict[str, Any]
    conditions: dict[str, Tensor]
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def owner(self) -> Callable:
        """The module that owns the program's parameters, or the program itself."""
        owner = getattr(self.program, "__self__", self.program)
        return owner if isinstance(owner, nn.Module) else self.program

    def run(self, arguments: Mapping[Key, Any] | None = None) -> None:
        """Run the program, with other values of some arguments."""
        other = arguments or {}
        args = [other.get(place, value) for place, value in enumerate(self.args)]
        kwargs = {name: other.get(name, value) for name, value in self.kwargs.items()}
        with _Parameters(self.parameters):
            self.program(*args, **kwargs)

    @contextmanager
    def hold_constant(self) -> Iterator[None]:
        """Freeze the program's parameters and running statistics within the context."""
        with eval_mode(self.program), frozen(self.program):
            yield

    def of_size(self, size: int) -> tuple[dict[Key, Tensor], dict[Key, int]]:
        """Return the tensor arguments of length `size`, and the int arguments equal to `size`."""
        every: dict[Key, Any] = dict([*enumerate(self.args), *self.kwargs.items()])
        tensors = {
            k: v for k, v in every.items() if isinstance(v, Tensor) and v.shape[:1] == (size,)
        }
        return tensors, {k: v for k, v in every.items() if type(v) is int and v == size}


class _Parameters(Messenger):
    """The messenger that sets each `pyro.param` to its value in the first run."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = values

    def _pyro_param(self, msg: Any) -> None:
        if msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
            msg["done"] = msg["stop"] = True


class ProgramModel(Model):
    """The model that calls a user's program; made by `as_model`.

    Its parameters are constants. It is called on rows of `space`, `model(rows)`, or draws rows
    with the arguments of the examples, `model(batch_size=4)`.

    Args:
        call: the call on the given data.
        space: the space of the rows.
        sites: every latent site.
        plate_dims: the dim of each plate.
        names: new names of sites and plates, by their names in the program.
        plate: the plate over the rows of the data; None where all data are one row.
    """

    space: Rows

    def __init__(
        self,
        call: Call,
        space: Rows,
        sites: tuple[Site, ...],
        plate_dims: dict[str, int],
        names: Mapping[str, str],
        plate: str | None,
    ) -> None:
        super().__init__()
        self.__name__ = name_of(call.program)
        self.call = call
        self.space = space
        self.sites = sites
        self.plate_dims = plate_dims
        self.names = names
        self.plate = plate
        self._counts = call.of_size(len(space.examples))[1] if plate else {}

    @property
    def by_row(self) -> bool:
        """Whether each row is one row of the data; otherwise a single row holds all data."""
        return self.plate is not None

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        """Run the program on rows (B, F), or sample `batch_size` rows; return the rows."""
        rows = self.space.templates(batch_size) if images is None else images
        original = {new: name for name, new in self.names.items()}
        observed = {
            original.get(name, name): element
            for name, element in self.space.observed_values(rows).items()
        }
        values = {} if images is None else observed
        inputs = {"arguments": self.space.arguments(rows), "observed": values}

        def program(row: Inputs) -> None:
            with Observing(set(observed), row["observed"] if values else None):
                self.call.run({**self._counts, **row["arguments"]})

        enumerated = {original.get(site.name, site.name) for site in self.sites if site.enumerated}
        nesting = -1 - self.plate_dims[IMAGES_PLATE]
        settings = len(rows), nesting, self.names, enumerated
        with (
            self.call.hold_constant(),
            poutine.trace() if images is None else nullcontext() as draws,
        ):
            run_batched(program, inputs, *settings)
        return self.space.read(draws.trace) if draws else rows

    def enumerating(self, names: set[str]) -> "ProgramModel":
        """Return the model in which these sites are summed out."""
        sites = tuple(replace(site, enumerated=site.name in names) for site in self.sites)
        return ProgramModel(self.call, self.space, sites, self.plate_dims, self.names, self.plate)

    def rows_of(self, *args: Any, observed: Mapping[str, Any] | None = None) -> Tensor:
        """Convert other data, given as to `examine`, to rows (B, F).

        Raises:
            UnservedProgram: they have another form than the data of which the model was made.
        """
        call = call_of(self.call.program, args, observed)
        other, rows = _modeled(replace(call, parameters=self.call.parameters))
        name = self.__name__
        forms = [
            [part._replace(fill=0.0) for part in element.space.parts] for element in (self, other)
        ]
        if forms[0] != forms[1] or other.by_row != self.by_row:
            raise UnservedProgram(
                f"these data of {name} have other sites or shapes than those to which guides were "
                "fitted; give data of the same form, with arguments by name"
            )
        rows = rows.to(self.space.examples)
        with isolated_parameters(call.program, call.owner), use_seed(0), torch.no_grad():
            latents, terms = _terms(other, rows)
            try:
                _compare(_terms_at(self, latents, rows), {n: t.sum() for n, t in terms.items()})
            except _Unfit as error:
                changed = " or ".join(self._changed_constants(other.call)) or "its data"
                raise UnservedProgram(
                    f"{changed} of {name} is a constant of the model to which guides were fitted, "
                    f"and has another value here ({error}); make a new guide for these data by "
                    "auto_encoder, or call examine on them"
                ) from None
        return rows

    def _changed_constants(self, other: Call) -> list[str]:
        """Return the names of arguments that differ and are no columns of the rows."""
        columns = {part.argument for part in self.space.parts}
        old, new = (
            dict([*enumerate(call.args), *call.kwargs.items()]) for call in (self.call, other)
        )
        names: dict[Any, str] = dict(enumerate(signature_of(other.program).parameters))
        return [
            str(names.get(key, key))
            for key in new
            if key not in columns and new[key] is not old.get(key)
        ]


def as_model(
    program: Callable, *args: Any, observed: Mapping[str, Any] | None = None
) -> tuple[ProgramModel, Tensor]:
    """Convert a Pyro program to a model of the zoo, and its data to rows (B, F).

    The parameter store, the random state and the modes of modules are left as they were.

    Args:
        program: a function or a module with Pyro statements.
        args: its arguments: data, covariates, constants.
        observed: data by name: of an argument of the program, or of a site, as in
            `pyro.condition`. NaN marks missing values.

    Raises:
        UnservedProgram: the program cannot be taken; the message names the site and the remedy.
    """
    return _modeled(call_of(program, args, observed))


def call_of(program: Callable, args: tuple, observed: Mapping[str, Any] | None) -> Call:
    """Return the call of a program on its data, with arrays as tensors.

    Raises:
        UnservedProgram: the program or its data are of another kind.
    """
    if isinstance(program, type) or not callable(program):
        name = f"the class {program.__name__}" if isinstance(program, type) else repr(program)
        raise UnservedProgram(
            f"program must be a function or a module with Pyro statements, not {name}; give "
            "program, and its arguments after it"
        )
    if observed is not None and not isinstance(observed, Mapping):
        raise UnservedProgram(
            f'observed must be {{"site": values}}, not a {type(observed).__name__}; data that are '
            "arguments of the program may also follow it"
        )
    values = {name: _tensor(value) for name, value in (observed or {}).items()}
    form = signature_of(program)
    kwargs = {name: value for name, value in values.items() if name in form.parameters}
    conditions = {name: value for name, value in values.items() if name not in kwargs}
    for name, value in conditions.items():
        conditions[name] = torch.as_tensor(value)
    call = Call(program, tuple(map(_tensor, args)), kwargs, conditions)
    try:
        form.bind(*call.args, **kwargs)
    except TypeError as error:
        raise UnservedProgram(
            f"{name_of(program)} cannot be called with these arguments: {error}; give "
            f"its arguments {', '.join(form.parameters) or '(none)'}, in order or by name"
        ) from None
    return call


def signature_of(program: Callable) -> Signature:
    """Return the signature of a function, or of a module's `forward`."""
    return signature(program.forward if isinstance(program, nn.Module) else program)


def _tensor(value: Any) -> Any:
    """Convert an array of numbers to a tensor, and return everything else unchanged."""
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
    return torch.from_numpy(value.copy()) if is_array else value


def _modeled(call: Call) -> tuple[ProgramModel, Tensor]:
    """Return the model of a call, and its rows, after a comparison with the program itself."""
    isolated = isolated_parameters(call.program, call.owner)
    with isolated, use_seed(0), torch.no_grad(), call.hold_constant():
        call, trace = _traced(call)
        sites = _sites_of(call, trace)
        refuse_unserved(name_of(call.program), sites)
        try:
            model, rows = _by_row(call, sites)
        except _Unfit:
            try:
                model, rows = _whole(call, sites)
            except _Unfit as error:
                name = name_of(call.program)
                raise UnservedProgram(f"{name} cannot be taken: {error}") from None
        return enumerate_sites(model, rows), rows


def _traced(call: Call) -> tuple[Call, Trace]:
    """Run a call once; return it with the values of its parameters, and the trace."""
    statements, name = Statements(), name_of(call.program)
    conditioned = statements(poutine.condition(call.run, call.conditions))
    try:
        trace = poutine.trace(conditioned).get_trace()
    except Exception as error:
        reason = statements.describe(error, [*call.args, *call.kwargs.values()])
        raise UnservedProgram(
            f"{name} cannot run on these data; {reason}; call {name} itself on them to see the line"
        ) from original(error)
    parameters = dict(call.parameters)
    for name, node in trace.nodes.items():
        if node["type"] == "param" and name not in parameters:
            value = node["value"]
            parameters[name] = value if isinstance(value, nn.Parameter) else value.detach()
    return replace(call, parameters=parameters), trace


def _sites_of(call: Call, trace: Trace) -> dict[str, dict]:
    """Return the sites of a trace that have a density, by name.

    Raises:
        UnservedProgram: a given name is not among them.
    """
    sites = {name: site for name, site in scored_sites(trace).items() if not is_deterministic(site)}
    for condition in call.conditions:
        if condition not in sites:
            names = ", ".join(map(repr, sites)) or "none"
            raise UnservedProgram(
                f"observed names {condition!r}, which is neither an argument nor a site of "
                f"{name_of(call.program)}; its sites are {names}"
            )
    return sites


def _new_names(sites: Mapping[str, dict]) -> dict[str, str]:
    """Return new names for sites whose names are not valid for parameters or files."""
    names, taken = {IMAGES_PLATE: f"{IMAGES_PLATE}_"}, set(sites)
    for name in sites:
        new = "".join(letter if letter.isalnum() else "_" for letter in name)
        if new in _RESERVED or hasattr(nn.ParameterDict, new):
            new += "_site"
        while new != name and new in taken:
            new += "_"
        if new != name:
            taken.add(new)
            names[name] = new
    return names


def _nesting(sites: Mapping[str, dict]) -> int:
    frames = [f for site in sites.values() for f in site["cond_indep_stack"]]
    return max((-frame.dim for frame in frames if frame.vectorized), default=0)


def _value(site: dict, nesting: int) -> Tensor:
    """Expand the value of a site to its distribution's shape, with all dims of plates."""
    value = site["value"].expand(site["fn"].shape())
    missing = nesting - (value.dim() - site["fn"].event_dim)
    return value.reshape([1] * missing + [*value.shape])


def _built(
    call: Call, sites: Mapping[str, dict], columns: Columns, names: dict, plate: str | None
) -> tuple[ProgramModel, Tensor]:
    """Build the model with these columns, and return it with its rows."""
    rows = columns.join()
    dims = {
        names.get(frame.name, frame.name): frame.dim
        for site in sites.values()
        for frame in site["cond_indep_stack"]
        if frame.vectorized
    }
    dims[IMAGES_PLATE] = -1 - _nesting(sites)
    latents = []
    for name, site in sites.items():
        if not site["is_observed"]:
            frames = sorted(
                (f for f in site["cond_indep_stack"] if f.vectorized), key=attrgetter("dim")
            )
            plates = IMAGES_PLATE, *(names.get(f.name, f.name) for f in frames)
            distribution = site["fn"]
            latents.append(
                Site(
                    names.get(name, name), plates, distribution.event_dim, is_discrete(distribution)
                )
            )
    space = Rows(columns.parts, rows)
    return ProgramModel(call, space, tuple(latents), dims, names, plate), rows


def _by_row(call: Call, sites: Mapping[str, dict]) -> tuple[ProgramModel, Tensor]:
    """Return the model with one row for each index of the program's data plate, and the rows.

    Raises:
        _Unfit: there is no such plate, or the rows depend on each other.
    """
    plates = [{f for f in s["cond_indep_stack"] if f.vectorized} for s in sites.values()]
    for frame in sorted(set.intersection(*plates), key=attrgetter("dim")):
        tensors, _ = call.of_size(frame.size)
        nesting, names, columns = _nesting(sites), _new_names(sites), Columns([], [])
        place = nesting + frame.dim  # index of the plate's dim among the dims of plates
        for name, site in sites.items():
            if not site["is_observed"]:
                continue
            values = _value(site, nesting).movedim(place, 0).unsqueeze(place + 1)
            shape: dict[str, Any] = {"site": names.get(name, name), "shape": (*values.shape[1:],)}
            argument = next((k for k, v in tensors.items() if same_data(v, site["value"])), None)
            if (
                argument is not None
                and place == nesting - site["value"].dim() + site["fn"].event_dim
            ):
                inner = (*tensors.pop(argument).shape[1:],)
                shape |= {"argument": argument, "argument_shape": inner}
            columns.add(values, **shape)
        for key, value in tensors.items():
            columns.add(value, argument=key, argument_shape=(*value.shape[1:],))
        model, rows = _built(call, sites, columns, names, frame.name)
        with _as_unfit("its rows depend on each other"):
            latents, terms = _terms(model, rows)
            original = {
                name: value.squeeze(place + 1).movedim(0, place) for name, value in latents.items()
            }
            _compare(terms, _plain(call, sites, names, original))
            return model, rows
    raise _Unfit("no plate lies around all sites")


def _whole(call: Call, sites: Mapping[str, dict]) -> tuple[ProgramModel, Tensor]:
    """Return the model that takes all data as one row, and that row.

    Raises:
        _Unfit: the program does not run for several rows at once.
    """
    nesting, names, columns = _nesting(sites), _new_names(sites), Columns([], [])
    for name, site in sites.items():
        if site["is_observed"]:
            value = _value(site, nesting)
            columns.add(value[None], site=names.get(name, name), shape=(*value.shape,))
    model, row = _built(call, sites, columns, names, None)
    with _as_unfit("several runs of it differ from one"):
        latents, terms = _terms(model, tile_batch(row, 2))
        original = {name: value[1] for name, value in latents.items()}
        _compare({n: term[1:] for n, term in terms.items()}, _plain(call, sites, names, original))
    return model, row


def _terms(model: ProgramModel, rows: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sample latents of rows, (B, ...) by site, and compute the log density of each site, (B,)."""
    trace = poutine.trace(model).get_trace(rows)
    latents = {site.name: trace.nodes[site.name]["value"] for site in model.sites}
    return latents, _terms_at(model, latents, rows)


def _terms_at(
    model: ProgramModel, latents: Mapping[str, Tensor], rows: Tensor
) -> dict[str, Tensor]:
    """Compute the log density of each site, (B,), at given latents."""
    with pyro.validation_enabled(False):
        sites = scored_sites(score_latents(model, dict(latents), rows))
        return {name: plain_log_density({name: s}, rows) for name, s in sites.items()}


def _plain(
    call: Call, sites: Mapping[str, dict], names: Mapping[str, str], latents: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Compute the log density of each site of the program itself, a scalar, at given latents.

    Args:
        latents: values of the latent sites by their new names, in the shape of the program's or
            with further dims of size 1.
    """
    observed, latent_values = {}, {}
    for name, site in sites.items():
        value = site["value"]
        if site["is_observed"]:
            value = value.expand(site["fn"].shape())
            missing = value.isnan()
            fill = value[~missing].min() if not missing.all() else value.new_zeros(())
            observed[name] = [torch.where(missing, fill, value)]
            if missing.any():
                observed[name].append(~missing)
        else:
            latent_values[name] = latents[names.get(name, name)].reshape(value.shape)
    with pyro.validation_enabled(False):
        with poutine.condition(data=latent_values), Observing(set(observed), observed):
            trace = poutine.trace(call.run).get_trace()
        trace.compute_log_prob(lambda name, _: name in sites)
        return {names.get(name, name): trace.nodes[name]["log_prob_sum"] for name in sites}


@contextmanager
def _as_unfit(message: str) -> Iterator[None]:
    """Convert every error within the context to `_Unfit`."""
    statements = Statements()
    try:
        with statements:
            yield
    except _Unfit as error:
        raise _Unfit(f"{message} ({error})") from None
    except Exception as error:
        raise _Unfit(
            f"it does not run for several rows at once; {statements.describe(error)}; write "
            "branches on latents or data as torch.where, and sizes without .item()"
        ) from None


def _compare(terms: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise _Unfit unless the log densities of every site agree, those of rows, (B,), with one.

    A site that both give the density 0 says nothing.
    """
    for name, term in terms.items():
        total, plain = term.sum(), expected[name].to(term)
        if total.isnan() or plain.isnan():
            raise _Unfit("its log density is not a number; NaN may mark observed values alone")
        if total == plain:
            continue
        tolerance = 1e-4 if term.dtype == torch.float32 else 1e-6
        if not (total - plain).abs() <= tolerance * (10 + term.abs().sum()):
            raise _Unfit(f"log densities {total.item():.6g} and {plain.item():.6g} at {name!r}")
