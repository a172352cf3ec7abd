"""An entry of the zoo: a model with its guides, its objective, its settings and its figures.

`capsule_zoo.registry` creates entries by name, saves and loads them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

from pyro.infer import ELBO
from torch import Tensor

from capsule_zoo.data.registration import without_partials
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference.training.stages import Stage
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_known
from capsule_zoo.models.common.spaces import ImageSpace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

M = TypeVar("M", bound=Model)
G = TypeVar("G", bound=Guide)
K = TypeVar("K", bound=Guide)

GuideMaker = Callable[..., Guide]  # a class of guides, a partial of one, or a function of an entry
_MADE_BELOW: Any = None  # default of `Entry.guide`; `__post_init__` makes the default guide
_made_as: WeakKeyDictionary[Guide, str] = WeakKeyDictionary()  # guides' names


@dataclass
class Entry(Generic[M, G]):
    """One model of the zoo, ready to train; `Entry[M, G]` knows the classes of model and guide.

    It holds functions without a name. Pickle `(entry.model, entry.guide)`, or `save` and `load` it.

    Attributes:
        model: the joint distribution.
        guides: makers of the guides that fit, by name: a class or a partial of a class, which takes
            the model, or a function of this entry. The first maker makes the default guide.
        objective: the training objective.
        training: settings for `inference.fit` that suit this pair, such as learning rates.
        figures: functions that draw a picture, by name: of the entry, or of the entry and images
            (B, C, H, W); see `draw_figure`.
        stages: a function of this entry that returns the stages of its training, for
            `inference.training.stages.fit_stages`; None, or no stages, for training as a whole.
        name, settings: the arguments that `create` was called with.
        default_guide: the name of the entry's guide among `guides`.
        guide: the entry's guide.

    Raises:
        ValueError: `default_guide` is not among `guides`.
    """

    model: M
    guides: Mapping[str, GuideMaker]
    objective: ELBO
    training: dict = field(default_factory=dict)
    figures: "Mapping[str, Callable[..., Figure]]" = field(default_factory=dict)
    stages: "Callable[[Entry], Sequence[Stage]] | None" = None
    name: str = ""
    settings: dict = field(default_factory=dict)
    default_guide: str = ""
    guide: G = _MADE_BELOW

    def __post_init__(self) -> None:
        self.default_guide = self.default_guide or next(iter(self.guides), "")
        check_known("default_guide", self.default_guide, self.guides)
        if self.guide is None:
            self.guide = cast(Any, self.make_guide(self.default_guide))

    def make_guide(self, name: str) -> Guide:
        """Return a new guide to this entry's model, by name.

        Raises:
            ValueError: no guide of that name fits; the message names the fitting guides.
        """
        check_known("guide", name, self.guides)
        maker = self.guides[name]
        guide = maker(self.model if isinstance(without_partials(maker), type) else self)
        _made_as[guide] = name
        return guide

    @property
    def observes_images(self) -> bool:
        """Whether the model is of images; False for a model of points."""
        return isinstance(self.model.space, ImageSpace)

    @property
    def guide_name(self) -> str:
        """The name under which `make_guide` made the guide; for other guides the default name."""
        return _made_as.get(self.guide, self.default_guide)

    def guide_of(self, kind: type[K]) -> K:
        """Return this entry's guide if it is of a class, so that variants can be made from it.

        Raises:
            ValueError: the guide is not of the class.
        """
        if not isinstance(self.guide, kind):
            raise ValueError(
                f"the entry's guide must be a {kind.__name__}, not {type(self.guide).__name__}; "
                "replace it before its variants are made"
            )
        return self.guide

    @property
    def with_enumerated_presences(self) -> "Entry":
        """Return this entry with scene presences enumerated; other models are unchanged."""
        if not hasattr(self.guide, "with_enumerated_presences"):
            return self
        guide = cast(Any, self.guide).with_enumerated_presences()
        return replace(self, model=guide.model, guide=guide)

    def use_guide(self, name: str) -> "Entry":
        """Replace this entry's guide by the named one, unless it is in use; return the entry."""
        if name != self.guide_name:
            self.guide = cast(Any, self.make_guide(name))
        self.default_guide = name
        return self


def draw_figure(
    figure: "Callable[..., Figure]", entry: Entry, load_images: Callable[[], Tensor]
) -> "Figure":
    """Draw a figure of an entry; images (B, C, H, W) are loaded only if it shows images."""
    needed = [p for p in signature(figure).parameters.values() if p.default is Parameter.empty]
    return figure(entry, load_images()) if len(needed) > 1 else figure(entry)
