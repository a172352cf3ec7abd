"""The gap of every guide's bound to log p(data) for any Pyro program, in nats.

>>> result = examine(program, x, observed={"y": y})
>>> print(result)                            # one row for each guide, and the verdict
>>> result.draw()
>>> result.guides["mixture"]                 # the guides, for `evaluate`, `infer` and the like
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from capsule_zoo.data.progress import Bar, show_progress
from capsule_zoo.inference.annealing.exceedance import annealed_bound
from capsule_zoo.inference.check import one_line
from capsule_zoo.inference.evaluation.summary import HEAVY
from capsule_zoo.inference.examination.encoder import AutoEncoder, InterruptedFit, trained_encoder
from capsule_zoo.inference.examination.losses import Losses, measure_losses
from capsule_zoo.inference.examination.normals import AGREEING, normal_guide, nuts_guide
from capsule_zoo.inference.examination.pairs import rows_by_name
from capsule_zoo.inference.examination.program import ProgramModel, as_model
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.not_finite import NonFiniteGuide
from capsule_zoo.inference.posterior.fitted import SemiAmortized, fit_guide, kinds_for
from capsule_zoo.models.checks import check_known, check_seed, check_whole
from capsule_zoo.models.common.modes import use_seed

if TYPE_CHECKING:
    import pandas as pd
    from arviz import InferenceData
    from matplotlib.figure import Figure

GENERAL = (
    *("free_form", "semi_amortized", "corrected", "low_rank", "gauss_newton", "mixture"),
    "auto_normal",
)
NORMALS = "auto_low_rank", "auto_laplace"
KINDS = "encoder", *GENERAL, *NORMALS, "nuts"
_GROUP_SIZE = 100  # draws of the importance-weighted bound with fewer draws
STARTS = "free_form", "corrected", "mixture"  # guides to start chains at, besides "encoder"
_MODES, _CLIMBING = 4, 16  # modes, and climbing prior draws, of the mixture
_CHAINS = {True: 8, False: 256}  # number of chains, by `by_row`
_PRIOR_FRACTION = {
    True: 0.0,
    False: 0.25,
}  # fraction of chains that start at the prior, by `by_row`
_CHAINS_AT_ONCE = 512, 4096  # smallest and largest number of chains in one pass
_MAX_NUMBERS = 2**22  # numbers of the rows of one pass, between these two
_NUTS_DRAWS = 400
_POSTERIOR_DRAWS = 100  # posterior draws of each guide in its evaluation
_LOOSE = 0.5  # nats between the bounds above which the verdict calls them loose
_COLUMNS = (
    *("elbo", f"iwae_{_GROUP_SIZE}", "iwae", "ess", "pareto_k"),
    *(
        "lost_elbo",
        "lost_elbo_se",
        f"lost_iwae_{_GROUP_SIZE}",
        "lost_iwae",
        "lost_iwae_se",
        "seconds",
    ),
)


@dataclass(frozen=True, eq=False)
class Examination:
    """The result of `examine`: table, bounds, verdict, and fitted guides.

    Attributes:
        table: one row for each guide, in nats per row of the data: elbo; iwae_100 and iwae (of
            `particles` draws), importance-weighted bounds; ess, the effective number of these
            draws; pareto_k; lost_elbo, lost_iwae_100 and lost_iwae, what each bound loses of the
            annealed lower bound on log p, with standard errors over rows; seconds to fit the guide
            and draw once for all rows; remark, in words.
        lower, upper: bounds on the mean of log p(row), annealed from the best guide. The upper one
            adds the median gap of rows that the program draws.
        lower_error, upper_error: Monte Carlo standard errors of the bounds.
        bounds: all numbers of the annealing, see `annealed_bounds`.
        verdict: sentences on the result, and on numbers that cannot be trusted.
        model: the program as a model of the zoo.
        rows: the measured data, (B, F).
        guides: the fitted guides by name.
        annealed: the annealing, an InferenceData.
        evaluations: the evaluation of each guide, an InferenceData with draws of its posterior.
        left_out: why guides are not in the table, by name.
    """

    table: "pd.DataFrame"
    lower: float
    upper: float
    lower_error: float
    upper_error: float
    bounds: dict[str, Any]
    verdict: str
    model: ProgramModel
    rows: Tensor
    guides: dict[str, nn.Module]
    annealed: "InferenceData"
    evaluations: "dict[str, InferenceData]"
    left_out: dict[str, str]

    def __str__(self) -> str:
        table = self.table.drop(columns="remark").dropna(axis=1, how="all")
        text = table.round(3).to_string(na_rep="")
        return f"{text}\n\n{self.verdict}"

    def draw(self, figure: "Figure | None" = None) -> "Figure":
        """Plot the nats that each guide loses, by its ELBO and with importance weights."""
        import matplotlib.pyplot as plt

        table = self.table
        figure = figure or plt.figure(figsize=(7, 1.4 + 0.3 * len(table)), layout="constrained")
        axes = figure.subplots()
        height = np.arange(len(table))[::-1]
        for column, label in (("lost_elbo", "ELBO"), ("lost_iwae", "importance-weighted bound")):
            error = 2 * table[f"{column}_se"].fillna(0)
            axes.errorbar(table[column], height, xerr=error, fmt="o", capsize=3, label=label)
        axes.axvspan(0, self.lower - self.upper, color="0.9", label="log p, annealed bounds")
        axes.set_yticks(height, [name.replace("_", " ") for name in table.index])
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xlabel(f"nats lost of log p({', '.join(self.model.space.sites)}), per row")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=3)
        return figure


def examine(
    program: Callable,
    *args: Any,
    observed: Mapping[str, Any] | None = None,
    held_out: Mapping[str, Any] | None = None,
    guides: Sequence[str] | None = None,
    network: nn.Module | None = None,
    rows: int = 16,
    steps: int = 2000,
    fitting: int = 200,
    particles: int = 1000,
    chains: int | None = None,
    temperatures: int = 200,
    simulated: int = 8,
    seed: int = 0,
    progress: bool = False,
) -> Examination:
    """Measure how many nats of log p(data) each guide loses, for any Pyro program.

    The program is a function or a module with `pyro.sample` statements. Where all its sites lie in
    one plate over the data, each row of the data is measured on its own; else all data are one row.
    Discrete sites are summed out where that is exact. The program's parameters stay as they are;
    so do the parameter store, the random state, and the modes of modules.

    Args:
        program: a function or a module with Pyro statements.
        args: its arguments: data, covariates, constants.
        observed: data by name: of an argument of the program, or of a site, as in
            `pyro.condition`. NaN marks missing values.
        held_out: other data by the names of arguments or sites, which are measured in place of
            the given ones. The encoder is trained on the given ones.
        guides: names from `KINDS`; by default all that serve the program, except "nuts". The
            encoder is trained in any case, and is the first guess of all others.
        network: see `auto_encoder`.
        rows: number of rows that are measured, the first ones.
        steps: updates of the encoder.
        fitting: updates of every other guide.
        particles: draws of each guide for its largest bound, a multiple of 100.
        chains: annealed chains of each row; by default 8, or 256 where all data are one row.
        temperatures, simulated: see `annealed_log_likelihood`.
        seed: seed of everything.
        progress: show progress bars.

    An interrupt ends the table after the rows that are finished, and the verdict says so.

    Raises:
        InterruptedFit: an interrupt before the first row; the error holds the guides trained so
            far, of the encoder too.
        UnservedProgram: the program cannot be taken; the message names the site and the remedy.
        ValueError: an unknown guide, or a number out of range.
    """
    names = [name for name in KINDS if name != "nuts"] if guides is None else list(guides)
    for name in names:
        check_known("guide", name, KINDS)
    check_whole(1, rows=rows, steps=steps, temperatures=temperatures)
    if chains is not None:
        check_whole(1, chains=chains)
    check_whole(0, fitting=fitting, simulated=simulated)
    if particles % _GROUP_SIZE or particles < _GROUP_SIZE:
        raise ValueError(f"particles must be a multiple of {_GROUP_SIZE}, not {particles!r}")
    seed = check_seed(seed)
    model, training_rows = as_model(program, *args, observed=observed)
    measured = training_rows if held_out is None else rows_by_name(model, held_out, "held_out")
    parts = 2 + len(STARTS) + len(names)
    with (
        show_progress(progress),
        isolated_parameters(model),
        use_seed(seed),
        Bar(f"examining {model.__name__}", "parts", parts, enabled=progress, lasting=True) as bar,
    ):
        bar.advance(0, "training the encoder")
        began = time.process_time()
        encoder = trained_encoder(
            model, training_rows, network, steps=steps, seed=seed, progress=progress
        )
        fits = Fits(model, encoder, measured[:rows], fitting, seed, bar)
        fits.seconds["encoder"] = time.process_time() - began
        try:
            losses = fits.measure(
                names,
                particles=particles,
                chains=chains or _CHAINS[model.by_row],
                temperatures=temperatures,
                simulated=simulated,
                prior_fraction=_PRIOR_FRACTION[model.by_row],
                progress=progress,
            )
        except KeyboardInterrupt:
            reason = "examine was interrupted before the first row, and after the encoder"
            raise InterruptedFit(reason, fits.starts) from None
        bar.advance(parts)
    return _examination(fits, losses)


@dataclass(frozen=True, eq=False)
class Fits:
    """The fits of several guides to one set of rows, with failures and times.

    Attributes:
        model, encoder, rows: the model, the first guess, and the data (B, F).
        steps, seed: steps and seed of each fit.
        bar: the progress of the whole call.
        left_out: why guides could not be fitted, by name.
        disagreement: the largest R-hat of chains, by name.
        fitted: the fits that chains need too, by name.
        seconds: the time of these fits, by name.
    """

    model: ProgramModel
    encoder: AutoEncoder
    rows: Tensor
    steps: int
    seed: int
    bar: Bar
    left_out: dict[str, str] = field(default_factory=dict)
    disagreement: dict[str, float] = field(default_factory=dict)
    fitted: dict[str, nn.Module] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @cached_property
    def starts(self) -> dict[str, nn.Module]:
        """The guides at which annealed chains may start, by name."""
        general = kinds_for(self.model, self.encoder)
        result: dict[str, nn.Module] = {"encoder": self.encoder}
        for name in STARTS:
            if name in general:
                more = dict(modes=_MODES, climbing=_CLIMBING) if name == "mixture" else {}
                options: dict[str, Any] = dict(steps=self.steps, seed=self.seed, **more)
                result[name] = SemiAmortized(self.encoder, kind=name, **options)
        return result

    def fit(self, name: str) -> nn.Module:
        """Fit the guide of this name to the rows, and return it."""
        start = self.model, self.encoder, self.rows
        if name == "encoder":
            return self.encoder
        if name in self.starts:
            if name not in self.fitted:
                start_guide: Any = self.starts[name]
                self.fitted[name] = start_guide.refined_to(self.rows)
            return self.fitted[name]
        if name == "nuts":
            guide, self.disagreement[name] = nuts_guide(*start, draws=_NUTS_DRAWS, seed=self.seed)
            return guide
        fit = partial(normal_guide if name in NORMALS else fit_guide, name, *start)
        return fit(steps=self.steps, seed=self.seed)

    def _fit_for_row(self, name: str, place: int) -> nn.Module:
        """Return a fitted guide, whose row is next in the table."""
        self.bar.advance(2 + len(STARTS) + place, f"measuring {name}")
        return self.fit(name)

    def measure(self, names: Sequence[str], **settings: Any) -> Losses:
        """Measure the losses of guides; guides that do not serve the program are left out."""
        general = kinds_for(self.model, self.encoder)
        for name in names:
            if name in GENERAL and name not in general:
                self.left_out[name] = f"it does not serve the sites of {self.model.__name__}"
        for name in [name for name in self.starts if name != "encoder"]:
            self.bar.advance(1 + STARTS.index(name), f"fitting {name}")
            began = time.process_time()
            try:
                self.fit(name)
            except NonFiniteGuide as error:
                self.left_out[name] = one_line(error)
                del self.starts[name]
            self.seconds[name] = time.process_time() - began
        self.bar.advance(1 + len(STARTS), "annealing")
        least, most = _CHAINS_AT_ONCE
        at_once = max(least, min(most, _MAX_NUMBERS // self.rows.shape[1]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the verdict says it
            return measure_losses(
                self.model,
                self.starts,
                self.rows,
                {
                    name: partial(self._fit_for_row, name, place)
                    for place, name in enumerate(names)
                    if name not in self.left_out
                },
                group_size=_GROUP_SIZE,
                seed=self.seed,
                draws=_POSTERIOR_DRAWS,
                left_out=self.left_out,
                batch_size=at_once,
                **settings,
            )


def _examination(fits: Fits, losses: Losses) -> Examination:
    """Assemble the result: the table, the bounds and the verdict."""
    import pandas as pd

    number = len(fits.rows)
    table = pd.DataFrame.from_dict(losses.rows, orient="index")
    table["seconds"] = table.pop("milliseconds") * number / 1000
    for name in table.index.intersection([*fits.seconds]):
        table.loc[name, "seconds"] += fits.seconds[name]
    table["remark"] = table["remark"].fillna("") if "remark" in table else ""
    table = table[[*_COLUMNS, "remark"]]
    _, errors = annealed_bound(losses.annealed)
    error = float(np.sqrt(np.sum(errors**2)) / number)
    gap, gap_error = losses.bounds.get("gap_median", np.nan), losses.bounds.get("gap_se", np.nan)
    if gap_error > abs(gap) + _LOOSE:  # a few rows decide the error of the gap, but not its median
        gap_error = abs(gap)
    lower = losses.bounds["lower"]
    return Examination(
        table=table,
        lower=lower,
        upper=lower + gap,
        lower_error=error,
        upper_error=float(np.hypot(error, gap_error)),
        bounds=losses.bounds,
        verdict=_verdict(fits, losses, table, error),
        model=fits.model,
        rows=fits.rows,
        guides=losses.guides,
        annealed=losses.annealed,
        evaluations=losses.evaluations,
        left_out=fits.left_out,
    )


def _verdict(fits: Fits, losses: Losses, table: "pd.DataFrame", error: float) -> str:
    """Return sentences on log p, the losses of the guides, and unreliable numbers."""
    bounds, unit = losses.bounds, "a row" if fits.model.by_row else "all data"
    lines = [
        f"log p({', '.join(fits.model.space.sites)}) is {bounds['lower']:.3f} ± {error:.3f} nats "
        f"({unit}, mean of {len(fits.rows)}), annealed from {bounds['start']!r}"
    ]
    if "gap" in bounds:
        median, mean, largest = (bounds[n] for n in ("gap_median", "gap", "gap_largest"))
        lines.append(
            f"on {bounds['num_simulated']} rows that the program draws, the bounds differ by "
            f"{median:.3f} nats (median; mean {mean:.3g}, largest {largest:.3g})"
        )
        if median > _LOOSE:
            lines.append("the bounds are loose: pass more temperatures")
        elif mean > median + _LOOSE:
            lines.append("a few drawn rows decide the mean: the prior has heavy tails")
    if len(table):
        best = str(table["lost_elbo"].idxmin())
        lost = table["lost_elbo"].min()
        lines.append(f"{best!r} loses least by its ELBO, {lost:.3f} nats")
    if message := bounds.get("warning"):
        lines.append(message)
    heavy = [str(name) for name, k in table["pareto_k"].items() if k > HEAVY]
    if heavy:
        lines.append(
            f"few draws decide the importance-weighted bound of {', '.join(heavy)} (Pareto k above "
            f"{HEAVY}); read their ELBO"
        )
    for name, r_hat in fits.disagreement.items():
        if r_hat > AGREEING:
            lines.append(f"the chains of {name} disagree (R-hat {r_hat:.2f}); do not trust its row")
    lines += [f"{name} is left out: {reason}" for name, reason in fits.left_out.items()]
    return "\n".join(lines)
