"""Compute the length of quantized vectors in bits: upper bounds, expectations and exact counts.

There are two kinds of code. ALQ (App. D) uses an optimal prefix code of every coordinate's symbol;
its Theorems 3 and 10 are proved bounds. QSGD and NUQSGD use Elias codes of the gaps between nonzero
coordinates and of the level numbers; their theorems contain o(1) terms in n. The functions here
OMIT these o(1) terms: the results are leading terms, which a real code may exceed at any finite n.
``sparse_code_length_bound`` bounds the same code without any o(1) term, and ``sparse_code_bits``
counts its exact length.

Arguments are those of ``theory.variance``; ``norm_bits`` is b, the bits of the norm, 32 in the
papers. A wrong one raises ValueError.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvd_adaptive.levels import Distribution, check_magnitudes, entropy_bits
from hvd_adaptive.levels.objective import magnitude_probabilities, symbol_probabilities
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
    """Return the expected bits that an optimal prefix code needs at most for one vector.

    ALQ Theorem 3 (zero-based): b + n_{l1,d} + d (H(L) + 1). Symbols are magnitudes, and a sign bit
    follows each nonzero one. Theorem 10 (symmetric): b + d (H(L) + 1). Symbols are signed levels.

    The entropy H(L) is that of ``distribution``, the law of the coordinates; if None, the logarithm
    of the number of symbols, which holds for every vector.
    """
    levels = check_magnitudes(magnitudes, symmetric)
    d, _ = check_count("dimension", dimension), check_order(norm_order)
    signs = 0.0 if symmetric else nonzero_bound(levels, d, norm_order)
    entropy = float(np.log2(levels.size) + symmetric)
    if distribution is not None:
        probabilities = symbol_probabilities if symmetric else magnitude_probabilities
        entropy = entropy_bits(probabilities(levels, distribution, symmetric))
    return check_not_negative("norm_bits", norm_bits) + signs + d * (entropy + 1)


def nonzero_bound(magnitudes: ArrayLike, dimension: int, norm_order: float = 2) -> float:
    """Return n_{l1,d}, the expected number of nonzero coordinates of a zero-based Q(v) at most.

    This is min(l1^-q + d^(1-1/q)/l1, d) of ALQ Lemma 3 and Theorem 3. At l1 = 1/s and q = 2 it is
    the s (s + sqrt(d)) of QSGD Lemma 3.1 (iii); at l1 = 2^-s it is NUQSGD's Lemma 2.
    """
    levels = check_magnitudes(magnitudes, symmetric=False)
    d, q = check_count("dimension", dimension), check_order(norm_order)
    with np.errstate(over="ignore"):  # l1**-inf may overflow: then the bound is d
        large = levels[1] ** -q
    return float(min(large + d ** (1 - 1 / q) / levels[1], d))


def qsgd_code_length(intervals: int, dimension: int, norm_bits: float = 32) -> float:
    """Return QSGD Theorem 3.2 without its o(1): (3 + 3/2 log2(2 (s^2 + n)/n_s)) n_s + 32 bits.

    n_s = s (s + sqrt(n)) bounds the number of nonzero coordinates. Each nonzero coordinate needs a
    sign, a gap and a level number. By |Elias(k)| = (1 + o(1)) log2 k + 1, gap and level number cost
    2 + log2(n/n_s) + 1/2 log2(2 (s^2 + n)/n_s) on average (concavity; E[sum k^2] <= s^2 + n). The
    theorem uses n <= 2 (s^2 + n). It is intended for s far below sqrt(n): at s = sqrt(n) it gives 9
    n + 32. ``intervals`` is s >= 1.
    """
    s, n = check_count("intervals", intervals), check_count("dimension", dimension)
    nonzero = s * (s + np.sqrt(n))
    per_nonzero = 3 + 1.5 * np.log2(2 * (s**2 + n) / nonzero)
    return float(per_nonzero * nonzero + check_not_negative("norm_bits", norm_bits))


def qsgd_dense_code_length(dimension: int, norm_bits: float = 32) -> float:
    """Return QSGD Corollary 3.3: 2.8 n + 32 bits for a code of every coordinate at s = sqrt(n).

    The proof is in the paper's full version. An ideal code satisfies the bound: integers k with
    E[sum k^2] <= 2 n (Lemma 3.1 at s = sqrt(n)) have an entropy of at most 1/2 log2(2 pi e (2 +
    1/12)) = 2.58 bits per coordinate.
    """
    return 2.8 * check_count("dimension", dimension) + check_not_negative("norm_bits", norm_bits)


def nuqsgd_code_length(internal_levels: int, dimension: int, norm_bits: float = 32) -> float:
    """Return NUQSGD Theorem 3 without its o(1), in bits, for the levels 0, 2^-s, ..., 1/2, 1.

    The formula is derived along the paper's App. C. At most n =
    4^s + 2^s sqrt(d) coordinates are nonzero (Lemma 2). Each needs a sign and two Elias codes, one
    of its gap and one of the number k of its level 2^(k-1-s). The result is

        b + n (3 + log2(d/n) + log2(1/2 log2(8 (4^s + d)/n)))

    because both parts are concave, and 4^k, which is 4 (2^s level)^2, sums to at most 4 4^s (1 +
    epsilon_Q) <= 8 (4^s + d) in expectation. ``internal_levels`` is s >= 1. As in the paper, n <=
    d/e is required: n > d/e raises ValueError.
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
    """Return an upper bound of the expected bits of QSGD's and NUQSGD's sparse code under L2.

    The bound holds for every vector and any zero-based table. It follows QSGD Theorem 3.2 and
    NUQSGD Theorem 3, with the exact lengths of Elias's code. Let N nonzero coordinates have gaps
    that sum to at most d, and squared levels that sum to S in the mean. Let G and K be the least
    concave functions, both 0 at 0, with G(k) >= 1 + |Elias(k)| and K >= |Elias(k)| at the k-th
    level squared. By Jensen's inequality, the bits are at most N G(d/N) + N K(S/N). This is concave
    in (N, S) and increases with both, so E[N] <= ``nonzero_bound`` and E[S] <= 1 +
    ``variance_bound`` bound its mean (Jensen again).
    """
    levels = check_magnitudes(magnitudes, symmetric=False)
    d = check_count("dimension", dimension)
    nonzero = nonzero_bound(levels, d)
    squares = 1 + variance_bound(levels, d)
    powers = 2 ** np.arange(d.bit_length())  # |Elias(k)| grows at powers of two only
    gaps = _least_concave(powers, 1 + elias_bits(powers), d / nonzero)
    bits = elias_bits(np.arange(1, levels.size))
    numbers = _least_concave(levels[1:] ** 2, bits, squares / nonzero)
    return check_not_negative("norm_bits", norm_bits) + nonzero * (gaps + numbers)


def _least_concave(x: NDArray, y: NDArray, at: float) -> float:
    """Evaluate, at ``at``, the least concave function that is 0 at 0 and at least y at x; both
    ascend.
    """
    hull = [(0.0, 0.0)]
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(hull) > 1 and _slope(hull[-1], point) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return float(np.interp(at, [x for x, _ in hull], [y for _, y in hull]))


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def elias_bits(integers: ArrayLike) -> NDArray[np.int64]:
    """Return the bits of Elias's recursive (omega) code of each integer from 1 to 2**53, in the
    shape of ``integers``.
    """
    given = np.asarray(integers)
    if not np.all((given >= 1) & (given <= 2**53) & (given % 1 == 0)):
        raise ValueError("integers: must all be from 1 to 2**53, and whole")
    remaining = given.astype(np.int64)
    bits = np.ones_like(remaining)
    while np.any(remaining > 1):
        digits = np.frexp(remaining.astype(np.float64))[1].astype(np.int64)
        bits += np.where(remaining > 1, digits, 0)
        remaining = np.maximum(digits - 1, 1)
    return bits


def sparse_code_bits(level_numbers: ArrayLike, norm_bits: float = 32) -> float:
    """Return the exact bits of the code of QSGD section 3.1 and NUQSGD section 3.2 for one vector.

    The code holds the norm and, for every nonzero coordinate, the gap before it, its sign and its
    level number. Gaps and level numbers are coded by Elias's code. ``level_numbers`` (d,) are
    integers: 0 for zero, +-k for the k-th positive or negative level.
    """
    numbers = np.asarray(level_numbers)
    where = np.flatnonzero(numbers)
    gaps = np.diff(where, prepend=-1)
    coded = elias_bits(gaps).sum() + elias_bits(np.abs(numbers[where])).sum()
    return check_not_negative("norm_bits", norm_bits) + float(coded + where.size)
