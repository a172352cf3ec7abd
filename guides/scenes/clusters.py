"""Clusters of proposals that paint common pixels, and the distribution of their presences.

See `guides.scenes.whole_pictures`, which makes the proposals.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

MOST = 10  # proposals of a cluster whose subsets are all summed
DOUBT = (0.37, 0.61, 1.0, 1.64, 2.7)  # factors of the power that are equally probable
AT_ONCE = 128  # subsets that are painted at once


@dataclass(frozen=True, eq=False)
class Cluster:
    """The proposals that interact, and the distribution of their presences.

    Attributes:
        members: indices of the proposals, (m,).
        rows: presences, (M, m).
        log_likelihood: log likelihood of each row, relative to the picture without objects, (M,),
            in nats.
        log_ratio: sum of log v of the present proposals, (M,), in nats.
        power: power of the likelihood in the weights.
    """

    members: Tensor
    rows: Tensor
    log_likelihood: Tensor
    log_ratio: Tensor
    power: float

    @property
    def log_row_weight(self) -> Tensor:
        """The log weight of each row, relative to the picture without objects, (M,), in nats."""
        return self.power * self.log_likelihood + self.log_ratio

    @property
    def probabilities(self) -> Tensor:
        """The probability of each row, (M,)."""
        return self.log_row_weight.softmax(0)

    @property
    def presence(self) -> Tensor:
        """The probability that each proposal is present, (m,)."""
        return self.probabilities @ self.rows

    @property
    def best(self) -> Tensor:
        """The likeliest presences, (m,)."""
        return self.rows[self.log_row_weight.argmax()]

    @property
    def counts(self) -> Tensor:
        """The distribution of the number of objects, (m + 1,)."""
        number = self.rows.sum(1).long()
        return self.rows.new_zeros(self.rows.shape[1] + 1).index_add(0, number, self.probabilities)


class Part(NamedTuple):
    """Some proposals of a cluster at some of its pixels.

    Attributes:
        members: the proposals, (m,).
        layers: their terms in the sums of `Scenes.mix_layers`, each (m, c, n).
        image, ground: (C, n).
    """

    members: Tensor
    layers: list[Tensor]
    image: Tensor
    ground: Tensor

    def restrict(self, painted: Tensor, flip: Tensor) -> "Part":
        """Return the part that flipped members change, and the members that paint there.

        Args:
            painted: the pixels that each member paints, bool (m, n).
            flip: the members that are flipped, bool (m,).
        """
        where = painted[flip].any(0).nonzero()[:, 0]
        who = painted[:, where].any(1).nonzero()[:, 0]
        layers = [x[who][..., where] for x in self.layers]
        return Part(who, layers, self.image[:, where], self.ground[:, where])


def climb(
    score: Callable[[Tensor, Part], Tensor],
    log_ratio: Tensor,
    start: Tensor,
    flips: Tensor,
    parts: list[Part],
) -> tuple[Tensor, Tensor]:
    """Return the presences that a greedy search visits, (M, m), and their scores, (M,).

    A flip changes only the pixels that its members paint, so only these are scored.

    Args:
        score: returns the log likelihood of presences in a part of the cluster.
        log_ratio: what the presence of each adds to the score, (m,), in nats.
        start: first presences, (m,).
        flips: members that are flipped at once, bool (F, m).
        parts: the whole cluster, and the part that each flip changes, F + 1 in all.
    """
    now, best = start, score(start[None], parts[0])[0]
    rows, scores = [now[None]], [best[None]]
    for _ in range(2 * len(start)):
        near = (now - flips.to(now)).abs()
        gains = []
        for row, part in zip(near, parts[1:], strict=True):
            both = score(torch.stack([row, now])[:, part.members], part)
            gains.append(both[0] - both[1])
        values = best + torch.stack(gains)
        rows.append(near)
        scores.append(values)
        total = values + near @ log_ratio
        if total.max() <= best + now @ log_ratio:
            break
        now, best = near[total.argmax()], values[total.argmax()]
    unique, index = torch.cat(rows).unique(dim=0, return_inverse=True)
    return unique, unique.new_zeros(len(unique)).scatter(0, index, torch.cat(scores))


def distribution_of_number(clusters: list[Cluster]) -> Tensor:
    """Return the distribution of the number of objects of all clusters, (K + 1,).

    The power of the likelihood is an estimate. The distribution is the mean over the powers
    `DOUBT` times as large, so that numbers that another power would give are not excluded.
    """
    counts = []
    for factor in DOUBT:
        varied = [replace(c, power=c.power * factor) for c in clusters]
        counts.append(convolve([cluster.counts for cluster in varied]))
    return torch.stack(counts).mean(0)


def presence_of(clusters: list[Cluster]) -> Tensor:
    """Return the probability that each proposal is present, (K,)."""
    return _in_order(clusters, [cluster.presence for cluster in clusters])


def best_of(clusters: list[Cluster]) -> Tensor:
    """Return the likeliest presences of all proposals, (K,)."""
    return _in_order(clusters, [cluster.best for cluster in clusters])


def _in_order(clusters: list[Cluster], values: list[Tensor]) -> Tensor:
    """Join values of the members of clusters, in the order of the proposals, (K,)."""
    if not clusters:
        return torch.zeros(0)
    members = torch.cat([cluster.members for cluster in clusters])
    return torch.cat(values)[members.argsort()]


def convolve(counts: list[Tensor]) -> Tensor:
    """Return the distribution of a sum of independent numbers, from that of each."""
    total = torch.ones(1, dtype=counts[0].dtype if counts else None)
    for one in counts:
        total = F.conv1d(total[None, None], one.flip(0)[None, None], padding=len(one) - 1)[0, 0]
    return total
