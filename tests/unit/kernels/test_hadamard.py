"""Hadamard matrices, and both transforms against products with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import hadamard_matrix

from hvd_adaptive.kernels import hadamard
from hvd_adaptive.kernels.numba import hadamard as cpu_hadamard
from hvd_adaptive.kernels.numba.jit import jit

PAPER = (96, 100, 192, 200, 288, 320, 384)
POWERS = tuple(1 << p for p in range(13))
LARGE = (1 << 13, 1 << 14, 1 << 16)


def vectors(order: int, count: int = 3) -> np.ndarray:
    return np.random.default_rng(order).standard_normal((count, order)).astype(np.float32)


def rows_of(order: int) -> list[int]:
    return sorted(
        {1, max(1, order // 5), -(-order // 2), order // 2 + 1, order} & {*range(1, order + 1)}
    )


@jit
def transform(y, size, columns):
    """y[:size] becomes the transform of y."""
    cpu_hadamard.fold(y, size)
    cpu_hadamard.apply(y[:size], columns, np.empty(columns.shape[1], np.float32))


def numba_transform(x: np.ndarray, rows: int, transposed: bool = False) -> np.ndarray:
    """The first ``rows`` outputs for each vector of x."""
    order = x.shape[-1]
    base = hadamard.base(hadamard.base_order(order))
    columns = cpu_hadamard.padded(base.T if transposed else base)
    y = x.copy()
    for vector in y:
        transform(vector, hadamard.kept(order, rows), columns)
    return y[:, :rows]


@pytest.mark.parametrize("order", PAPER + POWERS)
def test_rows_are_orthogonal(order):
    h = hadamard_matrix(order)
    assert h.shape == (order, order) and set(np.unique(h)) <= {-1, 1}
    exact = h.astype(np.float32)  # sums of at most 4096 ones are exact
    assert np.array_equal(exact @ exact.T, order * np.eye(order, dtype=np.float32))


def test_allowed_orders():
    allowed = {*PAPER, *POWERS, *LARGE, 1 << 24}
    for size in (*range(-3, 5000), *LARGE, 8191, 1 << 24, (1 << 24) + 1, 1 << 25):
        assert hadamard.is_order(size) == (size in allowed or size in {1 << p for p in range(25)})
    for size in (*range(1, 600), 4097, 1 << 24):
        expected = min(order for order in allowed if order >= size)
        assert hadamard.smallest_order(size) == expected
    assert all(str(order) in hadamard.ALLOWED for order in PAPER)


@pytest.mark.parametrize("order", PAPER + POWERS)
def test_transforms_against_the_matrix(order):
    h, x = hadamard_matrix(order).astype(np.float64), vectors(order)
    for rows in rows_of(order):
        forward = hadamard.transform(torch.from_numpy(x), rows).numpy()
        np.testing.assert_allclose(forward, x @ h[:rows].T, atol=1e-5 * order)
        back = hadamard.transpose(torch.from_numpy(x[:, :rows]), order).numpy()
        np.testing.assert_allclose(back, x[:, :rows] @ h[:rows], atol=1e-5 * order)


@pytest.mark.parametrize("order", PAPER + POWERS + LARGE)
def test_numba_transforms_bit_for_bit(order):
    x = vectors(order)
    for rows in rows_of(order):
        forward = hadamard.transform(torch.from_numpy(x), rows).contiguous().numpy()
        assert forward.tobytes() == numba_transform(x, rows).tobytes(), rows
    back = hadamard.transpose(torch.from_numpy(x), order).contiguous().numpy()
    assert back.tobytes() == numba_transform(x, order, transposed=True).tobytes()


@pytest.mark.parametrize("order", LARGE)
def test_large_transforms_are_their_own_inverse(order):
    x = vectors(order, 1)
    twice = numba_transform(numba_transform(x, order), order) / order
    np.testing.assert_allclose(twice, x, atol=1e-5)


def test_bases_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        hadamard.base(12)[0, 0] = -1
