"""Code symbols by prefix codes over blocks, bit by bit, in Python: numba/huffman.py's oracle."""

from __future__ import annotations

import functools

import numpy as np

from hvd_adaptive.kernels.prefix_tables import PrefixTables


def most_bytes(count: int) -> int:
    """Return how many bytes ``encode`` may touch behind its first one, for ``count`` symbols."""
    return 2 * count + 16


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
    node, bits = 0, [int(out[bit // 8]) >> k & 1 for k in range(bit % 8)]
    for symbol in symbols.tolist():
        node = int(book.children[node, min(symbol, book.alphabet - 1)])
        if node < 0:
            bits += _code(book, -1 - node)
            node = 0
    if node > 0:
        bits += _code(book, _shortest(book, node)[1])
    first, data = bit // 8, np.packbits(np.array(bits or [0], np.uint8), bitorder="little")
    out[first : first + data.size] = data
    return 8 * first + len(bits)


def decode(data: np.ndarray, bit: int, book: PrefixTables, symbols: np.ndarray) -> int:
    """Fill ``symbols`` from a stream that begins at ``bit``; return the last code's end, in bits.

    data: uint8, contiguous. symbols: uint8 or uint16, contiguous. Symbols of the last block beyond
    them are dropped. If the stream ends too early, the result is -1 and the content of ``symbols``
    is undefined. No byte outside ``data`` is read, none outside ``symbols`` is written. Each code
    gives at least one symbol, so that the loop always ends.
    """
    leaf_of = _leaves(book)
    blocks, starts = book.blocks
    total, done = 8 * data.size, 0
    if bit > total:
        return -1
    while done < symbols.size:
        code: tuple[int, ...] = ()
        while code not in leaf_of:
            if bit == total:
                return -1
            code += (int(data[bit // 8]) >> bit % 8 & 1,)
            bit += 1
        leaf = leaf_of[code]
        block = blocks[starts[leaf] : starts[leaf + 1]][: symbols.size - done]
        symbols[done : done + block.size] = block
        done += block.size
    return bit


def encode_two(symbols: np.ndarray, book: PrefixTables, out: np.ndarray) -> tuple[int, int]:
    """Code the two rows of ``symbols`` (2, n) into the rows of ``out`` (2, most_bytes(n)), as
    ``encode`` does from bit 0.
    """
    return encode(symbols[0], book, out[0]), encode(symbols[1], book, out[1])


def decode_two(
    first: np.ndarray, second: np.ndarray, book: PrefixTables, symbols: np.ndarray
) -> tuple[int, int]:
    """Fill the two rows of ``symbols`` (2, n) from two streams, as ``decode`` does from bit 0."""
    return decode(first, 0, book, symbols[0]), decode(second, 0, book, symbols[1])


@functools.lru_cache(maxsize=16)
def _leaves(book: PrefixTables) -> dict[tuple[int, ...], int]:
    """Return the leaves by their codes."""
    return {tuple(_code(book, leaf)): leaf for leaf in range(book.lengths.size)}


def _code(book: PrefixTables, leaf: int) -> list[int]:
    return [int(book.codes[leaf]) >> k & 1 for k in range(int(book.lengths[leaf]))]


def _shortest(book: PrefixTables, node: int) -> tuple[int, int]:
    """Return the length and number of the leaf with the shortest code below an inner node; of
    equally short ones, the leaf of the first branch.
    """
    found = [
        (int(book.lengths[-1 - child]), -1 - child) if child < 0 else _shortest(book, child)
        for child in book.children[node].tolist()
    ]
    return min(found, key=lambda pair: pair[0])
