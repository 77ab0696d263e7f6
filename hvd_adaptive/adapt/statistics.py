"""What ranks send of their sampled buckets, and how the pool becomes a distribution.

Each statistic turns buckets into one float64 vector of fixed length, whatever the number of
buckets, so that the pool of any number of ranks stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.device import stacked
from hvd_adaptive.kernels.constants import BINS
from hvd_adaptive.levels import Distribution, Histogram, Mixture, with_tail

# Components of a pooled normal mixture at most: 20 samples from each of 100 ranks.
MOST_COMPONENTS = 2048


class Sample(list[torch.Tensor]):
    """Buckets drawn from many (float32, 1-D, the last one of a group may be shorter).

    weights: of how many of the many each one stands, up to a factor that all share. Buckets that
    are no Sample weigh 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[float] = []

    def add(self, bucket: torch.Tensor, weight: float) -> None:
        """One more."""
        self.append(bucket)
        self.weights.append(weight)


def weights_of(buckets: Sequence[torch.Tensor]) -> list[float]:
    """How much each bucket weighs: see Sample."""
    return buckets.weights if isinstance(buckets, Sample) else [1.0] * len(buckets)


class Statistic(Protocol):
    """One way to describe sampled buckets."""

    def collect(
        self,
        buckets: Sequence[torch.Tensor],
        norms: Sequence[float],
        weights: Sequence[float] | None = None,
    ) -> np.ndarray:
        """Statistics of finite, non-zero buckets (float32, 1-D, of any sizes) with their
        normalising norms and what they weigh in a Sample; 1 where None."""

    def pool(self, collected: Sequence[np.ndarray], normalized: bool) -> Distribution:
        """Law of r = abs(v)/norm over all ranks' buckets.

        Coordinates weigh as the squares of their buckets' norms (ALQ paper, Eq. 10: expected
        variance), or alike where ``normalized`` (Eq. 3: expected normalized variance). Either is a
        sum over a bucket's coordinates: one of few coordinates weighs less than one of many.
        """

    def of_coordinates(self, collected: Sequence[np.ndarray]) -> Distribution:
        """Law of r of a coordinate drawn from any bucket: what codes cost, whatever the norms."""


def histograms(
    buckets: Sequence[torch.Tensor], scales: Sequence[float]
) -> Sequence[np.ndarray] | np.ndarray:
    """Of each bucket (kernels' ``histogram``), int64 (BINS + 2,); by one copy to the host."""
    pairs = zip(buckets, scales, strict=True)
    if not buckets:
        return []
    ops = kernels.for_device(buckets[0].device)
    if buckets[0].is_cpu:
        return [ops.histogram(bucket, scale) for bucket, scale in pairs]
    return stacked([ops.counts(bucket, scale) for bucket, scale in pairs]).get().numpy()


class HistogramStatistic:
    """Log-spaced histograms of r, summed over the buckets, with and without the weights.

    The paper's section 3.4 allows general distributions; under L2 normalisation its two moments
    say almost nothing about a bucket's shape, since mean**2 + variance is always 1/d.
    """

    def collect(
        self,
        buckets: Sequence[torch.Tensor],
        norms: Sequence[float],
        weights: Sequence[float] | None = None,
    ) -> np.ndarray:
        """float64 (3, bins + 3), flattened: sums over the coordinates of each bin, zeros, ones, and
        over the buckets. A bucket of weight w adds w times its squared norm, w, and the square of
        the former."""
        total = np.zeros((3, BINS + 3))
        weights = [1.0] * len(buckets) if weights is None else weights
        for norm, weight, counts in zip(norms, weights, histograms(buckets, norms), strict=True):
            square = weight * float(norm) ** 2
            total += np.outer([square, weight, square**2], np.append(counts, 1))
        return total.reshape(-1)

    def pool(self, collected: Sequence[np.ndarray], normalized: bool) -> Distribution:
        """A histogram with atoms at zero and one, and a tail for what no sample shows."""
        weighted, plain, squared = self._sums(collected)
        if normalized:
            weighted = squared = plain
        buckets = weighted[-1] ** 2 / squared[-1]
        return with_tail(weighted[:-1], squared[:-1], buckets)

    def of_coordinates(self, collected: Sequence[np.ndarray]) -> Distribution:
        """See Statistic.of_coordinates; as it was counted."""
        counts = self._sums(collected)[1]
        return Histogram.from_counts(counts[:BINS], counts[BINS], counts[BINS + 1])

    def _sums(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        return np.sum(collected, axis=0).reshape(3, BINS + 3)


class NormalStatistic:
    """Norm, mean and deviation of each bucket's normalised coordinates: the paper's own model."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def collect(
        self,
        buckets: Sequence[torch.Tensor],
        norms: Sequence[float],
        weights: Sequence[float] | None = None,
    ) -> np.ndarray:
        """float64 (samples, 4) rows of norm**2, coordinates (times the bucket's weight), mean,
        deviation; rows of zeros where unused."""
        rows = np.zeros((max(self.samples, len(buckets)), 4))
        if buckets:
            moments = [_moments(*pair) for pair in zip(buckets, norms, strict=True)]
            rows[: len(buckets), 0] = np.square(np.asarray(norms, np.float64))
            sizes = np.array([float(bucket.numel()) for bucket in buckets])
            rows[: len(buckets), 1] = sizes if weights is None else sizes * weights
            rows[: len(buckets), 2:] = stacked(moments).get().numpy()
        return rows.reshape(-1)

    def pool(self, collected: Sequence[np.ndarray], normalized: bool) -> Distribution:
        """A folded mixture of truncated normals on [-1, 1], F_r(x) = F(x) - F(-x).

        A component weighs norm**2 times the bucket's coordinates: it is the law of one coordinate,
        and the bucket's error is the sum over all of them.
        ``normalized``: a single one, of the mean and deviation averaged over coordinates (over
        buckets of equal sizes, App. K.1).
        """
        squares, sizes, means, deviations = self._components(collected)
        if normalized:
            mean, deviation = (np.average(m, weights=sizes) for m in (means, deviations))
            return Mixture([mean], [deviation], [1.0])
        return _mixture(squares * sizes, means, deviations)

    def of_coordinates(self, collected: Sequence[np.ndarray]) -> Distribution:
        """The mixture in which each bucket weighs as many coordinates as it has."""
        _, sizes, means, deviations = self._components(collected)
        return _mixture(sizes, means, deviations)

    def _components(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        """Rows of squared norms, coordinates, means and deviations, of the buckets there are."""
        rows = np.concatenate([part.reshape(-1, 4) for part in collected])
        return rows[rows[:, 0] > 0].T


def _moments(bucket: torch.Tensor, norm: float) -> torch.Tensor:
    """Mean and deviation of a bucket over its norm: float64 (2,)."""
    theta = bucket.to(torch.float64) / norm
    return torch.stack([theta.mean(), theta.std(correction=0)])


def _mixture(weights: np.ndarray, means: np.ndarray, deviations: np.ndarray) -> Mixture:
    if len(weights) > MOST_COMPONENTS:
        kept = np.linspace(0, len(weights) - 1, MOST_COMPONENTS).astype(int)
        weights, means, deviations = weights[kept], means[kept], deviations[kept]
    return Mixture(means, deviations, weights / weights.sum())


STATISTICS: dict[str, Callable[[int], Statistic]] = {
    "histogram": lambda samples: HistogramStatistic(),
    "normal": NormalStatistic,
}
