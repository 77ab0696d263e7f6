"""Convert escaped integers to bytes and back in Numba: see reference/ecdq.py."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels.numba.jit import jit

_MOST_SHIFT = 28  # of the last of a number's bytes


def put_numbers(values: np.ndarray, most: int) -> np.ndarray:
    """Convert escaped integers (int32) to bytes (uint8): see reference.ecdq.split."""
    out = np.empty(5 * values.size, np.uint8)
    return out[: _put_numbers(values, np.int64(most), out)]


def numbers(data: np.ndarray, most: int) -> np.ndarray | None:
    """Invert ``put_numbers``; return None if it cannot have made the bytes."""
    values = np.empty(data.size, np.int32)
    count = _numbers(data, np.int64(most), values)
    return None if count < 0 else values[:count]


@jit
def _put_numbers(values, most, out):
    at = 0
    for value in values:
        wide = np.int64(value)
        rest = 2 * (abs(wide) - most - 1) + (1 if wide < 0 else 0)
        while rest > 127:
            out[at] = np.uint8((rest & 127) | 128)
            rest >>= 7
            at += 1
        out[at] = np.uint8(rest)
        at += 1
    return at


@jit
def _numbers(data, most, values):
    count, number, shift = 0, np.int64(0), 0
    for byte in data:
        if shift > _MOST_SHIFT or (byte == 0 and shift > 0):
            return -1
        number += np.int64(byte & 127) << shift
        shift += 7
        if number >= np.int64(1) << 31:
            return -1
        if byte < 128:
            size = (number >> 1) + most + 1
            values[count] = -size if number & 1 else size
            count += 1
            number, shift = np.int64(0), 0
    return -1 if shift else count
