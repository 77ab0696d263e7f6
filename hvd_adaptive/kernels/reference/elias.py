"""Code sparse codes with Elias's code in plain Python: the oracle for the fast kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvd_adaptive.kernels.omega import code_word, zero_code

# ``encode`` may touch so many bytes behind a segment's own.
SLACK = 0


def encode(codes: np.ndarray, alphabet: int, out: np.ndarray) -> int:
    """Code a segment as coding/coders.py describes; return the number of bytes.

    codes: uint8 (n,), each below ``alphabet``, which is odd.  out: uint8, long enough.
    """
    zero, text, last = zero_code(alphabet), "", -1
    for position in np.flatnonzero(codes != zero).tolist():
        level = int(codes[position]) - zero
        text += _word(position - last) + ("1" if level < 0 else "0") + _word(abs(level))
        last = position
    if last != codes.size - 1:
        text += _word(codes.size - last)
    data = np.packbits(np.frombuffer(text.encode(), np.uint8) - ord("0"))
    out[: data.size] = data
    return data.size


def decode(data: np.ndarray, alphabet: int, codes: np.ndarray) -> bool:
    """Fill ``codes`` (uint8) from a segment's bytes (uint8); return whether these are valid.

    Only ``codes`` is written, whatever the bytes hold.
    """
    zero, position = zero_code(alphabet), -1
    bits = iter(np.unpackbits(data).tolist())
    codes[:] = zero
    try:
        while position != codes.size - 1:
            position += _read(bits, codes.size + 1)
            if position == codes.size:
                break
            sign = -1 if next(bits) else 1
            level = _read(bits, zero)
            if position > codes.size or level > zero:
                return False
            codes[position] = zero + sign * level
    except StopIteration:
        return False
    rest = list(bits)
    return len(rest) < 8 and not any(rest)


def _word(k: int) -> str:
    word, length = code_word(k)
    return f"{word:0{length}b}"


def _read(bits: Iterator[int], most: int) -> int:
    """Return the next number, or some number above ``most`` if the number exceeds ``most``."""
    k = 1
    while next(bits):
        if k >= most.bit_length():
            return most + 1
        k = 1 << k | int("0" + "".join([str(next(bits)) for _ in range(k)]), 2)
    return k
