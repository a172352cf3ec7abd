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
        log_likelihood: log likelihood of each row, relative to the picture in which none of the
            members is present, (M,), in nats.
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
        """The log weight of each row, relative to that without members, (M,), in nats."""
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

    def among(self, remaining: Tensor) -> "Cluster":
        """Return the distribution given that all other proposals than some, bool (K,), are absent.

        Its members are indices among the remaining ones.
        """
        here = remaining[self.members]
        rows = ~(self.rows[:, ~here] > 0).any(1)
        members = (remaining.cumsum(0) - 1)[self.members[here]]
        return replace(
            self,
            members=members,
            rows=self.rows[rows][:, here],
            log_likelihood=self.log_likelihood[rows],
            log_ratio=self.log_ratio[rows],
        )


class Part(NamedTuple):
    """Some pixels, and the proposals that paint them.

    Attributes:
        painters: the proposals, bool (m,), of which p are.
        layers: their terms in the sums of `Scenes.mix_layers`, each (p, c, n).
        image, ground: (C, n).
    """

    painters: Tensor
    layers: list[Tensor]
    image: Tensor
    ground: Tensor


class Moves(NamedTuple):
    """Moves between presences: flips of one or two, and one object in place of all close ones.

    Attributes:
        changed: the members that a move may change, bool (F, m).
        member: the member that is put in place of the others, (F,); -1 for a flip of all.
    """

    changed: Tensor
    member: Tensor

    @staticmethod
    def among(centers: Tensor, close: float) -> "Moves":
        """Return the moves of members with centers (m, 2).

        Args:
            close: distance up to which two are flipped at once, or one takes the place of others.
        """
        one = torch.eye(len(centers), dtype=torch.bool)
        near = torch.cdist(centers, centers) <= close
        pairs = near.triu(1).nonzero()
        member = (near.sum(1) > 2).nonzero()[:, 0]  # flips put it in place of one
        changed = torch.cat([one, one[pairs].any(1), near[member]])
        flips = member.new_full((len(changed) - len(member),), -1)
        return Moves(changed, torch.cat([flips, member]))

    def neighbors(self, presence: Tensor) -> Tensor:
        """Return the presences, (F, m), to which the moves lead from presences (m,)."""
        one = F.one_hot(self.member.clamp_min(0), len(presence)).to(presence)
        replaced = presence * ~self.changed + one
        flipped = (presence - self.changed.to(presence)).abs()
        return torch.where(self.member[:, None] < 0, flipped, replaced)


def climb(
    score: Callable[[Tensor, Part], Tensor],
    log_ratio: Tensor,
    start: Tensor,
    moves: Moves,
    parts: list[Part],
) -> tuple[Tensor, Tensor]:
    """Return presences that no move improves, (m,), and what each move adds to their score, (F,).

    A move changes only the pixels that its members paint, so only these are scored, and only again
    where another move has changed what they show. So the cost grows as m does.

    Args:
        score: returns the log likelihood of presences (M, m) at the pixels of a part.
        log_ratio: what the presence of each adds to the score, (m,), in nats.
        start: first presences, (m,).
        moves: the F moves of a step.
        parts: the part that each move changes.
    """
    now, gains = start, torch.zeros(len(parts)).to(start)
    painters = torch.stack([part.painters for part in parts])
    outdated = torch.ones(len(parts), dtype=torch.bool)
    for _ in range(2 * len(start)):
        near = moves.neighbors(now)
        for index in outdated.nonzero()[:, 0].tolist():
            after, before = score(torch.stack([near[index], now]), parts[index])
            gains[index] = after - before
        total = gains + (near - now) @ log_ratio
        best = total.argmax()
        if total[best] <= 0:
            break
        outdated = painters[:, near[best] != now].any(1)
        now = near[best]
    return now, gains


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
