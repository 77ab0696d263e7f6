"""Elias's omega code against the published words and a textbook recursion; its tables of large
numbers. test_elias.py reads and writes streams by the other tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_oracles import omega as text

from hvd_adaptive.kernels import omega
from hvd_adaptive.theory import elias_bits

PUBLISHED = {
    1: "0",
    2: "10 0",
    3: "11 0",
    4: "10 100 0",
    7: "10 111 0",
    8: "11 1000 0",
    15: "11 1111 0",
    16: "10 100 10000 0",
    100: "10 110 1100100 0",
    1000: "11 1001 1111101000 0",
    10_000: "11 1101 10011100010000 0",
    100_000: "10 100 10000 11000011010100000 0",
    1_000_000: "10 100 10011 11110100001001000000 0",
}


def as_text(entry: int) -> str:
    length, word = entry >> 32, entry & 0xFFFFFFFF
    return f"{word:0{length}b}" if length else ""


def test_published_words():
    for k, groups_of_digits in PUBLISHED.items():
        assert text(k) == groups_of_digits.replace(" ", "")
        word, length = omega.code_word(k)
        assert f"{word:0{length}b}" == text(k)


@given(
    st.integers(1, 2**32) | st.integers(1, 32).flatmap(lambda n: st.sampled_from((2**n, 2**n - 1)))
)
def test_words_of_all_sizes(k):
    word, length = omega.code_word(k)
    assert f"{word:0{length}b}" == text(k)
    assert omega.code_length(k) == length == elias_bits(k)


def test_what_has_no_word():
    for k in (0, -1, 2**32 + 1):
        with pytest.raises(ValueError, match=f"k={k}: must be an integer from 1 to 4294967296"):
            omega.code_word(k)
    for digits in (0, 22):
        with pytest.raises(ValueError, match=f"digits={digits}: must be an integer from 1 to 21"):
            omega.code_words(digits)
    for alphabet in (1, 2, 4, 256, 257):
        with pytest.raises(ValueError, match=f"alphabet={alphabet}: must be an odd number from 3"):
            omega.zero_code(alphabet)


def test_table_of_the_largest_words():
    table = omega.code_words(omega.MOST_DIGITS)
    rng = np.random.default_rng(0)
    for k in (2**18 - 1, 2**18, 2**20, 2**21 - 1, *rng.integers(1, 2**21, 200).tolist()):
        assert as_text(int(table[k])) == text(k)
    lengths = (table[1:] >> np.uint64(32)).astype(np.int64)
    np.testing.assert_array_equal(lengths, elias_bits(np.arange(1, 2**21)))
    assert elias_bits([[1, 2], [3, 4]]).tolist() == [[1, 3], [3, 6]]
    assert elias_bits([]).shape == (0,)
    # A record is one of these, a sign and a level's number, behind 7 bits at most.
    assert lengths.max() + 1 + omega.code_length(127) + 7 <= 64


def looked_up(bits: str) -> tuple[int, int]:
    """The number that the table's entry for these bits leads to, and the place of its last bit."""
    entry = int(omega.lookup()[int(bits[: omega.LOOKUP_BITS], 2)])
    before, digits, base = entry & 255, entry >> 8 & 255, entry >> 16
    return base + int("0" + bits[before : before + digits], 2), before + digits


def test_lookup_reads_every_word():
    """The word is completed by random bits behind it; the entry knows how to read it."""
    rng = np.random.default_rng(1)
    for k in (*range(1, 5000), 2**17, 2**21 - 1, *rng.integers(5000, 2**21, 300).tolist()):
        bits = text(k) + "".join(map(str, rng.integers(0, 2, omega.LOOKUP_BITS)))
        assert looked_up(bits) == (k, len(text(k)) - 1)


def test_lookup_of_anything_else_gives_too_large_numbers():
    """Words of 22 digits and more, 2**32 and beyond included, never pass for others."""
    for k in (2**21, 2**22, 2**24 + 5, 2**31, 2**32, 2**33, 2**40 + 1, 2**63, 2**100):
        bits = text(k).ljust(64, "0")
        number, last = looked_up(bits)
        assert number >= 2**21 or bits[last] == "1", k
