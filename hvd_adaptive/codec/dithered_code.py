"""Build a step and its code books, find the step that spends a number of bits, and control the
rate.

A coordinate of size t (in any unit) and random sign is sent as q = round(±t/step + a), where the
dither a is uniform in [0, 1/2). The sign comes from the dither (schemes/ecdq.py), so the law of ±t
is even for any signs of the coordinates. [0, 1/2) is cut into equal parts, the classes. Receivers
can compute the class, so each class has its own code book.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvd_adaptive.coding.prefix_code import FLOOR, PrefixCode
from hvd_adaptive.levels.distributions import LOG_EDGES, Array, Distribution, Histogram
from hvd_adaptive.levels.objective import entropy_bits

# Range of steps in root mean squares. Below it, an int16 could not hold the integers of a bucket of
# 8192, and the rest of a float32 would be little more than the dither. At its upper end the bound
# of research/rate_bound.py is below 0.29 bits.
LEAST_DELTA, MOST_DELTA = 1 / 256, 16.0
# Candidates for the largest integer that has its own symbol.
MOST_SYMBOLS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 127, 191, 255, 383, 511)
# Candidates for the share of escaped integers; the best one is used.
_ESCAPED = (0.3, 3e-2, 3e-3, 3e-4, 3e-5)
# Typical cost of real books relative to ideal ones.
TYPICAL_REDUNDANCY = 1.006
_ROUNDS = 6
# Entropies and expected bits, which are sums of some hundred numbers, are exact to this factor.
_ROUNDING = 1 - 1e-9
# Steps whose logarithms differ by less share the choice of symbols.
_NEAR = 0.1


def classes_of(delta: float) -> int:
    """Return the number of dither classes for a step. Up to 1/2 more than one would save less than
    0.12 % (for Gaussian and Laplace laws), and the runs of their symbols cost time.
    """
    return 1 if delta <= 0.5 else 4


@dataclass(frozen=True, eq=False)
class DitheredCode:
    """All values that ranks must share to read each other's payloads: a bucket's step in units of
    its root mean square, and probabilities of the symbols -most..most and of the escape.
    """

    delta: float
    probabilities: Array  # float64 (classes, 2 most + 2)

    @classmethod
    def of_law(cls, law: Distribution, unit: float, delta: float) -> DitheredCode:
        """Return the code with the fewest bits for a law of sizes t in [0, 1], of root mean square
        ``1/unit``, and a given step; the number of integers that have symbols is chosen.
        """
        shares = _beyond(law, unit, delta, MOST_SYMBOLS)
        wanted = {int(np.argmax(np.array([*shares[:-1], 0.0]) <= share)) for share in _ESCAPED}
        laws = {i: _law_of(law, unit, delta, MOST_SYMBOLS[i]) for i in sorted(wanted)}
        # Books take milliseconds to build, and no book beats the entropy: those whose entropy is
        # more than the bits of another's are not built.
        least = {i: _ideal_bits_of(law, unit, delta, MOST_SYMBOLS[i], laws[i]) for i in laws}
        found: dict[int, tuple[float, DitheredCode]] = {}
        for i in sorted(laws, key=lambda i: least[i]):
            if found and least[i] * _ROUNDING > min(bits for bits, _ in found.values()):
                break
            code = cls(delta, laws[i])
            found[i] = code.bits(law, unit), code
        return found[min(found, key=lambda i: (found[i][0], i))][1]

    @classmethod
    def of_rate(cls, law: Distribution, unit: float, bits: float) -> DitheredCode:
        """Return the code that spends ``bits`` per coordinate of the law, within 0.1 % if a few
        rounds of search find such a code. If none exists, the step is the least or the largest one.
        """
        best, least, redundancy = None, np.inf, TYPICAL_REDUNDANCY
        low, high = LEAST_DELTA, MOST_DELTA
        for _ in range(_ROUNDS):
            delta = ideal_delta(law, unit, bits / redundancy)
            if not low <= delta <= high:
                delta = float(np.sqrt(low * high))
            if best is not None and delta == best.delta:
                break
            if best is not None and abs(np.log(delta / best.delta)) < _NEAR:
                code = cls(delta, _law_of(law, unit, delta, best.most))
            else:
                code = cls.of_law(law, unit, delta)
            spent = code.bits(law, unit)
            if abs(spent - bits) < least:
                best, least = code, abs(spent - bits)
            if least <= 1e-3 * bits:
                break
            low, high = (delta, high) if spent > bits else (low, delta)
            redundancy = spent / _ideal_bits(law, unit, delta)
        assert best is not None  # set in the first round
        return best

    @classmethod
    def from_numbers(cls, numbers: Array) -> DitheredCode:
        """Return the code of ``numbers``; raise ValueError if they do not describe one."""
        delta, *flat = np.asarray(numbers, np.float64).tolist()
        if not LEAST_DELTA <= delta <= MOST_DELTA:
            raise ValueError(f"δ={delta}: must be from {LEAST_DELTA} to {MOST_DELTA}")
        classes = classes_of(delta)
        symbols, rest = divmod(len(flat), classes)
        if rest or symbols // 2 - 1 not in MOST_SYMBOLS or symbols % 2:
            raise ValueError(f"{len(flat)} probabilities do not fit {classes} classes")
        probabilities = np.array(flat).reshape(classes, symbols)
        sums = probabilities.sum(axis=1)
        if not (np.all(probabilities >= 0) and np.all((sums > 0.5) & (sums < 1.5))):
            raise ValueError("probabilities must not be negative and must sum to one")
        return cls(delta, probabilities)

    def numbers(self) -> Array:
        """Return the code as float64 (1 + classes symbols,): delta, then the probabilities."""
        return np.concatenate([[self.delta], self.probabilities.reshape(-1)])

    @property
    def most(self) -> int:
        """Return the largest integer with a symbol."""
        return self.probabilities.shape[1] // 2 - 1

    @property
    def dtype(self) -> type:
        """Return the dtype of an array of symbols."""
        return np.uint8 if self.probabilities.shape[1] <= 256 else np.uint16

    @functools.cached_property
    def books(self) -> list[PrefixCode]:
        """Return the code books, one for each class."""
        return [PrefixCode.build(np.maximum(p, FLOOR)) for p in self.probabilities]

    @functools.cached_property
    def fingerprint(self) -> int:
        """Return 32 bits that differ between codes."""
        return zlib.crc32(self.numbers().astype("<f8").tobytes())

    def bits(self, law: Distribution, unit: float) -> float:
        """Return the expected bits per coordinate of these books and escapes under a law. An escape
        takes one byte, and one more each from most + 65 and from most + 8193 on.
        """
        of_symbols = _law_of(law, unit, self.delta, self.most)
        pairs = zip(self.books, of_symbols, strict=True)
        coded = np.mean([book.bits_per_symbol(p) for book, p in pairs])
        ends = (self.most, self.most + 64, self.most + 8192)
        return float(coded + 8 * _beyond(law, unit, self.delta, ends).sum())


def ideal_delta(law: Distribution, unit: float, bits: float) -> float:
    """Return the delta at which ideal codes spend ``bits``, or the nearest one in its range."""
    low, high = np.log2(LEAST_DELTA), np.log2(MOST_DELTA)
    if _ideal_bits(law, unit, LEAST_DELTA) <= bits:
        return LEAST_DELTA
    if _ideal_bits(law, unit, MOST_DELTA) >= bits:
        return MOST_DELTA
    for _ in range(16):
        middle = (low + high) / 2
        more = _ideal_bits(law, unit, 2.0**middle) > bits
        low, high = (middle, high) if more else (low, middle)
    return float(2.0**low)


@functools.cache
def gaussian_law() -> Histogram:
    """Return the law of normal coordinates of root mean square 1/GAUSSIAN_UNIT, before any fit."""
    from scipy.special import erf  # slow to import, and only ECDQ needs it

    cumulated = erf(LOG_EDGES * (GAUSSIAN_UNIT / np.sqrt(2)))
    cumulated[-1] = 1.0
    return Histogram(LOG_EDGES, np.diff(cumulated))


GAUSSIAN_UNIT = 16.0


@functools.lru_cache(maxsize=64)
def gaussian_code(bits: float | None, delta: float | None) -> DitheredCode:
    """Return Gaussian buckets' code that spends ``bits`` or, if these are None, has this step."""
    law = gaussian_law()
    if bits is not None:
        return DitheredCode.of_rate(law, GAUSSIAN_UNIT, bits)
    assert delta is not None
    return DitheredCode.of_law(law, GAUSSIAN_UNIT, delta)


def _law_of(law: Distribution, unit: float, delta: float, most: int) -> Array:
    return dithered_probabilities(law, delta / unit, classes_of(delta), most)


def dithered_probabilities(law: Distribution, step: float, classes: int, most: int) -> Array:
    """Return P(q | class) for q = -most..most, then of all other integers: (classes, 2 most + 2).
    The law of the sizes t in [0, 1] may have an atom at zero; step > 0 is in the unit of t.
    """
    at_most = _at_most(law, step, classes, np.arange(-most - 1, most + 1))
    inside = np.maximum(np.diff(at_most, axis=1), 0.0)
    rest = np.maximum(1.0 - inside.sum(axis=1, keepdims=True), 0.0)
    return np.concatenate([inside, rest], axis=1)


def _ideal_bits(law: Distribution, unit: float, delta: float) -> float:
    """Return the bits of ideal codes with the largest useful number of symbols."""
    most = int(min(MOST_SYMBOLS[-1], 40 / delta + 3))
    return _ideal_bits_of(law, unit, delta, most, _law_of(law, unit, delta, most))


def _ideal_bits_of(law: Distribution, unit: float, delta: float, most: int, of: Array) -> float:
    """Return the bits of ideal codes for the probabilities ``of`` symbols up to ``most``."""
    coded = entropy_bits(of) / len(of)
    escaped = _beyond(law, unit, delta, (most, most + 64, most + 8192))
    return coded + 8 * float(escaped.sum())


def _beyond(law: Distribution, unit: float, delta: float, most: Sequence[int]) -> Array:
    """Return P(abs(q) > most) for each ``most``."""
    of, k = (law, delta / unit, classes_of(delta)), np.asarray(most)
    return np.maximum(1.0 - (_at_most(*of, k) - _at_most(*of, -k - 1)), 0.0).mean(axis=0)


def _at_most(law: Distribution, step: float, classes: int, k: np.ndarray) -> Array:
    """Return P(q <= k | class): (classes, number of k).

    With G the distribution function of ±t/step and a in [b, c), P(q <= k | a) = G(k + 1/2 - a). The
    mean over the class is (J(k + 1/2 - b) - J(k + 1/2 - c)) / (c - b), where J is the integral of G
    from 0. G(y) = (1 + sign(y) F(|y| step))/2, and the integral of F by parts is y F(y step) - m(y
    step)/step with the law's partial mean m. No quadrature is needed.
    """
    y = k + 0.5 - np.linspace(0.0, 0.5, classes + 1)[:, None]
    size = np.abs(y)
    cdf, mean, _ = law.moments(np.minimum(size * step, 1.0))
    integral = (y + size * cdf - mean / step) / 2
    return (integral[:-1] - integral[1:]) * (2 * classes)


# Largest correction until the next update, as a share of the budget.
LARGEST_CORRECTION = 0.1
LEAST_RATIO, MOST_RATIO = 0.25, 4.0


@dataclass(frozen=True)
class RateControl:
    """Bits that all ranks have sent so far, and the error of the rate's model.

    Each update makes two corrections. First, the model covers neither headers nor zero buckets, and
    is fitted to old samples. ``ratio`` is the ratio of measured to modelled bits of the steps since
    the last update, averaged with the previous ratio; the model is evaluated halfway between the
    laws at both ends. Second, the accumulated excess or deficit is compensated over as many
    coordinates as have been sent, so the average approaches the budget as 1/coordinates**2.

    ``bits`` and ``coordinates`` were sent since the beginning, over all ranks; ``budget`` is bits
    per coordinate.
    """

    budget: float
    ratio: float = 1.0
    bits: float = 0.0
    coordinates: float = 0.0

    @property
    def average(self) -> float:
        """Return the bits per coordinate so far, or the budget if nothing has been sent."""
        return self.bits / self.coordinates if self.coordinates else self.budget

    @property
    def aim(self) -> float:
        """Return the modelled bits per coordinate that the next code should spend."""
        most = LARGEST_CORRECTION * self.budget
        excess = min(max(self.average - self.budget, -most), most)
        return (self.budget - excess) / self.ratio

    def updated(self, bits: float, coordinates: float, modelled: float) -> RateControl:
        """Return the control after ``bits`` for ``coordinates`` more were sent; the model predicted
        ``modelled`` bits per coordinate.
        """
        if not (coordinates > 0 and bits >= 0 and math.isfinite(bits + coordinates)):
            return self  # nothing was sent, or a rank reports invalid numbers
        measured = bits / coordinates / modelled
        first = self.coordinates == 0
        ratio = measured if first else (self.ratio + measured) / 2
        return replace(
            self,
            ratio=float(np.clip(ratio, LEAST_RATIO, MOST_RATIO)),
            bits=self.bits + bits,
            coordinates=self.coordinates + coordinates,
        )
