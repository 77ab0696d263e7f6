"""Compute the statistics that ranks send of their sampled buckets, and pool them to a distribution.

Each statistic turns buckets into one float64 vector. Its length does not depend on the number of
buckets, so the pool of any number of ranks stays small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.adapt.schedule import WINDOW
from hvd_adaptive.base.checks import check_choice, check_flag, check_integer
from hvd_adaptive.base.tensors import stacked
from hvd_adaptive.kernels.constants import BINS
from hvd_adaptive.levels import LOG_EDGES, Distribution, Histogram, Mixture, with_tail

# Most components of a pooled normal mixture: 20 samples from each of 100 ranks.
MOST_COMPONENTS = 2048
# Squares of r in the middle of each bin, of zero and of one.
_SQUARES = np.concatenate([((LOG_EDGES[:-1] + LOG_EDGES[1:]) / 2) ** 2, [0.0, 1.0]])


class Sample(list[torch.Tensor]):
    """Buckets drawn from a larger set (float32, 1-D; the last one of a group may be shorter), and
    weights: the number of buckets that each one represents, up to a common factor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[float] = []

    def add(self, bucket: torch.Tensor, weight: float) -> None:
        """Append a bucket."""
        self.append(bucket)
        self.weights.append(weight)


def weights_of(buckets: Sequence[torch.Tensor]) -> list[float]:
    """Return the weight of each bucket: see ``Sample``."""
    return [*buckets.weights] if isinstance(buckets, Sample) else [1.0] * len(buckets)


def histograms(
    buckets: Sequence[torch.Tensor], scales: Sequence[float]
) -> Sequence[np.ndarray] | np.ndarray:
    """Return the ``histogram`` of each bucket, int64 (BINS + 2,), in one copy to the host."""
    pairs = zip(buckets, scales, strict=True)
    if not buckets:
        return []
    histogram = kernels.for_device(buckets[0].device).histogram
    return stacked([histogram(bucket, scale) for bucket, scale in pairs]).get().numpy()


class HistogramStatistic:
    """Log-spaced histograms of r, summed over the buckets, with and without the weights.

    The paper's section 3.4 allows general distributions. Under L2 normalisation its two moments
    contain almost no information about a bucket's shape, since mean**2 + variance is always 1/d.
    """

    def collect(
        self, buckets: Sequence[torch.Tensor], norms: Sequence[float], weights: Sequence[float]
    ) -> np.ndarray:
        """Return the statistics of finite, nonzero buckets (float32, 1-D, of any sizes), given
        their normalising norms and their weights in a ``Sample``.

        The result is float64 (3, bins + 3), flattened. The columns are sums over the coordinates of
        each bin, of zeros, of ones, and over the buckets. A bucket of weight w adds w times its
        squared norm, w, and the square of the former to the three rows.
        """
        total = np.zeros((3, BINS + 3))
        for norm, weight, counts in zip(norms, weights, histograms(buckets, norms), strict=True):
            square = weight * float(norm) ** 2
            total += np.outer([square, weight, square**2], np.append(counts, 1))
        return total.reshape(-1)

    def joined(self, steps: Sequence[np.ndarray]) -> np.ndarray:
        """Return the statistics of several steps of this rank as one vector, of a fixed length.

        All steps get the energy (sum of squares) of the last one that has any: a table is to suit
        the gradients of each step, and AMP's loss scale may have changed between them.
        """
        tables = np.reshape(steps, (len(steps), 3, -1))
        factors = _equalizing((tables[:, 0, :-1] * _SQUARES).sum(axis=1))[:, None]
        tables[:, 0] *= factors
        tables[:, 2] *= factors
        tables[:, 2] *= factors  # the square itself could overflow
        return tables.sum(axis=0).reshape(-1)

    def pool(self, collected: Sequence[np.ndarray], normalized: bool) -> Distribution:
        """Return the law of r = abs(v)/norm over all ranks' buckets: a histogram with atoms at zero
        and one, and with a tail beyond the samples.

        Coordinates are weighted by the squares of their buckets' norms (ALQ paper, Eq. 10: expected
        variance), or equally if ``normalized`` (Eq. 3: expected normalized variance). Both are sums
        over a bucket's coordinates, so a bucket with few has less weight.
        """
        weighted, plain, squared = self._sums(collected)
        if normalized:
            weighted = squared = plain
        with np.errstate(all="ignore"):  # a Histogram raises ValueError for what has overflowed
            buckets = weighted[-1] ** 2 / squared[-1]
            return with_tail(weighted[:-1], squared[:-1], buckets)

    def of_coordinates(self, collected: Sequence[np.ndarray]) -> Distribution:
        """Return the law of r of a coordinate drawn from any bucket, for the length of codes; it
        does not depend on the norms.
        """
        return Histogram.from_counts(self._sums(collected)[1, :-1])

    def _sums(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        return np.sum(collected, axis=0).reshape(3, BINS + 3)


class NormalStatistic:
    """Norm, mean and deviation of each bucket's normalised coordinates: the ALQ paper's model, with
    the methods of ``HistogramStatistic``.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def collect(
        self, buckets: Sequence[torch.Tensor], norms: Sequence[float], weights: Sequence[float]
    ) -> np.ndarray:
        """Return float64 (samples, 4), flattened.

        A row holds norm**2, coordinates (times the bucket's weight), mean and deviation; unused
        rows are zeros. Of more buckets than samples, some are left out, and the others count more.
        """
        rows = np.zeros((self.samples, 4))
        if buckets:
            kept = _spread(len(buckets), self.samples)
            moments = [_moments(buckets[i], norms[i]) for i in kept]
            rows[: len(kept), 0] = np.square(np.asarray(norms, np.float64)[kept])
            sizes = np.array([float(bucket.numel()) for bucket in buckets]) * weights
            rows[: len(kept), 1] = sizes[kept] * (len(buckets) / len(kept))
            rows[: len(kept), 2:] = stacked(moments).get().numpy()
        return rows.reshape(-1)

    def joined(self, steps: Sequence[np.ndarray]) -> np.ndarray:
        rows = np.zeros((WINDOW, self.samples, 4))
        rows[: len(steps)] = np.reshape(steps, (len(steps), -1, 4))
        squares, sizes, means, deviations = np.moveaxis(rows, -1, 0)
        energies = (squares * sizes * (means**2 + deviations**2)).sum(axis=1)
        squares *= _equalizing(energies)[:, None]
        return rows.reshape(-1)

    def pool(self, collected: Sequence[np.ndarray], normalized: bool) -> Distribution:
        """Return a folded mixture of truncated normals on [-1, 1], F_r(x) = F(x) - F(-x).

        The weight of a component is norm**2 times the bucket's coordinates: a component is the law
        of one coordinate, and the bucket's error is the sum over all of them. If ``normalized``,
        the result is a single component with the mean and deviation averaged over coordinates (over
        buckets of equal sizes, App. K.1).
        """
        squares, sizes, means, deviations = self._components(collected)
        if normalized:
            mean, deviation = (np.average(m, weights=sizes) for m in (means, deviations))
            return Mixture([mean], [deviation], [1.0])
        return _mixture(squares * sizes, means, deviations)

    def of_coordinates(self, collected: Sequence[np.ndarray]) -> Distribution:
        """Return the mixture in which each bucket has the weight of its coordinates."""
        _, sizes, means, deviations = self._components(collected)
        return _mixture(sizes, means, deviations)

    def _components(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        """Return rows of squared norms, coordinates, means and deviations, one for each bucket."""
        rows = np.concatenate([part.reshape(-1, 4) for part in collected])
        return rows[rows[:, 0] > 0].T


def _equalizing(energies: np.ndarray) -> np.ndarray:
    """Return factors that give all steps the energy of the last one whose energy is not zero."""
    some = energies > 0
    last = energies[some][-1] if some.any() else 1.0
    return np.divide(last, energies, out=np.ones_like(energies), where=some)


def _moments(bucket: torch.Tensor, norm: float) -> torch.Tensor:
    """Return mean and deviation of a bucket divided by its norm, float64 (2,)."""
    theta = bucket.to(torch.float64) / norm
    return torch.stack([theta.mean(), theta.std(correction=0)])


def _mixture(weights: np.ndarray, means: np.ndarray, deviations: np.ndarray) -> Mixture:
    kept = _spread(len(weights), MOST_COMPONENTS)
    weights = weights[kept]
    return Mixture(means[kept], deviations[kept], weights / weights.sum())


def _spread(count: int, most: int) -> np.ndarray:
    """Return all of ``count`` indices, or ``most`` of them, evenly spaced."""
    return np.linspace(0, count - 1, min(count, most)).astype(int)


STATISTICS: dict[str, Callable[[int], HistogramStatistic | NormalStatistic]] = {
    "histogram": lambda samples: HistogramStatistic(),
    "normal": NormalStatistic,
}


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Keywords of a scheme that is fitted to gradients, as ``schemes.alq.ALQ`` describes them."""

    normalized: bool = False
    update_steps: Iterable[int] | Callable[[int], bool] | None = None
    samples: int = 20
    statistics: str = "histogram"

    def __post_init__(self) -> None:
        check_flag("normalized", self.normalized)
        object.__setattr__(self, "samples", check_integer("samples", self.samples, 1))
        check_choice("statistics", self.statistics, STATISTICS)
