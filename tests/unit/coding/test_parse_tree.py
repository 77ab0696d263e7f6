"""Parse trees, against one leaf at a time from a heap."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from hvd_adaptive.coding import parse_tree
from hvd_adaptive.coding.parse_tree import grown


def one_at_a_time(p, most):
    """Split the most probable leaf, the oldest of equals, while there is room."""
    heap, parents, depths, links = [], [], [], []

    def split(weight, depth):
        node = len(depths)
        depths.append(depth)
        for symbol, share in enumerate((p * weight).tolist()):
            heapq.heappush(heap, (-share, len(parents), depth + 1))
            parents.append((node, symbol))

    split(1.0, 0)
    pool = p.size
    while len(heap) + p.size - 1 <= most:
        weight, number, depth = heap[0]
        pool += p.size * (depth + 1) - depth
        if depth >= parse_tree.LONGEST_BLOCK or pool > parse_tree.POOL:
            break
        heapq.heappop(heap)
        links.append((*parents[number], len(depths)))
        split(-weight, depth)
    children = np.zeros((len(depths), p.size), np.int32)
    for node, symbol, child in links:
        children[node, symbol] = child
    of_number = {number: -weight for weight, number, _ in heap}
    ends = [(n, s) for n in range(len(depths)) for s in range(p.size) if not children[n, s]]
    weights = [of_number[n * p.size + s] for n, s in ends]
    for leaf, (node, symbol) in enumerate(ends):
        children[node, symbol] = -1 - leaf
    return children, np.array(weights)


def laws():
    draw = np.random.default_rng(3)
    yield np.array([0.5, 0.5])
    yield np.full(7, 1 / 7)  # nothing but ties
    yield np.array([0.25, 0.5, 0.25])
    yield np.array([1 - 2e-6, 1e-6, 1e-6])  # one leaf at a time
    for alphabet in (2, 3, 5, 9, 34, 200):
        for concentration in (0.1, 1.0, 10.0):
            p = np.maximum(draw.dirichlet(np.full(alphabet, concentration)), 2.0**-20)
            yield p / p.sum()


@pytest.mark.many
@pytest.mark.parametrize("p", list(laws()), ids=lambda p: f"{p.size}, {p.max():.3g}")
@pytest.mark.parametrize("most", (2, 64, 1024))
def test_the_same_tree(p, most):
    if most < 2 * p.size:
        pytest.skip("such alphabets have codes of symbols")
    children, weights = grown(p, most)
    expected, of_leaves = one_at_a_time(p, most)
    assert np.array_equal(children, expected) and np.array_equal(weights, of_leaves)
    assert children.dtype == np.int32 and weights.size <= most


@pytest.mark.parametrize(("name", "value"), [("POOL", 900), ("LONGEST_BLOCK", 5)])
def test_the_same_limits(name, value, monkeypatch):
    monkeypatch.setattr(parse_tree, name, value)
    for p in (np.array([0.7, 0.2, 0.1]), np.array([0.9, 0.1]), np.full(4, 0.25)):
        found, expected = grown(p, 512), one_at_a_time(p, 512)
        assert np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])
