"""Code symbols with prefix codes over blocks (coding/prefix_code.py), and decode them, in Numba."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels.numba.bits import load64, store64
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.prefix_tables import LONGEST, QUICK_BITS, PrefixTables

# Number of codes between two refills: their bits and those of an unfinished byte fit 64.
_RUN = 3
_U0, _U1, _U8, _U32 = np.uint64(0), np.uint64(1), np.uint64(8), np.uint64(32)
_QUICK = np.uint64((1 << QUICK_BITS) - 1)
_BYTE, _CODE, _COUNT = np.uint64(0xFF), np.uint64(0xFFFF), np.uint64(0xFFFFFF)
# So many bytes are copied at a time.
_COPIED = 16


def most_bytes(count: int) -> int:
    """Return how many bytes ``encode`` may touch behind its first one, for ``count`` symbols."""
    return (LONGEST * count + 7) // 8 + 16


def encode(symbols: np.ndarray, book: PrefixTables, out: np.ndarray, bit: int = 0) -> int:
    """Append the codes of ``symbols`` to a stream; return the stream's end, in bits.

    symbols: uint8 or uint16, contiguous, each below book.alphabet (larger ones count as the last).
    out: uint8, contiguous, at least bit // 8 + most_bytes(symbols.size) bytes, else ValueError.
    bit: the end of the stream so far. The bits below ``bit`` are kept, all of the last byte's bits
    behind the new end are 0, and bytes behind that one may have been overwritten. If ``symbols``
    end inside a block, the block is completed: several books can follow each other in a stream.
    """
    if out.size < bit // 8 + most_bytes(symbols.size):
        raise ValueError(f"out: {out.size} bytes are too few for {symbols.size} symbols")
    return int(_encode(symbols, book.steps, book.ends, np.int64(book.alphabet), out, np.int64(bit)))


def decode(data: np.ndarray, bit: int, book: PrefixTables, symbols: np.ndarray) -> int:
    """Fill ``symbols`` from a stream that begins at ``bit``; return the last code's end, in bits.

    data: uint8, contiguous. symbols: uint8 or uint16, contiguous. Symbols of the last block beyond
    them are dropped. If the stream ends too early, the result is -1 and the content of ``symbols``
    is undefined. No byte outside ``data`` is read, none outside ``symbols`` is written. Each code
    gives at least one symbol, so that the loop always ends.
    """
    return int(_decode(data, np.int64(bit), *_tables(book, symbols), symbols.view(np.uint8)))


def encode_two(symbols: np.ndarray, book: PrefixTables, out: np.ndarray) -> tuple[int, int]:
    """Code the two rows of ``symbols`` (2, n) into the rows of ``out`` (2, most_bytes(n)), as
    ``encode`` does from bit 0, at the same time: neither waits for the other's look-ups.
    """
    steps, ends = book.steps, book.ends
    a, b = _encode_two(symbols[0], symbols[1], steps, ends, np.int64(book.alphabet), out[0], out[1])
    return int(a), int(b)


def decode_two(
    first: np.ndarray, second: np.ndarray, book: PrefixTables, symbols: np.ndarray
) -> tuple[int, int]:
    """Fill the two rows of ``symbols`` (2, n) from two streams, as ``decode`` does from bit 0."""
    a, b = _decode_two(first, second, *_tables(book, symbols), *symbols.view(np.uint8))
    return int(a), int(b)


def _tables(book: PrefixTables, symbols: np.ndarray) -> tuple:
    """Return what ``_decode`` reads, from quick to longest."""
    size = symbols.itemsize
    longest = max(book.longest_block, QUICK_BITS) * size
    return book.quick[0], book.lookup, np.int64(book.width), book.pools[size], size, longest


@inline
def _flush(out, at, buffer, bits):
    """Write the buffer's bytes; an unfinished byte is written once more."""
    store64(out, at, buffer)
    return at + (bits >> 3), np.uint64(buffer >> np.uint64(bits & ~7)), bits & 7


@inline
def _put(steps, state, symbol, top, buffer, bits):
    """Follow one symbol's branch; if a leaf is reached, put its code into the buffer."""
    step = steps[state + min(np.uint64(symbol), top)]
    buffer |= np.uint64(((step >> _U8) & _CODE) << np.uint64(bits))
    return np.uint64(step >> _U32), buffer, bits + np.int64(step & _BYTE)


@inline
def _finish(symbols, steps, ends, alphabet, out, state, at, buffer, bits):
    """Code the last symbols, fewer than a run, and complete their block."""
    top = np.uint64(alphabet - 1)
    for i in range(symbols.size):
        state, buffer, bits = _put(steps, state, symbols[i], top, buffer, bits)
        at, buffer, bits = _flush(out, at, buffer, bits)
    end = ends[state // np.uint64(alphabet)]
    buffer |= np.uint64((end >> _U8) << np.uint64(bits))
    bits += np.int64(end & _BYTE)
    at, buffer, bits = _flush(out, at, buffer, bits)
    return 8 * at + bits


@jit
def _encode(symbols, steps, ends, alphabet, out, bit):
    at, bits = bit >> 3, bit & 7
    buffer = np.uint64(out[at]) & np.uint64((_U1 << np.uint64(bits)) - _U1)
    state, top = _U0, np.uint64(alphabet - 1)
    whole = symbols.size // _RUN * _RUN
    for i in range(0, whole, _RUN):
        for j in range(_RUN):
            state, buffer, bits = _put(steps, state, symbols[i + j], top, buffer, bits)
        at, buffer, bits = _flush(out, at, buffer, bits)
    return _finish(symbols[whole:], steps, ends, alphabet, out, state, at, buffer, bits)


@jit
def _encode_two(a, b, steps, ends, alphabet, out_a, out_b):
    at_a, bits_a, buffer_a, state_a = np.int64(0), np.int64(0), _U0, _U0
    at_b, bits_b, buffer_b, state_b = np.int64(0), np.int64(0), _U0, _U0
    top = np.uint64(alphabet - 1)
    whole = a.size // _RUN * _RUN
    for i in range(0, whole, _RUN):
        for j in range(_RUN):
            state_a, buffer_a, bits_a = _put(steps, state_a, a[i + j], top, buffer_a, bits_a)
            state_b, buffer_b, bits_b = _put(steps, state_b, b[i + j], top, buffer_b, bits_b)
        at_a, buffer_a, bits_a = _flush(out_a, at_a, buffer_a, bits_a)
        at_b, buffer_b, bits_b = _flush(out_b, at_b, buffer_b, bits_b)
    rest_a, rest_b = a[whole:], b[whole:]
    end_a = _finish(rest_a, steps, ends, alphabet, out_a, state_a, at_a, buffer_a, bits_a)
    end_b = _finish(rest_b, steps, ends, alphabet, out_b, state_b, at_b, buffer_b, bits_b)
    return end_a, end_b


@inline
def _copy(pool, start, count, out, at):
    store64(out, at, load64(pool, start))
    store64(out, at + 8, load64(pool, start + 8))
    if count > _COPIED:
        for j in range(_COPIED, count, _COPIED):
            store64(out, at + j, load64(pool, start + j))
            store64(out, at + j + 8, load64(pool, start + j + 8))


@jit
def _decode(data, bit, quick, lookup, width, pool, size, longest, out):
    """Decode one stream from ``bit``.

    pool, out: bytes of symbols of ``size`` bytes each; pool continues for 16 bytes behind its end.
    longest: the most bytes that a look-up gives.
    """
    mask = np.uint64((_U1 << np.uint64(width)) - _U1)
    total = np.int64(8 * data.size)
    at = np.int64(0)
    if bit > total:
        return np.int64(-1)
    # The fast way needs 8 bytes of data and room for whole blocks.
    byte, bits = bit >> 3, bit & 7
    safe = np.int64(out.size - _RUN * (longest + _COPIED))
    while byte + 8 <= data.size and at <= safe:
        buffer = np.uint64(load64(data, byte) >> np.uint64(bits))
        for _ in range(_RUN):
            # The code is written out, here and below: a helper of so many arrays needs twice the
            # time.
            entry = quick[np.uint64(buffer & _QUICK)]
            if entry == _U0:
                entry = lookup[np.uint64(buffer & mask)]
            used = np.uint64(entry & _BYTE)
            count = np.int64((entry >> _U8) & _COUNT) * size
            _copy(pool, np.int64(entry >> _U32) * size, count, out, at)
            at += count
            buffer = np.uint64(buffer >> used)
            bits += np.int64(used)
        byte += bits >> 3
        bits &= 7
    bit = 8 * byte + bits
    while at < out.size:
        # Up to 24 bits are read from here; bits behind the end count as zeros.
        byte, value = bit >> 3, _U0
        for k in range(3):
            if byte + k < data.size:
                value |= np.uint64(np.uint64(data[byte + k]) << np.uint64(8 * k))
        entry = lookup[np.uint64((value >> np.uint64(bit & 7)) & mask)]
        bit += np.int64(entry & _BYTE)
        if bit > total:
            return np.int64(-1)
        start = np.int64(entry >> _U32) * size
        count = min(np.int64((entry >> _U8) & _COUNT) * size, np.int64(out.size) - at)
        for k in range(count):
            out[at + k] = pool[start + k]
        at += count
    return bit


@jit
def _decode_two(a, b, quick, lookup, width, pool, size, longest, out_a, out_b):
    """Run the fast way on both streams while it works for both; then decode one after the other."""
    mask = np.uint64((_U1 << np.uint64(width)) - _U1)
    safe = np.int64(out_a.size - _RUN * (longest + _COPIED))
    byte_a, bits_a, at_a = np.int64(0), np.int64(0), np.int64(0)
    byte_b, bits_b, at_b = np.int64(0), np.int64(0), np.int64(0)
    while byte_a + 8 <= a.size and byte_b + 8 <= b.size and max(at_a, at_b) <= safe:
        buffer_a = np.uint64(load64(a, byte_a) >> np.uint64(bits_a))
        buffer_b = np.uint64(load64(b, byte_b) >> np.uint64(bits_b))
        for _ in range(_RUN):
            entry_a = quick[np.uint64(buffer_a & _QUICK)]
            entry_b = quick[np.uint64(buffer_b & _QUICK)]
            if entry_a == _U0:
                entry_a = lookup[np.uint64(buffer_a & mask)]
            if entry_b == _U0:
                entry_b = lookup[np.uint64(buffer_b & mask)]
            used_a, used_b = np.uint64(entry_a & _BYTE), np.uint64(entry_b & _BYTE)
            count_a = np.int64((entry_a >> _U8) & _COUNT) * size
            count_b = np.int64((entry_b >> _U8) & _COUNT) * size
            _copy(pool, np.int64(entry_a >> _U32) * size, count_a, out_a, at_a)
            _copy(pool, np.int64(entry_b >> _U32) * size, count_b, out_b, at_b)
            at_a, at_b = at_a + count_a, at_b + count_b
            buffer_a, buffer_b = np.uint64(buffer_a >> used_a), np.uint64(buffer_b >> used_b)
            bits_a, bits_b = bits_a + np.int64(used_a), bits_b + np.int64(used_b)
        byte_a, bits_a = byte_a + (bits_a >> 3), bits_a & 7
        byte_b, bits_b = byte_b + (bits_b >> 3), bits_b & 7
    end_a = _decode(a, 8 * byte_a + bits_a, quick, lookup, width, pool, size, longest, out_a[at_a:])
    end_b = _decode(b, 8 * byte_b + bits_b, quick, lookup, width, pool, size, longest, out_b[at_b:])
    return end_a, end_b
