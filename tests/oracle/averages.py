"""What the average of several ranks may be: the exchanges, as docs/exchange pages define them.

allgather: the mean of every rank's decoded vector. scatter_reduce: the same, quantised once more,
without bias, by a second codec. hierarchical: a node's ranks are averaged exactly, nodes' means are
quantised. Whole buckets travel together in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oracle.bounds import deviation
from oracle.laws import SMALLEST, Law, Quantiser, buckets, fixed


@dataclass
class Expected:
    """Of an average (n,).

    law: of the mean of what ranks, or nodes, sent.
    added, added_reach: variance and largest error that a second stage adds, both at most; None if
        there is no second stage.
    rounding: of floats, at most: any error up to it is allowed.
    """

    law: Law
    rounding: np.ndarray
    added: np.ndarray | None = None
    added_reach: np.ndarray | None = None


def mean_of(laws: Sequence[Law]) -> Law:
    """Of independent vectors."""
    count = len(laws)
    variances = np.array([law.variance for law in laws])
    variance = variances.sum(0) / count**2
    pairs = 3 * (variance**2 - (variances**2).sum(0) / count**4)
    fourth = sum(law.fourth for law in laws) / count**4 + pairs
    mean, low, high = (
        sum(getattr(law, name) for law in laws) / count for name in ("mean", "low", "high")
    )
    if laws[0].block is None:
        return Law(mean, variance, fourth, low, high)
    energy = (sum(np.sqrt(law.block_energy) for law in laws) / count) ** 2

    def quadratic(w: np.ndarray) -> float:
        return sum(law.quadratic(w) for law in laws) / count**2

    return Law(mean, variance, fourth, low, high, laws[0].block, energy, quadratic)


def node_means(vectors: Sequence[np.ndarray], ranks_per_node: int) -> list[np.ndarray]:
    """Exact; ranks that follow each other share a node."""
    nodes = range(0, len(vectors), ranks_per_node)
    return [np.mean(vectors[at : at + ranks_per_node], axis=0) for at in nodes]


def second_stage(q: Quantiser, first: Law, chance: float) -> tuple[np.ndarray, np.ndarray]:
    """(variance, reach) that quantising an average of the law ``first`` adds, at most.

    The average a is not known, but lies between first.low and first.high, and its norm is, but for
    ``chance``, within what Bernstein's inequality leaves. A coordinate between two levels l < u of
    the norm N has at most the variance (u - l)² N²/4.
    """
    reach = np.zeros(first.mean.size)
    uniform = q.scheme == "ecdq"
    for own in buckets(first.mean.size, q.bucket_size):
        low, high = first.low[own], first.high[own]
        if np.isnan(first.mean[own]).any():
            reach[own] = np.nan
            continue
        most = np.maximum(np.abs(low), np.abs(high))
        least = np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
        if not uniform and q.norm == "linf":
            least_norm, norm = least.max(), most.max()
        else:
            least_norm, norm = l2_range(first, own, most, chance)
        if norm < SMALLEST:
            continue
        if uniform:
            reach[own] = q.delta * norm / np.sqrt(own.stop - own.start) / 2
            continue
        top = np.minimum(most / max(least_norm, SMALLEST), 1.0)
        reach[own] = norm * widest_gap(q.levels, least / norm, top)
    return (reach**2 / 3 if uniform else reach**2 / 4), reach


def l2_range(first: Law, own: slice, most: np.ndarray, chance: float) -> tuple[float, float]:
    """Of a bucket's L2 norm."""
    variance, largest = first.variance[own], first.reach[own].max() ** 2
    spread = first.fourth[own].sum() - (variance**2).sum()
    if first.block is not None:
        largest = first.block_energy[first.block[own.start]]
        spread = largest * variance.sum()
    error = np.sqrt(variance.sum() + deviation(max(spread, 0.0), largest, chance))
    exact = np.linalg.norm(first.mean[own])
    return max(0.0, exact - error), min(float(np.linalg.norm(most)), exact + error)


def widest_gap(levels: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The widest gap between neighbouring levels that a coordinate of a size from ``low`` to
    ``high`` can lie in."""
    begin = np.searchsorted(levels, low * (1 - 1e-6), side="right") - 1
    end = np.searchsorted(levels, high * (1 + 1e-6), side="left")
    gaps = np.diff(levels)
    begin, end = np.clip(begin, 0, gaps.size - 1), np.clip(end, 1, gaps.size)
    # If ``end`` is not beyond ``begin``, reduceat takes that gap alone; a 0 stands for a last end.
    ends = np.stack([begin, end], axis=1).reshape(-1)
    return np.maximum.reduceat(np.append(gaps, 0.0), ends)[::2]


def exact(mean: np.ndarray, rounding: np.ndarray) -> Expected:
    """A section in full precision."""
    return Expected(fixed(mean), rounding)
