"""What a decoded vector may be: exact mean and variance of each coordinate, given the vector.

Coordinates are independent, but for those of QCS, which depend on each other within a bucket
(projected.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oracle.projected import along_all, projections

SMALLEST = 2.0**-126  # a float32 below is not normal: such norms and steps count as zero


@dataclass
class Law:
    """Of the values (n,) that a receiver decodes, given what was encoded.

    mean, variance: of each coordinate.  fourth: its fourth central moment.
    low, high: no value is below or above.
    block: the number of each coordinate's block; coordinates of a block depend on each other, and
        variances are upper bounds. None if all coordinates are independent.
    block_energy: by block, most that the squared errors can sum up to.
    quadratic: the most that the variance of Σ w_i e_i can be, if there are blocks.
    """

    mean: np.ndarray
    variance: np.ndarray
    fourth: np.ndarray
    low: np.ndarray
    high: np.ndarray
    block: np.ndarray | None = None
    block_energy: np.ndarray | None = None
    quadratic: Callable[[np.ndarray], float] | None = None

    @property
    def reach(self) -> np.ndarray:
        """Largest distance from the mean."""
        return np.maximum(self.mean - self.low, self.high - self.mean)


@dataclass(frozen=True)
class Quantiser:
    """A scheme as its paper defines it, with what is in force in it.

    scheme: the name in payloads.  bucket_size.  clip: c of ALQ's Eq. 49, None for none.
    levels: signed, ascending, the shared table's (alq, amq, qsgd, nuqsgd, terngrad).
    norm: "l2" or "linf".
    of_bucket: those of each bucket, (buckets, alphabet), of orq, linear_quantile and bingrad.
    variant, iterate: bingrad's.  density: sparse's.  delta: ecdq's step in root mean squares.
    measurements, quantizer_range, estimator: qcs's.
    """

    scheme: str
    bucket_size: int
    clip: float | None = None
    levels: np.ndarray | None = None
    norm: str = "l2"
    of_bucket: np.ndarray | None = None
    variant: str = ""
    iterate: bool = False
    density: float = 1.0
    delta: float = 0.0
    measurements: int = 0
    quantizer_range: float = 0.0
    estimator: str = "unbiased"


def buckets(count: int, size: int) -> list[slice]:
    """The last one may be shorter."""
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]


def norms(v: np.ndarray, size: int, norm: str) -> np.ndarray:
    """Of each bucket: NaN where it is not finite, 0 where it is below the normal range."""
    found = []
    for own in buckets(v.size, size):
        part = np.abs(v[own])
        value = float(part.max()) if norm == "linf" else float(np.sqrt((part * part).sum()))
        found.append(value if np.isfinite(value) else np.nan)
    values = np.array(found, float)
    values[values < SMALLEST] = 0.0
    return values


def clipped(v: np.ndarray, size: int, clip: float | None) -> np.ndarray:
    """ALQ paper, Eq. 49: coordinates beyond c root mean squares of their bucket are cut back."""
    if clip is None:
        return v
    out = v.copy()
    for own in buckets(v.size, size):
        limit = clip * np.sqrt((v[own] ** 2).mean())
        out[own] = np.clip(v[own], -limit, limit) if np.isfinite(limit) else np.nan
    return out


def fixed(values: np.ndarray) -> Law:
    """No randomness."""
    zero = np.zeros(values.shape)
    return Law(values, zero, zero, values, values)


def two_points(mean: np.ndarray, low: np.ndarray, high: np.ndarray) -> Law:
    """low or high, so that the mean is right: with p = (mean - low)/(high - low) the variance is
    (high - mean)(mean - low), and E(e⁴) = variance · (gap² - 3 variance)."""
    with np.errstate(invalid="ignore"):
        variance = np.maximum((high - mean) * (mean - low), 0.0)
        fourth = np.maximum(variance * ((high - low) ** 2 - 3 * variance), 0.0)
    return Law(mean, variance, fourth, low, high)


def of_table(q: Quantiser, v: np.ndarray) -> Law:
    """QSGD (Eq. 4), NUQSGD, ALQ (Eq. 1): v/norm becomes one of the two levels around it."""
    assert q.levels is not None
    scale = np.repeat(norms(v, q.bucket_size, q.norm), q.bucket_size)[: v.size]
    with np.errstate(all="ignore"):
        r = np.clip(np.where(scale > 0, v / scale, 0.0), q.levels[0], q.levels[-1])
    upper = np.clip(np.searchsorted(q.levels, r, side="left"), 1, q.levels.size - 1)
    low, high = q.levels[upper - 1] * scale, q.levels[upper] * scale
    zero = scale == 0
    low, high = np.where(zero, 0.0, low), np.where(zero, 0.0, high)
    return two_points(np.where(np.isnan(scale), np.nan, r * scale), low, high)


def of_bucket_levels(q: Quantiser, v: np.ndarray) -> Law:
    """ORQ (Eq. 7), Linear-s, BinGrad-pb (Eq. 14): rounded at random between the two levels around;
    beyond the outermost ones it becomes the nearest one."""
    assert q.of_bucket is not None
    low, high = np.zeros(v.size), np.zeros(v.size)
    mean = np.zeros(v.size)
    for own, levels in zip(buckets(v.size, q.bucket_size), q.of_bucket, strict=True):
        if np.isnan(levels).any():
            mean[own] = low[own] = high[own] = np.nan
            continue
        mean[own] = np.clip(v[own], levels[0], levels[-1])
        upper = np.clip(np.searchsorted(levels, mean[own], side="left"), 1, levels.size - 1)
        low[own], high[own] = levels[upper - 1], levels[upper]
        exact = mean[own] == high[own]
        low[own] = np.where(exact, high[own], low[own])
    return two_points(mean, low, high)


def of_two_sides(q: Quantiser, v: np.ndarray) -> Law:
    """One-bit SGD: the means of the coordinates below zero and of the others.  BinGrad-b (ORQ
    paper, Eqs 16, 17): of those below the bucket's mean and of the others; ``iterate`` moves the
    cut to the middle of the two means until it stays."""
    out = np.full(v.size, np.nan)
    for own in buckets(v.size, q.bucket_size):
        part = v[own]
        if np.isfinite(part).all():
            cut = 0.0 if q.scheme == "onebit" else float(np.float32(part.mean()))
            out[own] = sides(part, cut)
            while q.iterate and (moved := float(np.float32(np.unique(out[own]).mean()))) != cut:
                cut = moved
                out[own] = sides(part, cut)
    return fixed(out)


def sides(part: np.ndarray, cut: float) -> np.ndarray:
    """Each coordinate's side's mean."""
    above = part >= cut
    return np.where(above, *(part[s].mean() if s.any() else 0.0 for s in (above, ~above)))


def of_signs(q: Quantiser, v: np.ndarray) -> Law:
    """ORQ paper, Eq. 13: the sign times the mean magnitude; zero counts as positive."""
    out = np.empty(v.size)
    for own in buckets(v.size, q.bucket_size):
        size = np.abs(v[own]).mean()
        out[own] = np.where(v[own] >= 0, size, -size) if np.isfinite(size) else np.nan
    return fixed(out)


def of_powers(q: Quantiser, v: np.ndarray) -> Law:
    """Natural compression (Horváth et al., Eq. 5): the two powers of two around."""
    size = np.abs(v)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.where(size > 0, size, 1.0)))
        exponent -= 2.0**exponent > size  # log2 rounds
        exponent += 2.0 ** (exponent + 1) <= size
    low = np.where(size < SMALLEST, 0.0, 2.0**exponent)
    high = np.where(size == 0, 0.0, np.where(size < SMALLEST, SMALLEST, 2 * low))
    high = np.where(size == low, low, high)
    for own in buckets(v.size, q.bucket_size):
        if not np.isfinite(v[own]).all():
            size[own] = np.nan
    low, high = np.where(v < 0, -high, low), np.where(v < 0, -low, high)
    return two_points(np.where(np.isnan(size), np.nan, v), low, high)


def of_sparse(q: Quantiser, v: np.ndarray) -> Law:
    """Wangni et al., Eq. 4: kept with p = min(1, |v|/λ), as v/p; the sum of p is density times the
    bucket's size, or all that is not zero where that is less."""
    size, limit = np.abs(v), np.empty(v.size)
    for own in buckets(v.size, q.bucket_size):
        limit[own] = threshold(size[own], q.density)
    with np.errstate(invalid="ignore"):
        random = (size < limit) & (size >= SMALLEST)
        low = np.where(random, np.where(v < 0, -limit, 0.0), v)
        high = np.where(random, np.where(v < 0, 0.0, limit), v)
    low, high = (np.where(np.isnan(limit), np.nan, side) for side in (low, high))
    return two_points(np.where(np.isnan(limit), np.nan, v), low, high)


def threshold(sizes: np.ndarray, density: float) -> float:
    """λ with Σ min(1, |v|/λ) = density n, found by trying each number of exact coordinates."""
    if not np.isfinite(sizes).all():
        return float("nan")
    ordered = np.sort(sizes[sizes >= SMALLEST])[::-1]
    wanted, rests = density * sizes.size, np.cumsum(ordered[::-1])[::-1]
    for exact, (value, rest) in enumerate(zip(ordered, rests, strict=True)):
        if wanted <= exact:
            break
        limit = rest / (wanted - exact)
        if value < limit:
            return float(limit)
    return float(ordered[-1]) if ordered.size else 0.0


def of_dither(q: Quantiser, v: np.ndarray) -> Law:
    """Subtractive dither (Ziv 1985): the error is uniform on (-Δ/2, Δ/2), whatever v; Δ is delta
    times the bucket's root mean square."""
    step = np.zeros(v.size)
    sizes = norms(v, q.bucket_size, "l2")
    for own, norm in zip(buckets(v.size, q.bucket_size), sizes, strict=True):
        step[own] = q.delta * norm / np.sqrt(own.stop - own.start)
    step[step < SMALLEST] = 0.0
    mean = np.where(step == 0, 0.0, np.where(np.isnan(step), np.nan, v))
    return Law(mean, step**2 / 12, step**4 / 80, mean - step / 2, mean + step / 2)


def of_projection(q: Quantiser, v: np.ndarray) -> Law:
    """QCS; a bucket with a coordinate that is not finite becomes NaN."""
    places = buckets(v.size, q.bucket_size)
    finite = [np.isfinite(v[own]).all() for own in places]
    parts = [
        v[own] if good else np.zeros(v[own].size) for own, good in zip(places, finite, strict=True)
    ]
    found = projections(parts, q.bucket_size, q.measurements, q.quantizer_range, q.estimator)
    mean, variance, reach = np.empty(v.size), np.empty(v.size), np.empty(v.size)
    block = np.empty(v.size, int)
    for number, (own, bucket, good) in enumerate(zip(places, found, finite, strict=True)):
        mean[own] = bucket.alpha * bucket.g if good else np.nan
        variance[own], reach[own], block[own] = bucket.variance, bucket.length, number
    energy = np.array([bucket.length**2 for bucket in found])
    quadratic = along_all(found, places)
    return Law(
        mean, variance, 3 * variance**2, mean - reach, mean + reach, block, energy, quadratic
    )


LAWS = {
    **dict.fromkeys(("alq", "amq", "qsgd", "nuqsgd", "terngrad"), of_table),
    **dict.fromkeys(("orq", "linear_quantile"), of_bucket_levels),
    "signsgd": of_signs,
    "onebit": of_two_sides,
    "natural": of_powers,
    "sparse": of_sparse,
    "ecdq": of_dither,
    "qcs": of_projection,
}


def law_of(q: Quantiser, v: np.ndarray) -> Law:
    """The law of ``v`` (float64, the float32 values that are encoded), clipped if ``q`` clips."""
    v = clipped(v, q.bucket_size, q.clip)
    if q.scheme == "bingrad":
        return (of_two_sides if q.variant == "biased" else of_bucket_levels)(q, v)
    return LAWS[q.scheme](q, v)
