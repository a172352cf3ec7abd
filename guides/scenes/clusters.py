"""Clusters of proposals that paint common pixels, and the distribution of their presences.

See `guides.scenes.whole_pictures`, which makes the proposals.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.guides.scenes.patches import Part, Patches, Picture, label_connected, split_by
from capsule_zoo.models.scenes.counts import subsets_of

MOST = 10  # proposals of a cluster whose subsets are all summed
DOUBT = (0.37, 0.61, 1.0, 1.64, 2.7)  # factors of the power that are equally probable
CLOSE = 0.6  # distance, in default sizes, up to which two objects may be parts of one
LEAST_PRESENCE = 1e-4  # least probability with which a proposal is kept


@dataclass(frozen=True, eq=False)
class Cluster:
    """The proposals that interact, and the distribution of their presences.

    Attributes:
        members: indices of the proposals, (m,).
        rows: presences, (M, m).
        log_likelihood: log likelihood of each row, relative to the picture in which none of the
            members is present, (M,), in nats. It is not computed, but 0, for a single row.
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


class ClusterSums:
    """Sums over presences of the m proposals of one connected set, given no others.

    Args:
        picture: the picture that they paint.
        patches: the proposals.
        touching: which of them paint common pixels, bool (m, m).
        power: power of the likelihood.
    """

    def __init__(self, picture: Picture, patches: Patches, touching: Tensor, power: float) -> None:
        self.picture, self.patches, self.touching = picture, patches, touching
        self.power, self.pixels = power, picture.pixels_by_patch(patches)

    def clusters(self, most: int, start: Tensor) -> list[Cluster]:
        """Return the distributions of the presences.

        They are one cluster if m is at most `most`. Otherwise members that are certain are one
        cluster of a single row, and the others are clusters given these.

        Args:
            start: presences from which the search begins where m is large, (m,).
        """
        if len(start) <= most:
            rows = subsets_of(len(start), self.patches.log_ratio)
            return [self.sum_rows(torch.arange(len(start)), rows, torch.zeros_like(start))]
        moves = Moves.among(self.patches.pose[:, 1:3], CLOSE * self.picture.model.size)
        best, near, uncertain = self.search(moves, start)
        changed = near != best
        certain = (~uncertain).nonzero()[:, 0]
        ratio = (best * self.patches.log_ratio)[certain].sum(0, keepdim=True)
        alone = Cluster(certain, best[certain][None], torch.zeros_like(ratio), ratio, self.power)
        clusters = [alone]
        left = uncertain.nonzero()[:, 0]
        for part in split_by(label_connected(self.touching[left][:, left].numpy())):
            members = left[part]
            if len(members) <= most:
                rows = subsets_of(len(members), self.patches.log_ratio)
            else:
                outside = torch.ones_like(uncertain).index_fill(0, members, False)
                inside = near[~changed[:, outside].any(1)]
                rows = torch.cat([best[None], inside])[:, members].unique(dim=0)
            clusters.append(self.sum_rows(members, rows, best))
        return clusters

    @torch.no_grad()
    def search(self, moves: "Moves", start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return presences that no move improves, and what may be uncertain of them.

        Returns:
            The presences, (m,), those to which possible moves lead, (n, m), and the members that
            these change, bool (m,). A move is possible if its probability relative to the best is
            above `LEAST_PRESENCE` with some power of the likelihood out of `DOUBT`.
        """
        parts = [self.part_of(changed) for changed in moves.changed]
        log_ratio = self.patches.log_ratio
        best, gains = climb(
            self.picture.log_likelihood, log_ratio / self.power, start, moves, parts
        )
        near = moves.neighbors(best)
        change = (near - best) @ log_ratio
        total = torch.stack([self.power * factor * gains + change for factor in DOUBT]).amax(0)
        near = near[total > math.log(LEAST_PRESENCE)]
        return best, near, (near != best).any(0)

    def part_of(self, members: Tensor) -> Part:
        """Return the pixels that some members paint, bool (m,), with all that paint there."""
        pixels = [self.pixels[index] for index in members.nonzero()[:, 0].tolist()]
        flat = torch.cat(pixels).unique()
        return self.picture.part(self.patches, self.touching[members].any(0), flat)

    def sum_rows(self, members: Tensor, rows: Tensor, presence: Tensor) -> Cluster:
        """Return the distribution over presences of some members, given those of all others.

        Args:
            members: indices, (n,).
            rows: presences of the members, (M, n).
            presence: presences of all, (m,).
        """
        part = self.part_of(torch.zeros_like(presence).index_fill(0, members, 1.0) > 0)
        others = presence.index_fill(0, members, 0.0).repeat(len(rows) + 1, 1)
        others[1:, members] = rows
        scores = self.picture.log_likelihood(others, part)
        ratio = rows @ self.patches.log_ratio[members]
        return Cluster(members, rows, scores[1:] - scores[0], ratio, self.power)


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
