"""QCS (Abdi and Fekri 2020): the law of a projected bucket, from its equations.

A bucket g of n coordinates becomes v = H (r ⊙ g)/√k with random signs r and k rows H of a Hadamard
matrix (Eq. 2), v̂ = v + ς d with independent d, uniform on (-1/2, 1/2), whatever v (Eqs 4 to 6),
ς = ‖v‖∞/Q, and ĝ = α r ⊙ Hᵀ v̂/√k (Eq. 8). With G = HᵀH, whose diagonal is k, the error of ĝ/α is

    e_i = Σ_{j≠i} r_i r_j (G_ij/k) g_j  +  ς/√k r_i (Hᵀd)_i.

- Mean 0. The first sum has the variance Σ_{j≠i} (G_ij/k)² g_j², the second one E[ς²]/12.
- Σ w_i e_i: the products r_i r_j of pairs i < j are uncorrelated, so the first sum has the variance
  Σ_{i<j} (G_ij/k)² (w_i g_j + w_j g_i)²; the second has at most E[ς²] n/(12 k) ‖w‖².
- E‖v‖∞² <= ‖g‖² min(1, 2(1 + ln 2k)/k): v's coordinates are sub-Gaussian with ‖g‖²/k (Hoeffding),
  and Σ E v_i² = ‖g‖². At most ‖v‖∞ is ‖g‖₁/√k.
- ‖e‖ <= max(n/k - 1, 1) ‖g‖ + ς √n/2: G/k is n/k times a projection.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@functools.lru_cache(maxsize=16)
def squared_rows(order: int, rows: int) -> np.ndarray:
    """(G_ij/k)² of Sylvester's matrix, its diagonal 0."""
    h = np.ones((1, 1))
    while len(h) < order:
        h = np.block([[h, h], [h, -h]])
    squares = (h[:rows].T @ h[:rows] / rows) ** 2
    np.fill_diagonal(squares, 0.0)
    return squares


@dataclass(frozen=True)
class Projection:
    """The error's law of one bucket; order is a power of two, its coordinates may be fewer."""

    g: np.ndarray
    order: int
    rows: int
    quantizer_range: float
    estimator: str

    @property
    def alpha(self) -> float:
        """Of Eqs 9 and 12, with γ of Eq. 10; at k = 1 with the dither's part, which the paper
        leaves out."""
        if self.estimator == "unbiased":
            return 1.0
        k = self.rows
        largest = 1 / 12 if k == 1 else math.log(k) / (4 * (k - 1))
        return 1 / (self.order / k + self.order / self.quantizer_range**2 * largest)

    @property
    def scale_square(self) -> float:
        """E[ς²], at most."""
        share = min(1.0, 2 * (1 + math.log(2 * self.rows)) / self.rows)
        most = min(share * (self.g @ self.g), self.largest_scale**2 * self.quantizer_range**2)
        return most / self.quantizer_range**2

    @property
    def largest_scale(self) -> float:
        return np.abs(self.g).sum() / math.sqrt(self.rows) / self.quantizer_range

    @property
    def variance(self) -> np.ndarray:
        """Of each coordinate, at most."""
        projected = self._squares() @ (self.g * self.g)
        return self.alpha**2 * (projected + self.scale_square / 12)

    @property
    def length(self) -> float:
        """Of the error, at most."""
        projected = max(self.order / self.rows - 1, 1.0 if self.rows < self.order else 0.0)
        dithered = self.largest_scale * math.sqrt(self.order) / 2
        return self.alpha * (projected * float(np.linalg.norm(self.g)) + dithered)

    def along(self, w: np.ndarray) -> float:
        """Variance of Σ w_i e_i, at most."""
        squares, wg = self._squares(), w * self.g
        projected = (w * w) @ squares @ (self.g * self.g) + wg @ squares @ wg
        dithered = self.scale_square * self.order / (12 * self.rows) * (w @ w)
        return self.alpha**2 * float(projected + dithered)

    def _squares(self) -> np.ndarray:
        return squared_rows(self.order, self.rows)[: self.g.size, : self.g.size]


def projections(
    g: list[np.ndarray], size: int, measurements: int, quantizer_range: float, estimator: str
) -> list[Projection]:
    """Of a vector's buckets; a shorter one is filled up to the next power of two m, with ⌈k m/n⌉
    rows."""
    found = []
    for own in g:
        order = size if own.size == size else 1 << max(own.size - 1, 0).bit_length()
        if own.size < size and own.size > 64:
            raise NotImplementedError("orders besides powers of two begin above 64")
        rows = -(-measurements * order // size)
        found.append(Projection(own, order, rows, quantizer_range, estimator))
    return found


def along_all(found: list[Projection], places: list[slice]) -> Callable[[np.ndarray], float]:
    """Variance of Σ w_i e_i over all buckets, at most."""
    return lambda w: sum(p.along(w[own]) for p, own in zip(found, places, strict=True))
