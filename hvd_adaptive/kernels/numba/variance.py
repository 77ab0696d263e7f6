"""Compute the exact variance that rounding to a level table adds. See reference/variance.py."""

from __future__ import annotations

import functools

import numpy as np
import torch

from hvd_adaptive.kernels.numba.jit import jit
from hvd_adaptive.kernels.tables import (
    CELL_BASE,
    CELL_SHIFT,
    KernelTable,
    interval_ends,
    kernel_table,
)

_CELL_SHIFT, _CELL_BASE = np.int32(CELL_SHIFT), np.int32(CELL_BASE)


def variances(
    flat: torch.Tensor, norms: torch.Tensor, bucket_size: int, table: KernelTable
) -> torch.Tensor:
    arrays = _ends(table), table.search, table.corrections
    return torch.from_numpy(_variances(flat.numpy(), norms.numpy(), bucket_size, *arrays))


def warm() -> None:
    """Compile the kernel into Numba's cache."""
    table = kernel_table(np.array([0.5, 1.0]), True)
    like = {"dtype": torch.float32, "device": "cpu"}
    variances(torch.linspace(-1, 1, 100, **like), torch.full((1,), 6.0, **like), 100, table)


@functools.lru_cache(maxsize=64)
def _ends(table: KernelTable) -> np.ndarray:
    return interval_ends(table)


@jit
def _variances(x, norms, bucket_size, ends, cells, corrections):
    total = np.zeros(norms.size, np.float64)
    rs = np.empty(min(bucket_size, x.size), np.float32)
    places = np.empty(rs.size, np.int32)
    for b in range(norms.size):
        if not norms[b] > 0:
            total[b] = norms[b]
            continue
        part = x[b * bucket_size : min(x.size, (b + 1) * bucket_size)]
        inverse, added = 1 / np.float64(norms[b]), 0.0
        # The look-ups do not vectorise: all else is done before them.
        for j in range(part.size):
            r = np.float32(min(np.abs(np.float64(part[j])) * inverse, 1.0))
            rs[j] = r
            cell = np.int32(np.int32(r.view(np.int32) >> _CELL_SHIFT) - _CELL_BASE)
            places[j] = max(cell, np.int32(0))
        for j in range(part.size):
            i, r = np.uint64(cells[places[j]]), rs[j]
            for _ in range(corrections):
                i += np.uint64(ends[i + np.uint64(1)] < r)
            low, high, wide = ends[i], ends[i + np.uint64(1)], np.float64(r)
            added += (np.float64(high) - wide) * (wide - np.float64(low))
        total[b] = added
    return total
