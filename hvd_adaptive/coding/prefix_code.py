"""Build prefix codes over blocks of symbols: parse trees with canonical Huffman codes.

The stream of symbols is cut into blocks. A block is a path from the root to a leaf of a tree in
which every inner node has one branch for each symbol; it is sent as the code of its leaf. With one
symbol per block this is Huffman's code, which needs at least 1 bit per symbol. Blocks of many
symbols come close to any entropy (named in the ALQ paper, App. D; Tunstall 1967 for the tree).
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.coding.parse_tree import grown, limited_lengths

LONGEST = 16
MOST_SYMBOLS = 4096
# Least probability of a symbol. Every symbol then has a code, at a negligible cost to the others.
FLOOR = 2.0**-20

# Leaves of the largest trees; large alphabets have LEAVES_A_SYMBOL for each symbol, up to
# MOST_LEAVES. The look-up tables fit in the first- and second-level caches.
LEAVES, LEAVES_A_SYMBOL, MOST_LEAVES = 1024, 64, 4096
# Length limits of a tree's codes. The first limit that costs at most ROOM times the cost of the
# last one is used, since the decoder's look-up table has 2**bits entries.
TREE_BITS = (12, 14, 16)
ROOM = 1.003
# Bits of the decoder's first look-up table.
QUICK_BITS = 12


@dataclass(frozen=True, eq=False)
class PrefixCode:
    """Parse tree, and a code for each leaf.

    Inner nodes are numbered in the order of their splits; the root is 0. Leaves are numbered in the
    order of the branches that lead to them. Codes are canonical: of two leaves, the one with the
    shorter code, or else the lower number, has the smaller code, first bit highest. Codes are
    written first bit first, and bytes are filled from their lowest bit.

    Attributes:
        children: int32 (inner, alphabet). A branch n > 0 leads to inner node n, a negative branch n
            to leaf -n - 1.
        lengths: uint8 (leaves,), bits of each leaf's code.
    """

    children: np.ndarray
    lengths: np.ndarray

    @classmethod
    def build(cls, probabilities: ArrayLike) -> PrefixCode:
        """Return a code with few expected bits for independent symbols of these probabilities.

        If one symbol is frequent and the others become rarer on both sides (as in Laplace, normal
        and Student's laws), the code is within 1 % of the entropy from 0.012 bits per symbol for 3
        symbols; within 1.3 % from 0.06 for up to 9; within 2 % from 0.12 for up to 31; within 3.1 %
        from 0.12 for up to 63; within 2.6 % from 0.5 for up to 255. Below these entropies the
        largest tree is too small.

        The same float64 numbers give the same code on every machine: only single products and
        correctly rounded sums decide.

        Args:
            probabilities: (alphabet,), 2 to 4096 non-negative numbers with a finite sum above 0.
                Each counts as at least FLOOR of the sum.

        Raises:
            ValueError: ``probabilities`` has another shape or other values.
        """
        p = _checked(probabilities)
        simple = _code(np.array([-1 - np.arange(p.size)], np.int32), p, LONGEST)
        leaves = min(MOST_LEAVES, max(LEAVES, LEAVES_A_SYMBOL * p.size))
        if leaves < 2 * p.size:
            return simple
        children, weights = grown(p, leaves)
        trees = [_code(children, weights, bits) for bits in TREE_BITS if weights.size <= 1 << bits]
        costs = [math.fsum(weights * tree.lengths) for tree in trees]
        tree = next(t for t, cost in zip(trees, costs, strict=True) if cost <= ROOM * costs[-1])
        better = ROOM * tree.bits_per_symbol(p) < simple.bits_per_symbol(p)
        return tree if better else simple

    @property
    def alphabet(self) -> int:
        """Return the number of symbols."""
        return self.children.shape[1]

    def bits_per_symbol(self, probabilities: ArrayLike) -> float:
        """Return the expected bits per independent symbol of these probabilities.

        The probabilities may differ from those that the code was built for. The result is the
        expected bits of a block divided by its expected symbols, since blocks renew. The completed
        last block of a segment is not counted.
        """
        p = _checked(probabilities, floor=0.0)
        if p.size != self.alphabet:
            raise ValueError(f"probabilities: must have {self.alphabet} numbers, not {p.size}")
        inner, leaf = self._reached(p)
        return math.fsum(leaf * self.lengths) / math.fsum(inner)

    @functools.cached_property
    def fingerprint(self) -> int:
        """Return 32 bits that differ between codes."""
        crc = zlib.crc32(self.children.astype("<i4").tobytes(), self.alphabet)
        return zlib.crc32(self.lengths.tobytes(), crc)

    @functools.cached_property
    def width(self) -> int:
        """Return the bits of the longest code."""
        return int(self.lengths.max())

    @functools.cached_property
    def codes(self) -> np.ndarray:
        """Return the codes as written, first bit lowest: uint16 (leaves,)."""
        order = self._order
        lengths = self.lengths[order].astype(np.int64)
        first_bit_highest = np.cumsum(1 << (LONGEST - lengths)) - (1 << (LONGEST - lengths))
        codes = np.empty(lengths.size, np.uint16)
        codes[order] = _reversed(first_bit_highest, LONGEST)
        return codes

    @functools.cached_property
    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the symbols of all leaves end to end, and the start of each leaf's symbols.

        Returns:
            uint16 symbols, and int64 (leaves + 1,) starts.
        """
        inner, alphabet = np.nonzero(self.children < 0)
        leaf = -1 - self.children[inner, alphabet].astype(np.int64)
        node, symbol = np.empty_like(leaf), np.empty_like(leaf)
        node[leaf], symbol[leaf] = inner, alphabet
        starts = np.concatenate([[0], np.cumsum(self._depths[node] + 1)])
        pool = np.empty(starts[-1], np.uint16)
        at, rest = starts[1:] - 1, np.arange(node.size)
        while rest.size:
            pool[at[rest]] = symbol[rest]
            at[rest] -= 1
            rest = rest[node[rest] > 0]
            symbol[rest] = self._branch[node[rest]]
            node[rest] = self._parent[node[rest]]
        return pool, starts

    # Tables of the kernels -----------------------------------------------------------------------

    @functools.cached_property
    def steps(self) -> np.ndarray:
        """Return the encoder's table: uint64 (inner * alphabet,).

        Entry ``state + symbol`` holds the length of the code to write (8 bits, 0 for none), the
        code (16 bits), and from bit 32 the next state, which is an inner node times the alphabet.
        """
        leaf = np.maximum(-1 - self.children, 0)
        state = np.maximum(self.children, 0).astype(np.uint64) * np.uint64(self.alphabet)
        steps = np.where(self.children < 0, self._emitted[leaf], state << np.uint64(32))
        return steps.reshape(-1)

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Return the codes that complete a block which ends at an inner node: uint64 (inner,).

        An entry holds length and code, as in ``steps``, of the leaf with the shortest code below
        the node; 0 at the root.
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
        """Return the decoder's table: uint64 (2**width,), indexed by the next ``width`` bits.

        An entry holds the length of the code with which these bits begin (8 bits), the number of
        its block's symbols (24 bits), and from bit 32 the start of these symbols in ``blocks``.
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
    def quick(self) -> np.ndarray:
        """Return the decoder's first table, indexed by the next QUICK_BITS bits, uint64.

        Entries are those of ``lookup``, or 0 if the next code is longer than QUICK_BITS. For a
        symbol code (one symbol per block), an entry covers all symbols whose codes lie within these
        bits. The shape is (2**QUICK_BITS,).
        """
        return self._quick[0]

    def pool(self, dtype: np.dtype) -> np.ndarray:
        """Return, as bytes, the symbols that ``lookup`` and ``quick`` refer to, and 16 more bytes.

        Args:
            dtype: Type of a symbol, of 1 or 2 bytes.
        """
        return self._pools[np.dtype(dtype).itemsize]

    @functools.cached_property
    def longest_copy(self) -> int:
        """Return the most symbols that one look-up yields."""
        return max(self.longest_block, QUICK_BITS)

    @functools.cached_property
    def longest_block(self) -> int:
        """Return the symbols of the longest block."""
        return int(np.diff(self.blocks[1]).max())

    @functools.cached_property
    def _quick(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``quick``, and the symbols that follow those of ``blocks``."""
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
    def _pools(self) -> dict[int, np.ndarray]:
        symbols, more = np.concatenate([self.blocks[0], self._quick[1]]), np.zeros(16, np.uint8)
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

    @functools.cached_property
    def _parent(self) -> np.ndarray:
        parent = np.zeros(len(self.children), np.int64)
        node, symbol = np.nonzero(self.children > 0)
        parent[self.children[node, symbol]] = node
        return parent

    @functools.cached_property
    def _branch(self) -> np.ndarray:
        """Return the symbol that leads to each inner node."""
        branch = np.zeros(len(self.children), np.int64)
        node, symbol = np.nonzero(self.children > 0)
        branch[self.children[node, symbol]] = symbol
        return branch

    @functools.cached_property
    def _depths(self) -> np.ndarray:
        """Return the number of symbols before each inner node."""
        depths = np.zeros(len(self.children), np.int64)
        for node, parent in enumerate(self._parent[1:].tolist(), 1):
            depths[node] = depths[parent] + 1
        return depths

    def _reached(self, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities that a block passes each inner node, and ends at each leaf."""
        inner = [1.0]
        for parent, branch in zip(self._parent[1:], self._branch[1:], strict=True):
            inner.append(inner[parent] * p[branch])
        below = np.multiply.outer(inner, p)
        leaf = np.empty(self.lengths.size)
        ends = self.children < 0
        leaf[-1 - self.children[ends]] = below[ends]
        return np.array(inner), leaf


def _checked(probabilities: ArrayLike, floor: float = FLOOR) -> np.ndarray:
    p = np.array(probabilities, dtype=np.float64)
    if p.ndim != 1 or not 2 <= p.size <= MOST_SYMBOLS:
        raise ValueError(f"probabilities: must be 2 to {MOST_SYMBOLS} numbers, not {p.shape}")
    total = math.fsum(p) if np.all(np.isfinite(p)) else math.inf
    if not (np.isfinite(total) and total > 0 and np.all(p >= 0)):
        raise ValueError("probabilities: must be finite, not negative, and not all zero")
    p = np.maximum(p / total, floor)
    return p / math.fsum(p)


def _code(children: np.ndarray, weights: np.ndarray, longest: int) -> PrefixCode:
    return PrefixCode(children, limited_lengths(weights, longest))


def _reversed(values: np.ndarray, width: int) -> np.ndarray:
    """Reverse the order of the lowest ``width`` bits of each value."""
    values, out = np.asarray(values, np.int64), np.zeros(np.shape(values), np.int64)
    for bit in range(width):
        out |= (values >> bit & 1) << (width - 1 - bit)
    return out
