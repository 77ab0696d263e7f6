"""Build prefix codes: grow parse trees and limit code lengths."""

from __future__ import annotations

import numpy as np

# Limits of a tree: symbols of all leaves together, and symbols of a block.
POOL = 1 << 18
LONGEST_BLOCK = 1024


def grown(p: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Grow a tree of at most ``most`` leaves by splitting the most probable leaf repeatedly.

    Of leaves that are equally probable, the one that appeared first is split first. No leaf that
    appears is more probable than ``max(p)`` times the most probable leaf, so all leaves above this
    bound are split together.

    Returns:
        The children (see ``PrefixCode``) and the leaves' probabilities.
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
    length-limited Huffman codes, 1990). The code is complete: the sum of 2**-bits is 1.

    Args:
        weights: (n,), 2 <= n <= 2**longest.
        longest: Most bits of a code.
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
