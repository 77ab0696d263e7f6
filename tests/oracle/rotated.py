"""EDEN (Vargaftik et al. 2022, section 3) in float64: levels, rotations, averages of ranks.

Levels are found by Lloyd's iteration. Random numbers and the order of rotations follow
docs/wire_format.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from wire_decoder import hashed_signs, stream

OWN, AGAIN, SHARED = 3, 4, 2**63 + 48


@functools.cache
def levels(bits: int) -> np.ndarray:
    """Each level is the mean of N(0, 1) between the midpoints to its neighbours."""
    found, law = np.zeros(0), NormalDist(0, math.sqrt(3))
    better = np.array([law.inv_cdf((j + 0.5) / (1 << bits)) for j in range(1 << bits)])
    while found.size == 0 or np.abs(better - found).max() > 1e-11:
        found = better
        edges = [-math.inf, *((found[1:] + found[:-1]) / 2), math.inf]
        below = np.array([math.erfc(-e / math.sqrt(2)) / 2 for e in edges])
        density = np.array([math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in edges])
        better = (density[:-1] - density[1:]) / np.diff(below)
    return better


def lost(bits: int) -> float:
    """D/(1 - D) of these levels."""
    found = levels(bits)
    edges = [-math.inf, *((found[1:] + found[:-1]) / 2), math.inf]
    masses = np.diff([math.erfc(-e / math.sqrt(2)) / 2 for e in edges])
    kept = float(found**2 @ masses)
    return (1 - kept) / kept


def rotation(key: int, bucket: int, size: int) -> np.ndarray:
    """The orthogonal matrix of a bucket's rotation in a stream of signs."""
    m = 1 << size.bit_length() - 1
    places = np.stack([np.arange(m), np.arange(size - m, size)])
    moved = (np.arange(size) - m * m // size) % size
    walsh = functools.reduce(np.kron, [np.array([[1, 1], [1, -1]])] * (size.bit_length() - 1))
    found = np.eye(size)
    for number in range(1 if m == size else 4):
        own = places[number % 2]
        found *= hashed_signs(key, bucket + number, size)[:, None]
        found[own] = walsh @ found[own] / math.sqrt(m)
        found = found[moved] if number % 2 else found
    return found


def estimate(x: np.ndarray, bits: float, size: int, shared: int, key: int) -> np.ndarray:
    """What x becomes, bucket by bucket, filled with zeros up to a multiple of 64 coordinates.

    With a fraction of a bit, so many of the first rotated coordinates have one bit; their number is
    rounded up to a multiple of 64.
    """
    share, bits = min(bits, 1), max(1, int(bits))
    streams = [shared, *([stream(shared, AGAIN, 0, 0)] if bits > 4 else []), stream(key, OWN, 0, 0)]
    table, out = levels(bits), []
    for bucket, begin in enumerate(range(0, x.size, size)):
        own = x[begin : begin + size].astype(np.float64)
        n = -(-own.size // 64) * 64
        whole, kept = np.eye(n, own.size), -(-int(n * share) // 64) * 64
        for each in streams:
            whole = rotation(each, bucket, n) @ whole
        y = whole @ own
        nearest = np.abs(y[:, None] / np.sqrt(y @ y / n) - table).argmin(axis=1)
        q = table[nearest] * (np.arange(n) < kept)
        out.append(whole.T @ q * (y @ y) / (y @ q))
    return np.concatenate(out)


def average(
    vectors: Sequence[np.ndarray], bits: float, second: int | None, size: int, seed: int
) -> np.ndarray:
    """The average of ranks' vectors at a compressor's first step, in one group.

    second: the bits of averages by scatter_reduce, in which each rank owns as many buckets; the
    last one may be partial. None for allgather.
    """
    ranks, shared = len(vectors), stream(seed, 0, 0, SHARED)
    keys = [stream(seed, rank, 0, 0) for rank in range(ranks)]
    if second is None:
        found = [estimate(v, bits, size, shared, k) for v, k in zip(vectors, keys, strict=True)]
        return np.mean(found, axis=0)
    parts, count = [], vectors[0].size
    each = -(-count // (size * ranks)) * size
    ends = range(each, count, each)
    for owner, chunks in enumerate(zip(*(np.split(v, ends) for v in vectors), strict=True)):
        sent = [
            estimate(v, bits, size, shared, stream(k, owner, 0, 0))
            for v, k in zip(chunks, keys, strict=True)
        ]
        key = stream(keys[owner], owner, 1, 0)
        parts.append(estimate(np.mean(sent, axis=0), second, size, shared, key))
    return np.concatenate(parts)
