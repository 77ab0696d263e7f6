"""Vectors, tables and codes that the theory tests share; written apart from the package."""

from __future__ import annotations

import heapq

import numpy as np

ORDERS = [1, 2, 3, np.inf]


def uniform(intervals):
    return np.arange(intervals + 1) / intervals


def exponential(internal, multiplier=0.5):
    return np.concatenate([[0.0], multiplier ** np.arange(internal, -1, -1.0)])


# name: (magnitudes, symmetric). The fitted ones are of ALQ's kind: dense near zero, uneven.
TABLES = {
    "ternary": (uniform(1), False),
    "qsgd-7": (uniform(7), False),
    "qsgd-127": (uniform(127), False),
    **{f"nuqsgd-{s}": (exponential(s), False) for s in (1, 2, 3, 7)},
    "nuqsgd-p0.1": (exponential(3, 0.1), False),
    "nuqsgd-p0.8": (exponential(6, 0.8), False),
    "fitted": (np.array([0, 0.0031, 0.0075, 0.0131, 0.021, 0.034, 0.091, 1.0]), False),
    "alq-paper": (np.array([0.0048, 0.018, 0.13, 1.0]), True),
    "two-symmetric": (np.array([1.0]), True),
    "uniform-symmetric": ((2 * np.arange(4) + 1) / 7, True),
}


def signed(magnitudes, symmetric):
    return np.concatenate([-magnitudes[::-1], magnitudes if symmetric else magnitudes[1:]])


def vectors(rng, dimension):
    """Random, sparse, constant, heavy-tailed, spread over decades."""
    yield rng.normal(size=dimension)
    yield np.eye(1, dimension)[0]
    yield np.where(rng.random(dimension) < 0.05, rng.normal(size=dimension), 0.0)
    yield np.full(dimension, -3.0)
    yield rng.standard_cauchy(dimension)
    yield rng.lognormal(sigma=3, size=dimension)
    yield 10.0 ** rng.uniform(-6, 0, dimension)
    yield rng.normal(size=dimension) * 1e100


def adversaries(magnitudes, symmetric, dimension, order):
    """Vectors with as many coordinates as fit at a costly place of one interval: the middle, the
    place of Eq. 40, the optimum of Theorem 2; one coordinate fills the norm up to one."""
    ends = np.concatenate([[0.0], magnitudes]) if symmetric else magnitudes
    places = np.concatenate([(ends[1:] + ends[:-1]) / 2, ends[1:] * 1e-3])
    harmonic = 2 * ends[1:] * ends[:-1] / (ends[1:] + ends[:-1])
    if ends.size > 12:  # the lowest intervals and a few of the others
        places, harmonic = places[::9], harmonic[[0, 1, 2, 3, -1]]
    spread = dimension ** (-1 / min(order, 2))
    for place in [*places, *harmonic, spread, 1.0 / dimension]:
        if not 0 < place < 1:
            continue
        fit = dimension - 1 if np.isinf(order) else min(dimension - 1, int(place**-order))
        v = np.zeros(dimension)
        v[1 : fit + 1] = place
        rest = 1.0 if np.isinf(order) else max(0.0, 1 - fit * place**order) ** (1 / order)
        v[0] = rest
        yield v


def hard_vectors(magnitudes, symmetric, dimension, order, seed=2):
    """All of these, in the scale of their largest coordinates."""
    rng = np.random.default_rng(seed)
    found = [*vectors(rng, dimension), *adversaries(magnitudes, symmetric, dimension, order)]
    return [v / np.max(np.abs(v)) for v in found if v.any()]


def neighbours(theta, table):
    above = np.clip(np.searchsorted(table, theta, side="right"), 1, table.size - 1)
    return above, table[above - 1], table[above]


def quantize(rng, v, magnitudes, symmetric=False, order=2):
    """Level numbers of the signed table, and the values; v: (..., d), one bucket a row."""
    table = signed(magnitudes, symmetric)
    norm = np.linalg.norm(v, ord=order, axis=-1, keepdims=True)
    theta = np.clip(v / np.where(norm > 0, norm, 1.0), -1, 1)
    above, low, high = neighbours(theta, table)
    number = above - 1 + (rng.random(v.shape) * (high - low) < theta - low)
    return number, table[number] * norm


def symbol_shares(v, magnitudes, symmetric, order=2):
    """Expected share of each signed level in Q(v), exactly."""
    table = signed(magnitudes, symmetric)
    theta = np.clip(v / np.linalg.norm(v, ord=order), -1, 1)
    above, low, high = neighbours(theta, table)
    up = (theta - low) / (high - low)
    counts = np.bincount(above, up, table.size) + np.bincount(above - 1, 1 - up, table.size)
    return counts / v.size


def huffman_bits(shares):
    """Expected bits a symbol of a Huffman code; one symbol alone takes a bit."""
    heap = [p for p in shares if p > 0]
    heapq.heapify(heap)
    bits = 1.0 if len(heap) == 1 else 0.0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        bits += merged
        heapq.heappush(heap, merged)
    return bits
