"""Refusal of guides whose density is not finite for some images, with the name of the site.

Pyro's validation prints all numbers of a batch, without the index of the image.
"""

from collections.abc import Callable, Iterable
from typing import Self

import torch
from pyro import validation_enabled
from torch import Tensor

from capsule_zoo.guides.per_image.base import PerImageGuide
from capsule_zoo.inference.log_weight import log_weights, not_a_number, site_not_finite

# errors of Pyro's validation and torch.linalg for numbers that are not finite
NAMING_NO_IMAGE = ValueError, torch.linalg.LinAlgError  # type: ignore[attr-defined]


class NonFiniteGuide(ValueError):
    """The error raised for a guide that is not finite at some images.

    Attributes:
        images: indices of these images in the batch.
        site: the first site where it is not finite; None if it is not known.
        subject: name of the guide.
    """

    images: list[int]
    site: str | None
    subject: str

    @classmethod
    def of(cls, subject: str, images: Iterable[int], number: int, site: str | None) -> Self:
        """Return the error of a guide to `number` images, in a form that can be pickled."""
        indices = sorted({*images})
        where = "" if site is None else f" at site {site!r}"
        noun = "images" if len(indices) > 1 else "image"
        listed = ", ".join(map(str, indices[:5])) + ", ..." * (len(indices) > 5)
        error = cls(
            f"{subject} is not finite{where} for {noun} {listed} of {number}; use another guide or "
            "seed, or leave such images out"
        )
        error.images, error.site, error.subject = indices, site, subject
        return error

    @property
    def first(self) -> "NonFiniteGuide":
        """The original error with its attributes, which the copies that Pyro raises lack."""
        return self.__cause__.first if isinstance(self.__cause__, NonFiniteGuide) else self


def refuse_non_finite(guide: PerImageGuide, images: Tensor, objective: Tensor) -> None:
    """Raise NonFiniteGuide where parameters of a guide, or the objective under it, are not finite.

    Args:
        images: (B, C, H, W), to which the guide belongs, or these several times over.
        objective: objective of each image, (B,), in nats. Minus infinity (density zero) is valid.
    """
    by_site = guide.not_finite()
    bad = torch.stack([*by_site.values(), not_a_number(objective)]).any(0)
    if not bad.any():
        return
    site = next((name for name, rows in by_site.items() if rows.any()), None)
    if site is None:
        site = non_finite(guide.model, guide, images[: guide.num_images])[1]
    subject = f"{type(guide).__name__} of {type(guide.model).__name__}"
    raise NonFiniteGuide.of(subject, torch.nonzero(bad).flatten().tolist(), guide.num_images, site)


@torch.no_grad()
def non_finite(
    model: Callable, guide: Callable, images: Tensor, labels: Tensor | None = None
) -> tuple[list[int], str | None]:
    """Return the images with a log weight that is not finite, and the first site to blame.

    It serves to explain an error of Pyro's validation, which is off here.
    """
    with validation_enabled(False), torch.random.fork_rng():
        weight, model_trace, guide_trace = log_weights(model, guide, images, labels)
        bad = not_a_number(weight)
        if not bad.any():
            return [], None
        site = site_not_finite(images, model_trace, guide_trace, bad)
    return torch.nonzero(bad).flatten().tolist(), site
