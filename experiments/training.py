"""Training of entries in experiments, with the entry's own settings and the options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from capsule_zoo.data import Dataset, Split
from capsule_zoo.experiments.options import Options
from capsule_zoo.inference import Run, fit
from capsule_zoo.inference.training.stages import fit_stages
from capsule_zoo.registry import Entry, create, load


def train(
    entry: Entry,
    data: Dataset | Split,
    options: Options,
    minutes: float | None = None,
    *,
    name: str,
    after: str | None = None,
    guide: nn.Module | None = None,
    start: Callable[[Entry, Tensor], object] | None = None,
    **settings: Any,
) -> Run:
    """Fit an entry and leave it on the CPU.

    The run is saved in `options.runs` as it goes on and when it ends; see `fit`. If it was
    interrupted, it goes on from there; if it had ended, the entry gets the saved weights, and
    torch's generator the state that it had at the end of the run.

    Args:
        minutes: limit of the run, if `settings` give no other.
        name: name of the run, of which an experiment has one.
        after: name of a run that this one continues, with a later limit.
        guide: the guide to train; the entry's own by default.
        start: a function of the entry and the training images that sets parameters to a start,
            unless the run goes on from a saved one; by default energy models start at the data's
            mean.
        settings: arguments of `fit` that replace the entry's.

    Raises:
        KeyboardInterrupt: the user interrupted the run, which is saved.
    """
    guide = entry.guide if guide is None else guide
    places = checkpoints(options, name, after)
    if "resume" not in places:
        (start or start_at_mean)(entry, (data.train if isinstance(data, Dataset) else data).images)
    chosen: dict[str, Any] = {
        "objective": entry.objective,
        "minutes": minutes,
        "seed": options.seed,
        "progress": options.progress,
        "device": options.device,
        **entry.training,
        **settings,
        **places,
    }
    run = fit(entry.model, guide, data, **chosen)
    entry.model.cpu()
    guide.cpu()
    if run.stopped == "interrupted":
        raise KeyboardInterrupt
    return run


def start_at_mean(entry: Entry, images: Tensor) -> None:
    """Start an energy model at the mean of the images (N, C, H, W), and no other model."""
    if hasattr(entry.model, "set_base_rates"):
        entry.model.set_base_rates(images)


def train_stages(
    entry: Entry, data: Dataset, options: Options, *, name: str, **settings: Any
) -> Run:
    """Fit an entry in its stages, or at once if it has none; see `train`.

    Args:
        settings: arguments of `fit` that replace the entry's, with a limit among them.
    """
    if entry.stages is None:
        return train(entry, data, options, name=name, **settings)
    chosen: dict[str, Any] = {
        "seed": options.seed,
        "progress": options.progress,
        "device": options.device,
        "say": options.say,
        **entry.training,
        **settings,
        **checkpoints(options, name),
    }
    run = fit_stages(entry.stages(entry), data, **chosen)
    entry.model.cpu()
    entry.guide.cpu()
    if run.stopped == "interrupted":
        raise KeyboardInterrupt
    return run


def checkpoints(options: Options, name: str, after: str | None = None) -> dict[str, Any]:
    """Return where `fit` saves a run, and from where it resumes, if anything is saved."""
    if options.runs is None:
        if after is not None:
            raise ValueError(f"{name} continues {after}; give options.runs, where runs are saved")
        return {}
    own, *earlier = (options.runs / f"{each}.safetensors" for each in (name, after) if each)
    begun = [path for path in (own, *earlier) if path.is_file()]
    return {"checkpoint": own, **({"resume": begun[0]} if begun else {})}


def trained(name: str, data: Dataset, options: Options, **settings: Any) -> Entry:
    """Load `options.run` if given; otherwise create entry `name` and train it, in its stages.

    Args:
        settings: arguments of `train` that replace the entry's; by default the limit is the
            options' budget.
    """
    if options.run:
        return load(options.run)
    entry = create(name, image_shape=data.image_shape)
    chosen = {"minutes": options.budget, **settings}
    train_stages(entry, data, options, name="trained", **chosen)
    return entry
