"""Selection of the modes of a Gauss-Newton mixture: finite and distinct ones.

The rows of a batch are M modes of B images, one mode of all images after the other.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from capsule_zoo.guides import GaussNewton
from capsule_zoo.inference.annealing.path import AnnealedPath, State
from capsule_zoo.inference.check import name_of
from capsule_zoo.inference.log_weight import log_weights, not_a_number
from capsule_zoo.inference.not_finite import NonFiniteGuide

_FAR = 5.0  # standard deviations from the point at which values of sites must be finite
_JUDGED = 16  # draws for the evidence of a mode


def improper_by_site(
    path: AnnealedPath, state: State, groups: list[Tensor], precisions: list[Tensor]
) -> dict[str, Tensor]:
    """Return a mask of rows whose distribution is not finite, (B,) by continuous site.

    Rows whose values are not finite five standard deviations from the point count, too.
    """
    wrong = ~state.position.isfinite()
    scale = torch.zeros_like(state.position)
    for group, matrix in zip(groups, precisions, strict=True):
        factor, failed = torch.linalg.cholesky_ex(matrix)
        rows = (failed != 0) | ~matrix.isfinite().flatten(1).all(1)
        wrong[:, group] |= rows[:, None]
        factor[rows] = torch.eye(len(group)).to(factor)
        variance = torch.cholesky_inverse(factor).diagonal(dim1=1, dim2=2)
        scale[:, group] = variance.sqrt().to(scale)
    by_site = {name: wrong[:, item.columns].any(1) for name, item in path.places.items()}
    for side in (-_FAR, _FAR):
        values, _ = path.continuous.split(state.position + side * scale)
        for name, item in values.items():
            by_site[name] |= ~item.reshape(len(item), -1).isfinite().all(1)
    return by_site


def proper_rows(improper: Tensor, modes: int) -> Tensor:
    """Return the index of each row or, if it is improper, of a proper mode of its image.

    An image without a proper mode keeps an improper one.

    Args:
        improper: mask of improper rows, (M B,).
    """
    rows = torch.arange(len(improper), device=improper.device).view(modes, -1)
    proper = (~improper).view(modes, -1)
    first = proper.int().argmax(0)
    return torch.where(proper, rows, rows[first, rows[0]]).flatten()


def refuse_improper(
    path: AnnealedPath,
    state: State,
    by_site: dict[str, Tensor],
    modes: int,
    parameters_by_site: Callable[[AnnealedPath, State], dict[str, list[tuple[Tensor, Tensor]]]],
) -> None:
    """Raise NonFiniteGuide for images without a proper mode, naming the first site.

    Args:
        by_site: mask of improper rows, (M B,), by continuous site.
        parameters_by_site: returns the parameters of every site and the roots of their Fisher
            information. The first site where these are not finite is named, if there is one.
    """
    rows = torch.nonzero(torch.stack([*by_site.values()]).any(0)).flatten()
    if not len(rows):
        return
    first = next(name for name, wrong in by_site.items() if wrong.any())
    sites = parameters_by_site(path.at(path.images[rows]), state.rows(rows))
    for name, parameters in sites.items():
        weighted = [torch.where(root == 0, 0.0, root * parameter) for parameter, root in parameters]
        if not all(parameter.isfinite().all() for parameter in weighted):
            first = name
            break
    subject = f"the Gauss-Newton distribution of {name_of(path.model)}"
    number = len(path.images) // modes
    raise NonFiniteGuide.of(subject, (row % number for row in rows.tolist()), number, first)


@torch.no_grad()
def evidence_of(guide: GaussNewton, images: Tensor) -> Tensor:
    """Estimate log p(image), up to a constant, by each mode alone, from a few draws, (M B,).

    A draw whose log weight is not a number counts as impossible.
    """
    guide = guide.discretize()
    draws = torch.stack([log_weights(guide.model, guide, images)[0] for _ in range(_JUDGED)])
    return draws.masked_fill(not_a_number(draws), -math.inf).logsumexp(0)


def duplicates(
    state: State, groups: list[Tensor], precisions: list[Tensor], evidence: Tensor
) -> Tensor:
    """Return a mask of modes that equal another mode with more evidence, (M, B).

    Two modes are one if their choices are the same and they are nearer to each other than draws
    of the distribution are to its middle.
    """
    modes = len(evidence)
    position = state.position.double().unflatten(0, (modes, -1))
    apart = position[:, None] - position  # (M, M, B, D), first minus second
    distance = sum(
        torch.einsum("mobi,obij,mobj->mob", part, matrix.unflatten(0, (modes, -1)), part)
        for part, matrix in ((apart[..., g], p) for g, p in zip(groups, precisions, strict=True))
    )
    same = torch.as_tensor(distance < position.shape[-1])
    for value in state.choices.values():
        values = value.unflatten(0, (modes, -1)).flatten(2)
        same &= (values[:, None] == values).all(-1)
    rank = evidence.argsort(0, descending=True).argsort(0)
    return (same & (rank[:, None] > rank)).any(1)
