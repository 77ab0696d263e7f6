"""Quantise to level tables in Numba: one pass through L1-sized blocks, vectorised, no GIL."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from hvd_adaptive.kernels.constants import NORM_LANES
from hvd_adaptive.kernels.numba import encoder, permute, scan
from hvd_adaptive.kernels.numba.decoder import addresses, decoder_of
from hvd_adaptive.kernels.numba.jit import jit
from hvd_adaptive.kernels.tables import CELL_BASE, CELL_SHIFT, KernelTable, interval_ends, room_of

_MOST_COUNTED = 16  # thresholds, where they are not looked up in registers
_CELL_SHIFT, _CELL_BASE = np.int32(CELL_SHIFT), np.int32(CELL_BASE)
_DIRECT = {"uniform": encoder.UNIFORM, "exponential": encoder.EXPONENTIAL}


def encode(flat, scales, words, bucket_size, norm, table, key, clip=None):
    encoder, arrays = _prepared(table)
    encoder(
        flat.numpy(),
        scales.numpy(),
        words.numpy().view(np.uint32),
        bucket_size,
        norm == "linf",
        clip or 0.0,
        np.uint64(key),
        arrays,
    )


def decode_add(payloads, bucket_size, table, factor, out, add=True):
    n, (decoder, values) = out.numel(), _levels(table)
    sections = addresses(payloads, "scales", -(-n // bucket_size), table.packing.words(n))
    decoder(*sections, bucket_size, 1, values, np.float32(factor), add, out.numpy())


def histogram(bucket, scale):
    return torch.from_numpy(scan.histogram(bucket.numpy(), np.float32(scale)))


def clipped(flat, bucket_size, clip):
    return torch.from_numpy(scan.clipped(flat.numpy(), bucket_size, clip))


def bucket_norms(flat, bucket_size, norm):
    return torch.from_numpy(scan.bucket_norms(flat.numpy(), bucket_size, norm == "linf"))


def errors(flat: torch.Tensor, bucket_size: int, norm: str, table: KernelTable) -> torch.Tensor:
    arrays = interval_ends(table), table.search, table.corrections
    return torch.from_numpy(_errors(flat.numpy(), bucket_size, norm == "linf", *arrays))


_NO_CELLS, _NO_TREE = np.zeros(1, np.uint8), np.zeros(1, np.float32)


@functools.lru_cache(maxsize=64)
def _levels(table: KernelTable) -> tuple[Callable, np.ndarray]:
    """Return the decoder of a table's packing, and the table's values in whole registers."""
    values = np.zeros(room_of(table.packing), np.float32)
    values[: len(table.values)] = table.values
    return decoder_of(False, table.rule == "uniform", table.packing), values


@functools.lru_cache(maxsize=64)
def _prepared(table: KernelTable) -> tuple[Callable, tuple]:
    """Return the encoder of a table's rule and packing, and the arrays of an encoder.Table."""
    rule, depth, tree = encoder.SEARCH, 0, _NO_TREE
    if table.rule in _DIRECT:
        rule = _DIRECT[table.rule]
    elif permute.FEWEST_THRESHOLDS <= table.thresholds <= permute.MOST_THRESHOLDS:
        rule, depth = encoder.PERMUTE, (table.thresholds - 1).bit_length()
        tree = permute.tables(table.lower, table.start, table.gap, depth)
    elif table.thresholds <= _MOST_COUNTED:
        rule, depth = encoder.COUNT, table.thresholds
    # The search needs an end behind the last interval, which nothing exceeds.
    lower = np.append(table.lower, np.float32(np.inf))
    cells = (table.search, table.corrections) if rule == encoder.SEARCH else (_NO_CELLS, 0)
    shared = table.start, table.gap, lower, np.uint32(table.base), table.thresholds, table.numbers
    return encoder.encoder_of(rule, depth, table.packing), (*shared, *cells, tree)


@jit
def _errors(x, bucket_size, linf, ends, cells, corrections):
    count = (x.size + bucket_size - 1) // bucket_size
    found, acc = np.zeros((count, 2), np.float64), np.empty(NORM_LANES, np.float32)
    rs = np.empty(min(bucket_size, x.size), np.float32)
    places = np.empty(rs.size, np.int32)
    for b in range(count):
        part = x[b * bucket_size : min(x.size, (b + 1) * bucket_size)]
        norm, variance, square = np.float64(scan.norm_of(part, linf, acc)), 0.0, 0.0
        if not norm > 0:
            for j in range(part.size):
                square += np.float64(part[j]) * np.float64(part[j])
            found[b] = norm, square
            continue
        inverse = 1 / norm
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
            variance += (np.float64(high) - wide) * (wide - np.float64(low))
            square += np.float64(part[j]) * np.float64(part[j])
        found[b] = variance * (norm * norm), square
    return found
