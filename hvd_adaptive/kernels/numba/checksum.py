"""Compute checksums of whole payloads in Numba, with a block's lanes in registers."""

from __future__ import annotations

import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from hvd_adaptive.kernels.checksum import BLOCK, CHECKSUM_AT, HEADER_BYTES, LANES, A, B
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.lanes import INTS, LONG, WIDTH, emitted

_A, _B = np.uint32(A), np.uint32(B)
_HEADER, _PLACE = HEADER_BYTES // 4, CHECKSUM_AT // 4


_NOTHING = np.zeros(LANES, np.uint32), np.empty(0, np.int64)


def seal(payload, header, seed, known=None):
    data = payload.numpy()
    data[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
    if seed is not None:
        words = data.view(np.uint32)
        found = _NOTHING if known is None else (known.sums, known.summed)
        words[_PLACE] = _checksum(words[_HEADER:], seed, *found)


def checksums(payloads, seeds):
    words = [payload.numpy().view(np.uint32)[_HEADER:] for payload in payloads]
    return [_checksum(*pair, *_NOTHING) for pair in zip(words, seeds, strict=True)]


def checksum(words, seed):
    return _checksum(words.numpy().view(np.uint32), seed, *_NOTHING)


@intrinsic
def _rows_hashed(typingctx, words, rows, start, lanes):
    """Set ``lanes`` (uint32, 64) to the hash of ``rows`` rows of 64 words, from ``start``."""

    def emit(ops, args, source, target):
        builder, places = ops.builder, range(0, LANES, WIDTH)
        begun = ops.spread(args[2])
        cells = [cgutils.alloca_once_value(builder, begun) for _ in places]
        end = builder.mul(args[1], LONG(LANES))
        with cgutils.for_range_slice(builder, LONG(0), end, LONG(LANES), LONG) as (at, _):
            for place, cell in zip(places, cells, strict=True):
                word = ops.load(source.data, builder.add(at, LONG(place)), INTS)
                s = builder.add(builder.load(cell), builder.mul(word, ops.integers(B)))
                s = builder.or_(ops.shifted(s, 13), ops.shifted(s, -19))
                builder.store(builder.mul(s, ops.integers(A)), cell)
        for place, cell in zip(places, cells, strict=True):
            ops.store(builder.load(cell), target.data, LONG(place))

    return emitted(types.void(words, types.int64, types.uint32, lanes), emit, 0, 3)


@inline
def _hashed(lane, word):
    s = np.uint32(lane + np.uint32(word * _B))
    s = np.uint32(np.uint32(s << np.uint32(13)) | np.uint32(s >> np.uint32(19)))
    return np.uint32(s * _A)


@jit
def add_blocks(words, first, begin, end, lanes, sums):
    """Add the hashes of blocks ``begin`` to ``end`` of a body to ``sums``. ``words`` are the body's
    words from ``first`` on. lanes: room for LANES.
    """
    for index in range(begin, end):
        at = index * BLOCK - first
        block = words[at : at + BLOCK]
        rows = block.size // LANES
        _rows_hashed(block, rows, np.uint32(np.uint32(index) * _A), lanes)
        for i in range(rows * LANES, block.size):
            lanes[i - rows * LANES] = _hashed(lanes[i - rows * LANES], block[i])
        for lane in range(LANES):
            s = lanes[lane]
            sums[lane] += np.uint32(np.uint32(s ^ np.uint32(s >> np.uint32(15))) * _B)


@inline
def first_block(word):
    """Return the first block that begins at ``word`` of a body or later."""
    return (word + BLOCK - 1) // BLOCK


@inline
def add_done(words, first, done, lanes, sums, run):
    """Call ``add_blocks`` for the blocks that end by word ``done`` of the body and are not in
    ``run``, the first and the end of the blocks already added. Do nothing if ``sums`` has no room.
    """
    until = done // BLOCK
    if sums.size and until > run[1]:
        add_blocks(words, first, run[1], until, lanes, sums)
        run[1] = until


@jit
def _checksum(words, seed, known, summed):
    """Return the checksum of ``words``. seed: an int below 2**32.  known, summed: see BlockSums."""
    lanes, sums, at = np.empty(LANES, np.uint32), known.copy(), 0
    for run in range(0, summed.size, 2):
        add_blocks(words, 0, at, summed[run], lanes, sums)
        at = summed[run + 1]
    add_blocks(words, 0, at, (words.size + BLOCK - 1) // BLOCK, lanes, sums)
    total = np.uint32(np.uint32(seed) + np.uint32(words.size))
    for lane in range(LANES):
        total = np.uint32(np.uint32(total ^ sums[lane]) * _A)
        total = np.uint32(total ^ np.uint32(total >> np.uint32(15)))
        total = np.uint32(total * _B)
    return total
