"""Code sparse codes with Elias's code in Numba."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.omega import (
    LOOKUP_BITS,
    MOST_RECORDS,
    RECORD_BITS,
    code_words,
    lookup,
    records,
    signed_words,
    zero_code,
)

# ``encode`` stores 8 bytes at a time, and may touch so many behind a segment's own.
SLACK = 8
# A table of distances covers at least so many digits, so that there are few tables.
_LEAST_DIGITS = 12
# So many coordinates are searched at a time.
_BLOCK = 4096

_U = np.uint64
_LOW, _BYTE = _U(0xFFFFFFFF), _U(0xFF)
_TOP, _TOP_RECORDS = _U(64 - LOOKUP_BITS), _U(64 - RECORD_BITS)


def encode(codes: np.ndarray, alphabet: int, out: np.ndarray) -> int:
    """Code a segment as coding/coders.py describes; return the number of bytes.

    codes: uint8 (n,), each below ``alphabet``, which is odd. out: uint8, SLACK longer than the
    segment's bytes.
    """
    heads = code_words(max(_LEAST_DIGITS, (codes.size + 1).bit_length()))
    return int(_encode(codes, np.uint8(zero_code(alphabet)), heads, signed_words(alphabet), out))


def decode(data: np.ndarray, alphabet: int, codes: np.ndarray) -> bool:
    """Fill ``codes`` (uint8) from a segment's bytes (uint8); return whether these are valid.

    Only ``codes`` is written, whatever the bytes hold.
    """
    return bool(_decode(data, zero_code(alphabet), lookup(), records(alphabet), codes))


@inline
def _store(out, at, bits):
    """Store 8 bytes, the highest first."""
    for byte in range(8):
        out[at + _U(byte)] = np.uint8(bits >> _U(56 - 8 * byte))


@inline
def _load(data, at):
    bits = _U(0)
    for byte in range(8):
        bits |= _U(data[at + _U(byte)]) << _U(56 - 8 * byte)
    return bits


@jit
def _encode(codes, zero, heads, tails, out):
    # Between two records, ``held`` < 8 bits lie at the top of ``bits``. The parts of a record have
    # at most 32 and 14 bits, so that a record fits.
    bits, held, at = _U(0), _U(0), _U(0)
    last = -1
    where = np.empty(_BLOCK + 1, np.int32)
    for begin in range(0, codes.size, _BLOCK):
        # The loop has no branches, since processors cannot predict where nonzero coordinates are.
        found = 0
        for i in range(begin, min(begin + _BLOCK, codes.size)):
            where[found] = i
            found += codes[i] != zero
        for k in range(found):
            i = where[k]
            head, tail = heads[i - last], tails[_U(codes[i])]
            last = i
            length = tail >> _U(32)
            record = (head & _LOW) << length | (tail & _LOW)
            held += (head >> _U(32)) + length
            bits |= record << (_U(64) - held)
            _store(out, at, bits)
            at += held >> _U(3)
            bits <<= held & ~_U(7)
            held &= _U(7)
    if last != codes.size - 1:
        head = heads[codes.size - last]
        held += head >> _U(32)
        bits |= (head & _LOW) << (_U(64) - held)
        _store(out, at, bits)
    return at + ((held + _U(7)) >> _U(3))


@inline
def _number(window, entry):
    """Return the number whose code begins at ``window``'s top, and the bits before its last 0."""
    before, digits = entry & _BYTE, entry >> _U(8) & _BYTE
    # Shifts by 64 are undefined, and digits may be 0.
    number = ((window << before) >> _U(1) >> (_U(63) - digits)) + (entry >> _U(16))
    return number, before + digits


@jit
def _decode(data, zero, table, several, codes):
    codes[:] = np.uint8(zero)
    padded = np.empty(data.size + 8, np.uint8)
    padded[: data.size] = data
    padded[data.size :] = np.uint8(0)
    at, end = _U(0), _U(8 * data.size)
    # Places count from 1 and so need no sign; place 0 is before the first coordinate.
    place, last, most = _U(0), _U(codes.size), _U(zero)
    while place != last:
        # The window has 57 bits or more; a record has at most 46. Zeros follow the data, and ``at``
        # never exceeds ``end``.
        window = _load(padded, at >> _U(3)) << (at & _U(7))
        # Several short records are read at once if they end in time: this keeps them inside
        # ``codes``.
        entry = several[window >> _TOP_RECORDS]
        used = entry & _U(15)
        reach = place + (entry >> _U(4 + 14 * (MOST_RECORDS - 1)) & _U(63))
        if used != 0 and reach <= last:
            for record in range(MOST_RECORDS):
                field = entry >> _U(4 + 14 * record)
                codes[place + (field & _U(63)) - _U(1)] = np.uint8(field >> _U(6))
            place = reach
            at += used
            if at > end:
                return False
            continue
        distance, size = _number(window, _U(table[window >> _TOP]))
        wrong = window << size >> _U(63)
        place += distance
        at += size + _U(1)
        if wrong != 0 or place > last + _U(1) or at > end:
            return False
        if place > last:
            break
        window <<= size + _U(1)
        negative = window >> _U(63)
        window <<= _U(1)
        level, size = _number(window, _U(table[window >> _TOP]))
        wrong = window << size >> _U(63)
        at += size + _U(2)
        if wrong != 0 or level > most or at > end:
            return False
        codes[place - _U(1)] = np.uint8(most - level if negative != 0 else most + level)
    rest = end - at
    return rest < 8 and (rest == 0 or padded[data.size - 1] & ((1 << rest) - 1) == 0)
