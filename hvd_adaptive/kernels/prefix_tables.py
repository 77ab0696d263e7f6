"""Build tables of a prefix code over blocks of symbols, as the kernels read them.

coding/prefix_code.py describes and builds such a code.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

LONGEST = 16
# The decoder's first look-up reads so many bits.
QUICK_BITS = 12


@dataclass(frozen=True, eq=False)
class PrefixTables:
    """Hold a parse tree, a code for each leaf, and the tables of coding and decoding: see
    docs/wire_format.md, "huffman".

    children: int32 (inner, alphabet): a branch leads to inner node n if it holds n > 0, and to leaf
    -n - 1 if it holds a negative n; the root is 0. lengths: uint8 (leaves,), bits of each leaf's
    code. Codes are canonical, first bit highest. They are written first bit first; bytes are filled
    from their lowest bit.
    """

    children: np.ndarray
    lengths: np.ndarray

    @property
    def alphabet(self) -> int:
        """Return the number of symbols."""
        return self.children.shape[1]

    @functools.cached_property
    def width(self) -> int:
        """Return the bits of the longest code."""
        return int(self.lengths.max())

    @functools.cached_property
    def codes(self) -> np.ndarray:
        """Return uint16 (leaves,): the codes, first bit lowest, as they are written."""
        order = self._order
        lengths = self.lengths[order].astype(np.int64)
        first_bit_highest = np.cumsum(1 << (LONGEST - lengths)) - (1 << (LONGEST - lengths))
        codes = np.empty(lengths.size, np.uint16)
        codes[order] = _reversed(first_bit_highest, LONGEST)
        return codes

    @functools.cached_property
    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all leaves' symbols (uint16), and where each leaf's begin, int64 (leaves + 1,)."""
        before: list[tuple[int, ...]] = [() for _ in self.children]
        found: list[tuple[int, ...]] = [() for _ in self.lengths]
        for node, branches in enumerate(self.children.tolist()):
            for symbol, branch in enumerate(branches):
                if branch > 0:
                    before[branch] = (*before[node], symbol)
                else:
                    found[-1 - branch] = (*before[node], symbol)
        starts = np.cumsum([0, *map(len, found)], dtype=np.int64)
        return np.array(list(itertools.chain.from_iterable(found)), np.uint16), starts

    @functools.cached_property
    def steps(self) -> np.ndarray:
        """Return the encoder's table, uint64 (inner * alphabet,).

        The entry at ``state + symbol`` holds the length of the code to write (8 bits, 0 for none),
        the code (16 bits), and from bit 32 the next state, an inner node times the alphabet.
        """
        leaf = np.maximum(-1 - self.children, 0)
        state = np.maximum(self.children, 0).astype(np.uint64) * np.uint64(self.alphabet)
        steps = np.where(self.children < 0, self._emitted[leaf], state << np.uint64(32))
        return steps.reshape(-1)

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Return uint64 (inner,): length and code, as in ``steps``, of the leaf that completes a
        block that ends at an inner node: the leaf of the shortest code below it; 0 at the root.
        """
        best = np.zeros(len(self.children), np.int64)
        for node in range(len(best) - 1, -1, -1):
            below = self.children[node]
            choices = np.where(below < 0, -1 - below, best[np.maximum(below, 0)])
            best[node] = choices[np.argmin(self.lengths[choices])]
        ends = self._emitted[best]
        ends[0] = 0
        return ends

    @functools.cached_property
    def lookup(self) -> np.ndarray:
        """Return the decoder's table, uint64 (2**width,).

        The entry at the next ``width`` bits holds the length of the code that they begin with (8
        bits), the number of its block's symbols (24 bits) and from bit 32 the place at which these
        begin in ``blocks``.
        """
        starts = self.blocks[1].astype(np.uint64)
        entries = (
            self.lengths.astype(np.uint64)
            | (np.diff(starts) << np.uint64(8))
            | (starts[:-1] << np.uint64(32))
        )
        order = self._order
        room = 1 << (self.width - self.lengths[order].astype(np.int64))
        table = np.empty(1 << self.width, np.uint64)
        table[_reversed(np.arange(table.size), self.width)] = np.repeat(entries[order], room)
        return table

    @functools.cached_property
    def longest_block(self) -> int:
        """Return the number of symbols of the longest block."""
        return int(np.diff(self.blocks[1]).max())

    @functools.cached_property
    def quick(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the decoder's first look-up, uint64 (2**QUICK_BITS,), as ``lookup`` but for
        QUICK_BITS bits, and the symbols that follow those of ``blocks``.

        An entry is 0 if the next code is longer. For a symbol code an entry has all the symbols
        whose codes these bits hold.
        """
        bits, mask = np.arange(1 << QUICK_BITS), (1 << self.width) - 1
        first = self.lookup[bits & mask]
        length = (first & np.uint64(0xFF)).astype(np.int64)
        if self.longest_block > 1:
            return np.where(length <= QUICK_BITS, first, np.uint64(0)), np.empty(0, np.uint16)
        symbols = np.zeros((bits.size, QUICK_BITS), np.uint16)
        used, count = np.zeros_like(bits), np.zeros_like(bits)
        for _ in range(QUICK_BITS):
            entry = self.lookup[bits >> used & mask]
            length = (entry & np.uint64(0xFF)).astype(np.int64)
            fits = used + length <= QUICK_BITS
            leaf = (entry[fits] >> np.uint64(32)).astype(np.int64)
            symbols[fits, count[fits]] = self.blocks[0][leaf]
            used, count = used + length * fits, count + fits
        starts = self.blocks[0].size + np.cumsum(count) - count
        entries = used.astype(np.uint64) | (count << 8 | starts << 32).astype(np.uint64)
        entries[count == 0] = 0
        return entries, symbols[np.arange(QUICK_BITS) < count[:, None]]

    @functools.cached_property
    def pools(self) -> dict[int, np.ndarray]:
        """Return ``lookup``'s and ``quick``'s symbols of 1 and of 2 bytes, and 16 more bytes."""
        symbols, more = np.concatenate([self.blocks[0], self.quick[1]]), np.zeros(16, np.uint8)
        return {
            size: np.concatenate([symbols.astype(kind).view(np.uint8), more])
            for size, kind in ((1, np.uint8), (2, np.uint16))
        }

    @functools.cached_property
    def _emitted(self) -> np.ndarray:
        return self.lengths.astype(np.uint64) | (self.codes.astype(np.uint64) << np.uint64(8))

    @functools.cached_property
    def _order(self) -> np.ndarray:
        """Return the leaves in the order of their codes."""
        return np.argsort(self.lengths, kind="stable")


def is_used_up(data: np.ndarray, end: int) -> bool:
    """Return whether a stream of bytes ends at bit ``end`` >= 0, and zeros fill its last byte."""
    if end < 0 or -(-end // 8) != data.size:
        return False
    return end % 8 == 0 or int(data[-1]) >> end % 8 == 0


def _reversed(values: np.ndarray, width: int) -> np.ndarray:
    """Return the lowest ``width`` bits of each value in reverse order."""
    values, out = np.asarray(values, np.int64), np.zeros(np.shape(values), np.int64)
    for bit in range(width):
        out |= (values >> bit & 1) << (width - 1 - bit)
    return out
