"""Compute the norm, round stochastically and pack in Numba, in one trip to memory."""

from __future__ import annotations

import numba
import numpy as np

from hvd_adaptive.kernels.constants import CHECK_LANES, NORM_LANES
from hvd_adaptive.kernels.fixed import BLOCK, LANES, QUARTER, QUARTERS
from hvd_adaptive.kernels.numba import quantize
from hvd_adaptive.kernels.numba.checksum import add_done, first_block
from hvd_adaptive.kernels.numba.count import counted
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.pack import merge_quarters, store_block, store_partial
from hvd_adaptive.kernels.numba.permute import permuted
from hvd_adaptive.kernels.numba.radix import store_row
from hvd_adaptive.kernels.numba.random import STEPS, bucket_key, counter_of
from hvd_adaptive.kernels.numba.scan import clip_to, norm_of
from hvd_adaptive.kernels.packing import Packing

# The rules that find the index: see count.py, permute.py, and for the others quantize.py.
COUNT, PERMUTE, COUNT_MANY, SEARCH, UNIFORM, EXPONENTIAL = range(6)

_TAIL_ROWS = QUARTERS * LANES


def chunk_size(packing: Packing) -> int:
    """Return the coordinates packed at a time: a block of fixed width, or some rows of units."""
    if packing.digits == 1:
        return BLOCK
    row = LANES * packing.digits
    return -(-BLOCK // row) * row


# Kernels choose between units and fixed width by a constant of theirs, so that Numba compiles only
# one of the two.
@inline
def store_units(codes, index, rest, chunk, alphabet, digits, width, rows, words):
    """Pack chunk ``index``, which has ``rest`` coordinates, in units of several digits."""
    row = LANES * digits
    first, count = index * (chunk // row), (rest + row - 1) // row
    codes[rest : count * row] = np.uint32(0)
    for k in range(count):
        part = codes[k * row : (k + 1) * row]
        store_row(part, alphabet, digits, width, first + k, rows[:LANES], words)


@inline
def store_fixed(codes, index, rest, width, rows, words):
    """Pack block ``index``, which has ``rest`` coordinates, in codes of ``width`` bits."""
    at = index * width * LANES
    if rest == BLOCK:
        store_block(codes, words[at : at + width * LANES], numba.literally(width))
    else:
        store_tail(codes, rest, width, rows, words[at:])


@inline
def store_tail(codes, rest, width, rows, words):
    """Pack the last block of ``rest`` coordinates, which is not whole; return its words."""
    count = (rest + _TAIL_ROWS - 1) // _TAIL_ROWS
    codes[rest : _TAIL_ROWS * count] = np.uint32(0)
    merge_quarters(codes, LANES * count, width, rows)
    store_partial(rows, count, width, words)
    return (count * QUARTERS * width + 31) // 32 * LANES


def make_encoder(rule: int, depth: int, packing: Packing):
    """Make the encoder for one rule and packing, which are constants of the compiled code.

    depth: of the search tree if the rule is PERMUTE, the thresholds if it is COUNT. The encoder
    adds blocks of the body, which begins with the scales, to ``sums`` (CHECK_LANES; with no
    entries, nothing is added). ``summed`` (2,) is set as BlockSums describes. arrays: those of a
    quantize.Table.
    """
    chunk = chunk_size(packing)
    alphabet, digits, width = packing

    @jit
    def encode(x, scales, words, sums, summed, bucket_size, linf, clip, stream, arrays):
        table = quantize.Table(*arrays)
        codes, rows = np.empty(chunk, np.uint32), np.empty(QUARTER, np.uint32)
        acc, cell = np.empty(NORM_LANES, np.float32), np.empty(1, np.float32)
        rs, us = np.empty(chunk, np.float32), np.empty(chunk, np.float32)
        clipped = np.empty(bucket_size if clip > 0 else 0, np.float32)
        total, lanes = np.uint32(alphabet - 1), np.empty(CHECK_LANES, np.uint32)
        summed[:] = first_block(scales.size)
        for b in range(scales.size):
            begin = b * bucket_size
            end = min(x.size, begin + bucket_size)
            bucket = x[begin:end]
            if clip > 0:
                clip_to(bucket, clip, acc, clipped[: bucket.size])
                bucket = clipped[: bucket.size]
            scale = norm_of(bucket, linf, acc, cell)
            scales[b] = scale
            usable = scale > 0
            inverse = np.float32(1) / scale if usable else np.float32(0)
            low, high = bucket_key(stream, b)
            i = begin
            while i < end:
                first = i % chunk
                stop = min(end, i - first + chunk)
                run = bucket[i - begin : stop - begin]
                part = codes[first : first + stop - i]
                at = inverse, counter_of(i - begin, low), high, total
                if not usable:
                    part[:] = np.uint32(alphabet // 2)  # any code would do; coders make it short
                elif rule == COUNT_MANY:
                    quantize.count_many(run, at, table, rs, us, part)
                elif rule == SEARCH:
                    quantize.search(run, at, table, rs, us, part)
                elif rule <= PERMUTE:
                    first_code = table.ladder[0]
                    if rule == COUNT:
                        done = counted(
                            run, STEPS, part, at, table.start, table.gap, first_code, depth
                        )
                    else:
                        done = permuted(run, STEPS, part, at, table.tree, first_code, depth)
                    at = inverse, counter_of(i - begin + done, low), high, total
                    quantize.count_few(run[done:], at, table, part[done:])
                elif rule == UNIFORM:
                    quantize.uniform(run, at, table, part)
                else:
                    quantize.exponential(run, at, table, rs, us, part)
                if stop % chunk == 0:
                    index = stop // chunk - 1
                    if digits > 1:
                        store_units(
                            codes, index, chunk, chunk, alphabet, digits, width, rows, words
                        )
                    else:
                        store_fixed(codes, index, chunk, width, rows, words)
                    done = scales.size + stop // (LANES * digits) * width // 32 * LANES
                    add_done(words, scales.size, done, lanes, sums, summed)
                i = stop
        if x.size % chunk:
            index, rest = x.size // chunk, x.size % chunk
            if digits > 1:
                store_units(codes, index, rest, chunk, alphabet, digits, width, rows, words)
            else:
                store_fixed(codes, index, rest, width, rows, words)

    return encode
