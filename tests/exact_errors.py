"""Exact errors of rounding to a table's levels, in NumPy alone: nothing of the package is used."""

from __future__ import annotations

import numpy as np


def bucket_errors(
    v: np.ndarray, levels: np.ndarray, bucket_size: int, norm: str = "l2"
) -> np.ndarray:
    """E||Q(v_n) - v_n||² of each bucket n, the partial one at the end included: (buckets,).

    A coordinate v_i of a bucket of norm N lies between neighbouring levels l <= v_i/N <= u and
    becomes one of them, without bias: its variance is (u - v_i/N)(v_i/N - l) N² (ALQ Eqs 1, 2).
    """
    v, levels = np.asarray(v, np.float64), np.asarray(levels, np.float64)
    errors = []
    for begin in range(0, v.size, bucket_size):
        bucket = v[begin : begin + bucket_size]
        size = np.sqrt(np.sum(bucket**2)) if norm == "l2" else np.abs(bucket).max()
        if size == 0:
            errors.append(0.0)
            continue
        r = np.clip(bucket / size, -1, 1)
        above = np.clip(np.searchsorted(levels, r, side="right"), 1, levels.size - 1)
        variance = (levels[above] - r) * (r - levels[above - 1])
        errors.append(np.sum(variance) * size**2)
    return np.array(errors)


def relative_error(v: np.ndarray, levels: np.ndarray, bucket_size: int, norm: str = "l2") -> float:
    """E||Q(v) - v||²/||v||² of a vector whose buckets lie end to end."""
    total = np.sum(np.asarray(v, np.float64) ** 2)
    return float(bucket_errors(v, levels, bucket_size, norm).sum() / total)
