"""Compute Elias's recursive (omega) code of the positive integers, and its tables.

Source: Elias 1975, Universal codeword sets and representations of the integers; QSGD section 3.1
and NUQSGD section 3.2 use it. The code of k is built from its end. Start with a bit 0; while k > 1,
put the binary digits of k in front and set k := (number of these digits) - 1. With λ(k) =
floor(log2 k) the code has

    |ω(1)| = 1,   |ω(k)| = (λ(k) + 1) + |ω(λ(k))|

bits, so ω(1) = 0, ω(2) = 10 0, ω(4) = 10 100 0, ω(16) = 10 100 10000 0. Every group of digits
begins with a 1, and the final 0 marks the end. No code is a prefix of another.
"""

from __future__ import annotations

import functools

import numpy as np

LARGEST = 2**32
# Most binary digits of the numbers in streams; the longest code has 10 + 21 + 1 bits.
MOST_DIGITS = 21
# The code of any number below 2**32 has at most 10 bits before its last group of digits; one more
# bit separates that group from the end.
LOOKUP_BITS = 11
_INVALID = 31 << 8
RECORD_BITS = 12
MOST_RECORDS = 4
_LOW = 0xFFFFFFFF


def code_length(k: int) -> int:
    """Return the bits of the code of k; raise ValueError outside 1 to 2**32."""
    return code_word(k)[1]


def code_word(k: int) -> tuple[int, int]:
    """Return the code of k, from 1 to 2**32, as a number (first bit highest), and its bits."""
    if not 1 <= k <= LARGEST:
        raise ValueError(f"k={k!r}: must be an integer from 1 to {LARGEST}")
    word, length = 0, 1
    while k > 1:
        digits = k.bit_length()
        word |= k << length
        length += digits
        k = digits - 1
    return word, length


@functools.cache
def code_words(digits: int) -> np.ndarray:
    """Return bits << 32 | code of every number with at most ``digits`` (1 to MOST_DIGITS) binary
    digits: uint64 (2**digits,), indexed by the number; entry 0 is 0.
    """
    if not 1 <= digits <= MOST_DIGITS:
        raise ValueError(f"digits={digits!r}: must be an integer from 1 to {MOST_DIGITS}")
    words = np.zeros(1 << digits, np.uint64)
    words[1] = 1 << 32
    for count in range(2, digits + 1):
        prefix, length = code_word(count - 1)
        k = np.arange(1 << (count - 1), 1 << count, dtype=np.uint64)
        # The prefix without its last 0, then k, then a 0.
        high = (length + count) << 32 | prefix >> 1 << (count + 1)
        words[1 << (count - 1) : 1 << count] = np.uint64(high) | k << np.uint64(1)
    words.flags.writeable = False
    return words


@functools.cache
def signed_words(alphabet: int) -> np.ndarray:
    """Return bits << 32 | sign and code of the level's number, for each code of an odd alphabet.

    The result is uint64 (256,), with zeros for the code of zero and beyond the alphabet. Codes
    number the levels in ascending order: zero is the middle one, and the k-th level of either sign
    is k away from it. The sign bit is 0 for a positive level, 1 for a negative one.
    """
    zero = zero_code(alphabet)
    words = np.zeros(256, np.uint64)
    for code in range(alphabet):
        if code != zero:
            word, length = code_word(abs(code - zero))
            words[code] = (length + 1) << 32 | (code < zero) << length | word
    words.flags.writeable = False
    return words


def zero_code(alphabet: int) -> int:
    """Return the code of zero, which equals the number of levels of either sign; raise ValueError
    if the alphabet has no zero (it is even), or is out of range.
    """
    if alphabet % 2 == 0 or not 3 <= alphabet <= 255:
        raise ValueError(f"alphabet={alphabet!r}: must be an odd number from 3 to 255")
    return alphabet // 2


@functools.cache
def lookup() -> np.ndarray:
    """Return the table that decodes a code by its first LOOKUP_BITS bits, uint32.

    An entry is before | digits << 8 | base << 16: after ``before`` bits follow ``digits`` digits of
    the number and the final 0. base is 1 for the number 1, which has no digits, else 0. If the end
    is not among these bits, the decoder must check the 0: none of these codes can continue below
    2**32. A prefix of numbers of more than MOST_DIGITS digits is read as 31 digits, the first of
    which is 1. The shape is (2**LOOKUP_BITS,).
    """
    entries = np.array([_entry(bits) for bits in range(1 << LOOKUP_BITS)], np.uint32)
    entries.flags.writeable = False
    return entries


def _entry(bits: int) -> int:
    before, k, digits = 0, 1, 0
    while before + digits < LOOKUP_BITS and bits >> (LOOKUP_BITS - 1 - before - digits) & 1:
        before, digits = before + digits, k + 1
        rest = LOOKUP_BITS - before - digits
        if rest < 0:  # the number continues after these bits
            break
        k = bits >> rest & ((1 << digits) - 1)
    if digits == 0:
        return 1 << 16
    return before | digits << 8 if digits <= MOST_DIGITS else _INVALID


@functools.cache
def records(alphabet: int) -> np.ndarray:
    """Return the table of the whole records in the first RECORD_BITS bits, uint64.

    A record is a distance (at most 15 here), a sign, and a level's number. The lowest 4 bits of an
    entry are the bits of its records, at most MOST_RECORDS; 0 if there are none. From bit 4
    on, 14 bits follow for each record: the distance from the start of the first one | the level's
    code << 6. If there are fewer records, the last one is repeated. The shape is (2**RECORD_BITS,).
    """
    first = np.zeros((1 << RECORD_BITS, 3), np.uint64)
    heads = code_words(4).tolist()
    for code, tail in enumerate(signed_words(alphabet).tolist()):
        for distance, head in enumerate(heads):
            rest = RECORD_BITS - (head >> 32) - (tail >> 32)
            if distance and tail and rest >= 0:
                word = (head << (tail >> 32) | tail) & _LOW
                first[word << rest : (word + 1) << rest] = RECORD_BITS - rest, distance, code
    bits = np.arange(1 << RECORD_BITS, dtype=np.uint64)
    used, place, codes, table = (np.zeros_like(bits) for _ in range(4))
    for record in range(MOST_RECORDS):
        taken, distance, level = first[bits << used & np.uint64((1 << RECORD_BITS) - 1)].T
        fits = (taken > 0) & (used + taken <= RECORD_BITS)
        used, place = used + fits * taken, place + fits * distance
        codes = np.where(fits, level, codes)
        table |= (place | codes << np.uint64(6)) << np.uint64(4 + 14 * record)
    table |= used
    table.flags.writeable = False
    return table
