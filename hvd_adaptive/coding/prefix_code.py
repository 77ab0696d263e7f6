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
            probabilities: (alphabet,), 2 to 4096 non-negative numbers with a finite sum above 0;
                others raise ValueError. Each counts as at least FLOOR of the sum.
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
        """Return the expected bits per independent symbol of these probabilities, which may be
        others than the code was built for: the expected bits of a block over its expected symbols,
        since blocks renew. The completed last block of a segment is not counted.
        """
        p = _checked(probabilities, floor=0.0)
        inner, leaf = self._reached(p)
        return math.fsum(leaf * self.lengths) / math.fsum(inner)

    @functools.cached_property
    def fingerprint(self) -> int:
        """Return 32 bits that differ between codes."""
        crc = zlib.crc32(self.children.astype("<i4").tobytes(), self.alphabet)
        return zlib.crc32(self.lengths.tobytes(), crc)

    def _reached(self, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities that a block passes each inner node, and ends at each leaf."""
        inner, leaf = np.ones(len(self.children)), np.empty(self.lengths.size)
        for node, branches in enumerate(self.children):
            below, goes_on = inner[node] * p, branches > 0
            inner[branches[goes_on]] = below[goes_on]
            leaf[-1 - branches[~goes_on]] = below[~goes_on]
        return inner, leaf


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


# Limits of a tree: symbols of all leaves together, and symbols of a block.
POOL = 1 << 18
LONGEST_BLOCK = 1024


def grown(p: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Grow a tree of at most ``most`` leaves by splitting the most probable leaf repeatedly; return
    the children (see ``PrefixCode``) and the leaves' probabilities.

    Of leaves that are equally probable, the one that appeared first is split first. No leaf that
    appears is more probable than ``max(p)`` times the most probable leaf, so all leaves above this
    bound are split together.
    """
    alphabet, growth = p.size, p.size - 1
    room = max(1, (most - 1) // growth)  # inner nodes
    children, weights = np.zeros((room, alphabet), np.int32), np.empty((room, alphabet))
    depths = np.empty(room, np.int64)  # symbols before each inner node
    weights[0], depths[0] = p, 0
    count, pool, highest = 1, alphabet, p.max()
    # A leaf's number is its place in ``weights``: leaves are numbered as they appear.
    leaves, of_leaves = np.arange(alphabet), p.copy()
    while count < room:
        together = np.nonzero(of_leaves > of_leaves.max() * highest)[0]
        if not together.size:
            together = np.array([np.argmax(of_leaves)])
        order = np.argsort(-of_leaves[together], kind="stable")
        chosen = together[order][: room - count]
        depth = depths[leaves[chosen] // alphabet] + 1
        pools = pool + np.cumsum(alphabet * (depth + 1) - depth)
        over = np.nonzero((depth >= LONGEST_BLOCK) | (pools > POOL))[0]
        if over.size:
            chosen, depth, pools = chosen[: over[0]], depth[: over[0]], pools[: over[0]]
        nodes = np.arange(count, count + chosen.size)
        weights[nodes], depths[nodes] = np.multiply.outer(of_leaves[chosen], p), depth
        children.reshape(-1)[leaves[chosen]] = nodes
        count += chosen.size
        if over.size:
            break
        pool = int(pools[-1])
        new = np.arange(nodes[0] * alphabet, count * alphabet)
        leaves = np.concatenate([np.delete(leaves, chosen), new])
        of_leaves = np.concatenate([np.delete(of_leaves, chosen), weights[nodes].reshape(-1)])
    children, weights = children[:count], weights[:count]
    ends = children == 0
    children[ends] = -1 - np.arange(np.count_nonzero(ends))
    return children, weights[ends]


def limited_lengths(weights: np.ndarray, longest: int) -> np.ndarray:
    """Return the code lengths (uint8) of the optimal prefix code limited to ``longest`` bits.

    The algorithm is package-merge (Larmore and Hirschberg, A fast algorithm for optimal
    length-limited Huffman codes, 1990). The code is complete: the sum of 2**-bits is 1. There are 2
    to 2**longest weights.
    """
    order = np.argsort(weights, kind="stable")
    single = weights[order]
    n, merged, counts = single.size, single, []
    for _ in range(longest - 1):
        pairs = merged[: merged.size - 1 : 2] + merged[1::2]
        # If a package weighs as much as a symbol, the symbol comes first.
        both = np.concatenate([single, pairs])
        place = np.argsort(both, kind="stable")
        counts.append(np.cumsum(place < n))
        merged = both[place]
    bits = np.zeros(n, np.uint8)
    taken = 2 * n - 2
    for singles in reversed(counts):
        # The symbols used are the lightest; each package stands for two items one layer below.
        own = int(singles[taken - 1]) if taken else 0
        bits[:own] += 1
        taken = 2 * (taken - own)
    bits[:taken] += 1
    lengths = np.empty(n, np.uint8)
    lengths[order] = bits
    return lengths
