"""Prefix codes over blocks of symbols: a parse tree whose leaves have canonical Huffman codes.

The stream of symbols is cut into blocks, the paths from the root to a leaf of a tree in which every
inner node has one branch for each symbol; a block travels as the code of its leaf. One symbol to a
block is Huffman's code, never below 1 bit a symbol. Blocks of many symbols come close to the
entropy, however little it is (the ALQ paper, App. D, names them; Tunstall 1967 for the tree).
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.coding.parse_tree import grown, limited_lengths
from hvd_adaptive.kernels.prefix_tables import LONGEST, PrefixTables

MOST_SYMBOLS = 4096
# No symbol is taken to be rarer: it has a code, and the others pay next to nothing for that.
FLOOR = 2.0**-20

# Of the largest trees; large alphabets have so many for each symbol, up to the most. Their look-ups
# stay in the first- and second-level caches.
LEAVES, LEAVES_A_SYMBOL, MOST_LEAVES = 1024, 64, 4096
# Limits for a tree's codes: the first that costs at most ROOM more than the last is taken, since
# the decoder's look-up has 2**bits entries.
TREE_BITS = (12, 14, 16)
ROOM = 1.003


@dataclass(frozen=True, eq=False)
class PrefixCode(PrefixTables):
    """A parse tree and a code for each leaf: built from probabilities."""

    @classmethod
    def build(cls, probabilities: ArrayLike) -> PrefixCode:
        """A code of few expected bits for independent symbols of these probabilities.

        Where one symbol is frequent and the others fall off on both sides (as Laplace, normal and
        Student's laws do), it is within 1 % of the entropy from 0.012 bits a symbol on for 3
        symbols; within 1.3 % from 0.06 on for up to 9; within 2 % from 0.12 on for up to 31; within
        3.1 % from 0.12 on for up to 63; within 2.6 % from 0.5 on for up to 255. Below that the
        largest tree is too small.

        probabilities: (alphabet,), 2 to 4096 numbers, not negative, with a finite sum above 0; none
        counts as less than FLOOR of the sum. The same float64 numbers give the same code
        everywhere: only single products and correctly rounded sums decide.
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

    def bits_per_symbol(self, probabilities: ArrayLike) -> float:
        """Expected bits of a symbol where symbols are independent and have these probabilities
        (which need not be those that it was built for): the expected bits of a block divided by its
        expected symbols, as blocks renew (the last block of a segment, completed, is left out)."""
        p = _checked(probabilities, floor=0.0)
        if p.size != self.alphabet:
            raise ValueError(f"probabilities: must be {self.alphabet}, not {p.size}")
        inner, leaf = self._reached(p)
        return math.fsum(leaf * self.lengths) / math.fsum(inner)

    @functools.cached_property
    def fingerprint(self) -> int:
        """32 bits that differ between codes."""
        crc = zlib.crc32(self.children.astype("<i4").tobytes(), self.alphabet)
        return zlib.crc32(self.lengths.tobytes(), crc)

    def _reached(self, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities that a block passes each inner node, and that it is each leaf."""
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
