"""How many bits a quantized vector takes, at most and in expectation.

Two kinds of code. ALQ's (App. D) is an optimal prefix code of every coordinate's symbol: Theorems
3 and 10 are proved bounds. QSGD's and NUQSGD's (Elias codes of the gaps between nonzero
coordinates and of the level numbers) come with o(1) terms in n: those are LEFT OUT here, so the
numbers are leading terms that a real code may exceed at any finite n. ``sparse_code_length_bound``
bounds the same code without any o(1); ``sparse_code_bits`` counts what it really takes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvd_adaptive.levels import (
    Distribution,
    check_magnitudes,
    entropy_bits,
    magnitude_probabilities,
    symbol_probabilities,
)
from hvd_adaptive.theory.arguments import check_count, check_not_negative, check_order
from hvd_adaptive.theory.variance import variance_bound


def code_length_bound(
    magnitudes: ArrayLike,
    dimension: int,
    norm_order: float = 2,
    symmetric: bool = False,
    distribution: Distribution | None = None,
    norm_bits: float = 32,
) -> float:
    """Bits that an optimal prefix code needs at most, in expectation, for one vector.

    ALQ Theorem 3: b + n_{l1,d} + d (H(L) + 1), symbols are magnitudes and a sign bit follows each
    nonzero one; symmetric, Theorem 10: b + d (H(L) + 1), symbols are signed levels. distribution:
    the law of the coordinates, for the entropy H(L); without it the looser form with the
    logarithm of the number of symbols, which holds for every vector. norm_bits: b.
    """
    levels = check_magnitudes(magnitudes, symmetric)
    d, _ = check_count("dimension", dimension), check_order(norm_order)
    if symmetric:
        symbols, signs = 2 * levels.size, 0.0
        probabilities = symbol_probabilities
    else:
        symbols, signs = levels.size, nonzero_bound(levels, d, norm_order)
        probabilities = magnitude_probabilities
    entropy = (
        float(np.log2(symbols))
        if distribution is None
        else entropy_bits(probabilities(levels, distribution, symmetric))
    )
    return check_not_negative("norm_bits", norm_bits) + signs + d * (entropy + 1)


def nonzero_bound(magnitudes: ArrayLike, dimension: int, norm_order: float = 2) -> float:
    """Nonzero coordinates of a zero-based Q(v), at most, in expectation: n_{l1,d}.

    ALQ Lemma 3 and Theorem 3, min(l1^-q + d^(1-1/q)/l1, d); at l1 = 1/s and q = 2 the s (s +
    sqrt(d)) of QSGD Lemma 3.1 (iii), at l1 = 2^-s NUQSGD's Lemma 2.
    """
    levels = check_magnitudes(magnitudes, symmetric=False)
    d, q = check_count("dimension", dimension), check_order(norm_order)
    with np.errstate(over="ignore"):  # l1**-inf is meant: no bound but d
        large = levels[1] ** -q
    return float(min(large + d ** (1 - 1 / q) / levels[1], d))


def qsgd_code_length(intervals: int, dimension: int, norm_bits: float = 32) -> float:
    """QSGD Theorem 3.2 without its o(1): (3 + 3/2 log2(2 (s^2 + n)/n_s)) n_s + 32 bits.

    n_s = s (s + sqrt(n)) bounds the nonzero coordinates. Each takes a sign and, by
    |Elias(k)| = (1 + o(1)) log2 k + 1, gap and level number cost 2 + log2(n/n_s) +
    1/2 log2(2 (s^2 + n)/n_s) on average (concavity; E[sum k^2] <= s^2 + n); the theorem uses
    n <= 2 (s^2 + n). Meant for s far below sqrt(n): at s = sqrt(n) it says 9 n + 32.
    """
    s, n = check_count("intervals", intervals), check_count("dimension", dimension)
    nonzero = s * (s + np.sqrt(n))
    per_nonzero = 3 + 1.5 * np.log2(2 * (s**2 + n) / nonzero)
    return float(per_nonzero * nonzero + check_not_negative("norm_bits", norm_bits))


def qsgd_dense_code_length(dimension: int, norm_bits: float = 32) -> float:
    """QSGD Corollary 3.3: 2.8 n + 32 bits at s = sqrt(n) intervals, by a code for every coordinate.

    The paper's proof is in its full version. An ideal code keeps it: integers k with E[sum k^2] <=
    2 n (Lemma 3.1 at s = sqrt(n)) have at most 1/2 log2(2 pi e (2 + 1/12)) = 2.58 bits of entropy
    per coordinate.
    """
    return 2.8 * check_count("dimension", dimension) + check_not_negative("norm_bits", norm_bits)


def nuqsgd_code_length(internal_levels: int, dimension: int, norm_bits: float = 32) -> float:
    """NUQSGD Theorem 3 without its o(1); the levels are 0, 2^-s, ..., 1/2, 1, s = internal_levels.

    The formula is missing in our text and derived along its App. C: with n = 4^s + 2^s sqrt(d)
    nonzero coordinates at most (Lemma 2), each taking a sign and two Elias codes, of its gap and
    of the number k of its level 2^(k-1-s),

        b + n (3 + log2(d/n) + log2(1/2 log2(8 (4^s + d)/n)))

    since both parts are concave, and 4^k, which is 4 (2^s level)^2, sums to at most 4 4^s (1 +
    epsilon_Q) <= 8 (4^s + d) in expectation. As in the paper d must be large enough for n <= d/e,
    else the steps do not hold: ValueError.
    """
    s, d = check_count("internal_levels", internal_levels), check_count("dimension", dimension)
    nonzero = 4.0**s + 2.0**s * np.sqrt(d)
    if nonzero > d / np.e:
        raise ValueError(
            f"dimension={d}: must be at least e (4^s + 2^s sqrt(dimension)), "
            f"{np.e * nonzero:.0f} at internal_levels={s}"
        )
    gaps = np.log2(d / nonzero)
    numbers = np.log2(np.log2(8 * (4.0**s + d) / nonzero) / 2)
    return float(check_not_negative("norm_bits", norm_bits) + nonzero * (3 + gaps + numbers))


def sparse_code_length_bound(magnitudes: ArrayLike, dimension: int, norm_bits: float = 32) -> float:
    """Expected bits of QSGD's and NUQSGD's sparse code at most, of any vector under L2.

    The way of QSGD Theorem 3.2 and NUQSGD Theorem 3 with the real lengths of Elias's code, and
    for any zero-based table. N nonzero coordinates have gaps that sum to d at most, and squared
    levels that sum to S in the mean: with G and K the least concave functions above
    1 + |Elias(k)| at k and above |Elias(k)| at the k-th level squared, both 0 at 0, the bits are at
    most N G(d/N) + N K(S/N) (Jensen). That is concave in (N, S) and grows with both, so E[N] <=
    ``nonzero_bound`` and E[S] <= 1 + ``variance_bound`` give a bound of its mean (Jensen again).
    """
    levels = check_magnitudes(magnitudes, symmetric=False)
    d = check_count("dimension", dimension)
    nonzero = nonzero_bound(levels, d)
    squares = 1 + variance_bound(levels, d)
    powers = 2 ** np.arange(d.bit_length())  # |Elias(k)| grows at powers of two alone
    gaps = _least_concave(powers, 1 + elias_bits(powers), d / nonzero)
    bits = elias_bits(np.arange(1, levels.size))
    numbers = _least_concave(levels[1:] ** 2, bits, squares / nonzero)
    return check_not_negative("norm_bits", norm_bits) + nonzero * (gaps + numbers)


def _least_concave(x: NDArray, y: NDArray, at: float) -> float:
    """The least concave function that is 0 at 0 and at least y at x, at ``at``; x and y ascend."""
    hull = [(0.0, 0.0)]
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(hull) > 1 and _slope(hull[-1], point) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return float(np.interp(at, [x for x, _ in hull], [y for _, y in hull]))


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def elias_bits(integers: ArrayLike) -> NDArray[np.int64]:
    """Bits of Elias's recursive (omega) code of each integer; the shape of ``integers``."""
    remaining = np.array(integers, dtype=np.int64)
    if np.any((remaining < 1) | (remaining > 2**53)):
        raise ValueError("integers: must all be from 1 to 2**53")
    bits = np.ones_like(remaining)
    while np.any(remaining > 1):
        digits = np.frexp(remaining.astype(np.float64))[1].astype(np.int64)
        bits += np.where(remaining > 1, digits, 0)
        remaining = np.maximum(digits - 1, 1)
    return bits


def sparse_code_bits(level_numbers: ArrayLike, norm_bits: float = 32) -> float:
    """What the code of QSGD section 3.1 and NUQSGD section 3.2 takes for one quantized vector.

    level_numbers: (d,) integers, zero for zero, +-k for the k-th positive level. Norm, then for
    every nonzero coordinate the gap to it, its sign and its number, gaps and numbers by Elias.
    """
    numbers = np.asarray(level_numbers)
    where = np.flatnonzero(numbers)
    gaps = np.diff(where, prepend=-1)
    coded = elias_bits(gaps).sum() + elias_bits(np.abs(numbers[where])).sum()
    return check_not_negative("norm_bits", norm_bits) + float(coded + where.size)
