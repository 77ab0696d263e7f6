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


def seal(payload, header, seed):
    data = payload.numpy()
    data[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
    if seed is not None:
        words = data.view(np.uint32)
        words[_PLACE] = _checksum(words[_HEADER:], seed)


def checksums(payloads, seeds):
    words = [payload.numpy().view(np.uint32)[_HEADER:] for payload in payloads]
    return [_checksum(*pair) for pair in zip(words, seeds, strict=True)]


def checksum(words, seed):
    return _checksum(words.numpy().view(np.uint32), seed)


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
def _checksum(words, seed):
    """Return the checksum of ``words``. seed: an int below 2**32."""
    lanes, sums = np.empty(LANES, np.uint32), np.zeros(LANES, np.uint32)
    for at in range(0, words.size, BLOCK):
        block = words[at : at + BLOCK]
        rows = block.size // LANES
        _rows_hashed(block, rows, np.uint32(np.uint32(at // BLOCK) * _A), lanes)
        for i in range(rows * LANES, block.size):
            lanes[i - rows * LANES] = _hashed(lanes[i - rows * LANES], block[i])
        for lane in range(LANES):
            s = lanes[lane]
            sums[lane] += np.uint32(np.uint32(s ^ np.uint32(s >> np.uint32(15))) * _B)
    total = np.uint32(np.uint32(seed) + np.uint32(words.size))
    for lane in range(LANES):
        total = np.uint32(np.uint32(total ^ sums[lane]) * _A)
        total = np.uint32(total ^ np.uint32(total >> np.uint32(15)))
        total = np.uint32(total * _B)
    return total
