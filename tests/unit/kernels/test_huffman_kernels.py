"""Prefix-code kernels: bit for bit what is told of them, and nothing outside the arrays."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import unit_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_decoder import bits_of
from wire_decoder import book_of as told_book

from hvd_adaptive.coding.prefix_code import PrefixCode
from hvd_adaptive.kernels.numba import huffman

GUARD = 0xA5
ALPHABETS = (2, 3, 7, 8, 9, 31, 256, 300, 4096)


@functools.cache
def book_of(alphabet: int, concentration: float, seed: int = 0) -> tuple[PrefixCode, np.ndarray]:
    p = np.random.default_rng(seed).dirichlet(np.full(alphabet, concentration))
    return PrefixCode.build(p), p


def draw(book: PrefixCode, p: np.ndarray | None, count: int, seed: int) -> np.ndarray:
    kind = np.uint8 if book.alphabet <= 256 else np.uint16
    return np.random.default_rng(seed).choice(book.alphabet, count, p=p).astype(kind)


def guarded(shape, kind=np.uint8) -> np.ndarray:
    return np.full(shape, GUARD, kind)


def text_of(data: np.ndarray) -> str:
    return "".join(map(str, bits_of(data.tobytes(), "little")))


@settings(max_examples=40)
@given(
    alphabet=st.sampled_from(ALPHABETS[:-1]),
    concentration=st.sampled_from((0.02, 5.0)),
    counts=st.lists(st.integers(0, 400), min_size=1, max_size=3),
    fitting=st.booleans(),
    bit=st.integers(0, 20),
    seed=st.integers(0, 1),
)
def test_streams_are_as_told(alphabet, concentration, counts, fitting, bit, seed):
    """Runs with a book each follow one another in a stream, which may begin at any bit; symbols
    may be others than the book expects."""
    books = [book_of(alphabet, concentration, seed + k) for k in range(len(counts))]
    runs = [
        draw(book, p if fitting else None, count, seed)
        for (book, p), count in zip(books, counts, strict=True)
    ]
    room = 4 + sum(huffman.most_bytes(count) for count in counts)
    out, ends, told = guarded(room + 64), [bit], ""
    out[bit // 8] = 0x35
    before = text_of(out[: bit // 8 + 1])[:bit]
    for run, (book, p) in zip(runs, books, strict=True):
        ends.append(huffman.encode(run, book, out[:room], ends[-1]))
        told += oracle.prefix_bits(told_book(p), run)
    assert (out[room:] == GUARD).all() and ends[-1] == bit + len(told)
    data = out[: -(-ends[-1] // 8)].copy()
    assert text_of(data) == before + told + "0" * (-ends[-1] % 8)
    for run, (book, _), begin, end in zip(runs, books, ends, ends[1:], strict=False):
        back = guarded(run.size + 8, run.dtype)
        assert huffman.decode(data, begin, book, back[: run.size]) == end
        assert np.array_equal(back[: run.size], run) and (back[run.size :] == GUARD).all()


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_long_streams(alphabet, count=66_000):
    """Long enough for the fast loop, and for blocks of any length."""
    book, p = book_of(alphabet, 0.1)
    symbols = draw(book, p, count, 1)
    out = np.zeros(huffman.most_bytes(count), np.uint8)
    end = huffman.encode(symbols, book, out)
    back = np.empty_like(symbols)
    assert huffman.decode(out[: -(-end // 8)].copy(), 0, book, back) == end
    assert np.array_equal(back, symbols)
    assert end / count <= 1.1 * book.bits_per_symbol(p) + 200 / count


@pytest.mark.many
@pytest.mark.parametrize("alphabet", (2, 3, 31, 256))
@pytest.mark.parametrize("count", (0, 1, 500, 20_000))
def test_two_streams_at_a_time(alphabet, count):
    """What each would be alone, guards included; one may be damaged or end too early."""
    book, p = book_of(alphabet, 0.3)
    rows = np.stack([draw(book, law, count, 5) for law in (p, None)])
    room = huffman.most_bytes(count)
    outs, alone = guarded((2, room + 64)), np.zeros(room, np.uint8)
    ends = huffman.encode_two(rows, book, outs[:, :room])
    assert (outs[:, room:] == GUARD).all()
    streams = []
    for row, out, end in zip(rows, outs, ends, strict=True):
        alone[0] = 0
        assert huffman.encode(row, book, alone) == end
        streams.append(out[: -(-end // 8)].copy())
        assert np.array_equal(streams[-1], alone[: -(-end // 8)])
    broken = np.random.default_rng(0).integers(0, 256, streams[0].size, np.uint8)
    for first in (streams[0], streams[0][: -(-count // 50)], broken):
        back, want = guarded((2, count + 64)), np.empty(count, np.uint8)
        got = huffman.decode_two(first.copy(), streams[1], book, back[:, :count])
        assert got == (huffman.decode(first.copy(), 0, book, want), ends[1])
        assert (back[:, count:] == GUARD).all() and np.array_equal(back[1, :count], rows[1])
        assert got[0] < 0 or np.array_equal(back[0, :count], want)


def test_streams_without_a_bit_to_read():
    book, _ = book_of(8, 0.5)
    nothing, back = np.empty(0, np.uint8), np.empty(300, np.uint8)
    assert huffman.decode(np.zeros(5, np.uint8), 41, book, back) == -1
    assert huffman.decode(nothing, 0, book, back) == -1
    assert huffman.decode(nothing, 0, book, back[:0]) == 0


@settings(max_examples=100)
@given(
    alphabet=st.sampled_from((2, 3, 8, 255, 300)),
    concentration=st.sampled_from((0.02, 1.0)),
    data=st.binary(max_size=200),
    count=st.integers(0, 1000),
)
def test_any_bytes_are_decoded_or_refused(alphabet, concentration, data, count):
    """As told; nothing is written behind the symbols."""
    book, p = book_of(alphabet, concentration)
    given_bytes = np.frombuffer(data, np.uint8).copy()
    back = guarded(count + 64, np.uint8 if alphabet <= 256 else np.uint16)
    end = huffman.decode(given_bytes, 0, book, back[:count])
    told, symbols = oracle.prefix_symbols(told_book(p), bits_of(data, "little"), count)
    assert end == told and (back[count:] == GUARD).all()
    assert end < 0 or back[:count].tolist() == symbols


def test_symbols_outside_the_alphabet_and_too_little_room():
    """The former count as the last symbol: no code is read from outside the table."""
    book, _ = book_of(5, 1.0)
    out, back = np.zeros(huffman.most_bytes(6), np.uint8), np.empty(6, np.uint8)
    end = huffman.encode(np.array([0, 9, 255, 4, 5, 1], np.uint8), book, out)
    huffman.decode(out[: -(-end // 8)].copy(), 0, book, back)
    assert back.tolist() == [0, 4, 4, 4, 4, 1]
    with pytest.raises(ValueError, match="too few"):
        huffman.encode(np.zeros(7, np.uint8), book, out[:20])
