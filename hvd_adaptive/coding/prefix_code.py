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
from hvd_adaptive.kernels.prefix_tables import LONGEST, PrefixTables

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


@dataclass(frozen=True, eq=False)
class PrefixCode(PrefixTables):
    """Parse tree, and a code for each leaf, built from probabilities."""

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
        tree = _code(children, weights, TREE_BITS[-1])
        most = ROOM * math.fsum(weights * tree.lengths)
        for bits in TREE_BITS[:-1]:
            if weights.size <= 1 << bits:
                shorter = _code(children, weights, bits)
                if math.fsum(weights * shorter.lengths) <= most:
                    tree = shorter
                    break
        better = ROOM * tree.bits_per_symbol(p) < simple.bits_per_symbol(p)
        return tree if better else simple

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
