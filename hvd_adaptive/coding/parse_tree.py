"""Build prefix codes: grow parse trees and limit code lengths."""

from __future__ import annotations

import heapq

import numpy as np

# Limits of a tree: symbols of all leaves together, and symbols of a block.
POOL = 1 << 18
LONGEST_BLOCK = 1024


def grown(p: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Grow a tree of at most ``most`` leaves by splitting the most probable leaf repeatedly.

    Returns:
        The children (see ``PrefixCode``) and the leaves' probabilities.
    """
    alphabet = p.size
    rows: list[np.ndarray] = []
    heap: list[tuple[float, int, int]] = []
    # The heap holds for each leaf: minus its probability, its number (to order ties), its depth.
    parents: list[tuple[int, int]] = []

    def split(probability: float, depth: int) -> None:
        first = len(parents)
        node = len(rows)
        rows.append(np.arange(first, first + alphabet))
        parents.extend((node, symbol) for symbol in range(alphabet))
        for number, weight in enumerate((p * probability).tolist(), first):
            heapq.heappush(heap, (-weight, number, depth + 1))

    split(1.0, 0)
    pool = alphabet
    links = []
    while len(heap) + alphabet - 1 <= most:
        weight, number, depth = heap[0]
        pool += alphabet * (depth + 1) - depth
        if depth >= LONGEST_BLOCK or pool > POOL:
            break
        heapq.heappop(heap)
        links.append((*parents[number], len(rows)))
        split(-weight, depth)
    children = np.zeros((len(rows), alphabet), np.int32)
    for node, symbol, child in links:
        children[node, symbol] = child
    ends = np.nonzero(children == 0)
    children[ends] = -1 - np.arange(ends[0].size)
    weights = np.empty(ends[0].size)
    number_of = {number: -weight for weight, number, _ in heap}
    for leaf, (node, symbol) in enumerate(zip(*ends, strict=True)):
        weights[leaf] = number_of[int(rows[node][symbol])]
    return children, weights


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
        pairs = merged[: merged.size // 2 * 2].reshape(-1, 2).sum(axis=1)
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
