"""Build Hadamard matrices, and transform by them in plain torch (the oracle of numba/hadamard.py).

A matrix of order n = p * m is ``S_p ⊗ B_m``: Sylvester's matrix of a power of two p (entry
(-1)^popcount(i & j)) times a base of order m, which is 1, or 12 or 20 (Paley's first construction),
36 (his second) or 100 (Williamson's). So the powers of two and the other partition sizes of the QCS
paper (Abdi and Fekri 2020, section 6), 96, 100, 192, 200, 288, 320 and 384, are all covered.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

LARGEST = 1 << 24
_BASE_OF = {96: 12, 100: 100, 192: 12, 200: 100, 288: 36, 320: 20, 384: 12}
ALLOWED = f"a power of two up to {LARGEST} or one of {', '.join(map(str, _BASE_OF))}"

# First rows of four symmetric circulants A, B, C, D of order 25 with A² + B² + C² + D² = 100 I,
# found by matching the power spectra of all such rows; bit j is 1 if entry j (and 25 - j) is -1.
_WILLIAMSON_25 = (0b1111010100110, 0b1000011101100, 0b1111010100110, 0b0111100010010)


def is_order(size: int) -> bool:
    """Return whether there is a matrix of this order."""
    return size in _BASE_OF or (0 < size <= LARGEST and size & (size - 1) == 0)


def smallest_order(size: int) -> int:
    """Return the smallest order >= ``size``, 1 <= size <= LARGEST."""
    power = 1 << (size - 1).bit_length()
    return min([order for order in _BASE_OF if size <= order] + [power])


def base_order(order: int) -> int:
    """Return m of an order n = p * m."""
    return _BASE_OF.get(order, 1)


def kept(order: int, rows: int) -> int:
    """Return the length to which the transform folds if only its first ``rows`` outputs are needed:
    the shortest p' * m >= rows. The first p'*m rows of S_p ⊗ B are (1 … 1) ⊗ S_p' ⊗ B.
    """
    size = base_order(order)
    while size < rows:
        size *= 2
    return size


@functools.cache
def base(order: int) -> np.ndarray:
    """Return B of order 1, 12, 20, 36 or 100: int8, read-only."""
    build = {
        1: lambda: np.ones((1, 1), np.int8),
        12: lambda: _paley_one(11),
        20: lambda: _paley_one(19),
        36: lambda: _paley_two(17),
        100: lambda: _williamson(25, _WILLIAMSON_25),
    }[order]
    result = build().astype(np.int8)
    result.flags.writeable = False
    return result


def _jacobsthal(q: int) -> np.ndarray:
    """Return Q with Q[i, j] = χ(i - j), the quadratic character modulo an odd prime q."""
    character = np.full(q, -1)
    character[np.arange(1, q) ** 2 % q] = 1
    character[0] = 0
    return character[(np.arange(q)[:, None] - np.arange(q)) % q]


def _paley_one(q: int) -> np.ndarray:
    """Build order q + 1 for a prime q = 3 mod 4: I plus a skew conference matrix."""
    core = np.ones((q + 1, q + 1), np.int64)
    core[1:, 0] = -1
    core[1:, 1:] = _jacobsthal(q) + np.eye(q, dtype=np.int64)
    return core


def _paley_two(q: int) -> np.ndarray:
    """Build order 2 (q + 1) for a prime q = 1 mod 4, from the symmetric conference matrix."""
    conference = np.ones((q + 1, q + 1), np.int64)
    conference[0, 0] = 0
    conference[1:, 1:] = _jacobsthal(q)
    diagonal = np.kron(np.eye(q + 1, dtype=np.int64), np.array([[1, -1], [-1, -1]]))
    return np.kron(conference, np.array([[1, 1], [1, -1]])) + diagonal


def _williamson(n: int, rows: tuple[int, int, int, int]) -> np.ndarray:
    """Build order 4 n from Williamson's array of four symmetric circulants of order n."""
    at = (np.arange(n) - np.arange(n)[:, None]) % n
    a, b, c, d = (1 - 2 * (row >> np.minimum(at, n - at) & 1) for row in rows)
    return np.block([[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]])


def transform(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first ``rows`` coordinates of H x. x: float32 (..., n); result: (..., rows).

    Butterflies of strides n/2, n/4, ..., m run in turn; each sum is its own float32 operation, and
    sums that no needed output depends on are left out. Then B is applied, column by column.
    """
    order = x.shape[-1]
    size = kept(order, rows)
    while x.shape[-1] > size:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return _base(_butterflies(x, base_order(order)), base_order(order), False)[..., :rows]


def transpose(y: torch.Tensor, order: int) -> torch.Tensor:
    """Return Hᵀ y; y is zero beyond its first k coordinates. y: (..., k); result: (..., n)."""
    size, m = kept(order, y.shape[-1]), base_order(order)
    y = torch.nn.functional.pad(y, (0, size - y.shape[-1]))
    x = _base(_butterflies(y, m), m, True)
    return x.repeat(*[1] * (x.dim() - 1), order // size)


def _butterflies(x: torch.Tensor, least: int) -> torch.Tensor:
    shape, stride = x.shape, x.shape[-1] // 2
    while stride >= least:
        a, b = x.reshape(*shape[:-1], -1, 2, stride).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).reshape(shape)
        stride //= 2
    return x


def _base(x: torch.Tensor, order: int, transposed: bool) -> torch.Tensor:
    """Multiply each run of ``order`` coordinates by B, or Bᵀ: sums over its columns, in order."""
    if order == 1:
        return x
    runs = x.reshape(*x.shape[:-1], -1, order)
    total = torch.zeros_like(runs)
    for j, column in enumerate(_columns(order, transposed, x.device)):
        total = total + runs[..., j : j + 1] * column
    return total.reshape(x.shape)


@functools.lru_cache(maxsize=32)
def _columns(order: int, transposed: bool, device: torch.device) -> torch.Tensor:
    """Return the columns of B, or of Bᵀ, as rows, float32; they are copied to a device once."""
    matrix = base(order) if transposed else base(order).T
    return torch.from_numpy(matrix.astype(np.float32)).to(device)
