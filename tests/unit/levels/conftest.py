"""Samples and laws that the level tests share."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_adaptive.levels import Histogram, Mixture

DIMENSION = 8192


def _shapes(seed: int):
    rng = np.random.default_rng(seed)
    size = DIMENSION
    return {
        "normal": lambda n: rng.normal(size=size),
        "mixture": lambda n: rng.normal(size=size)
        * np.exp(rng.normal(size=size) * 0.15 * (n % 4))
        * 2.0 ** (n % 3),
        "laplace": lambda n: rng.laplace(size=size),
        "student": lambda n: rng.standard_t(3, size=size),
        "sparse": lambda n: rng.normal(size=size) * (rng.random(size) < 0.01),
    }


def make_buckets(shape: str, order: float, count: int, seed: int = 0):
    """(r, weights): normalised magnitudes of ``count`` buckets, and their squared norms."""
    draw = _shapes(seed)[shape]
    samples, weights = [], []
    for n in range(count):
        v = draw(n)
        norm = np.linalg.norm(v, ord=order)
        samples.append(np.abs(v) / norm)
        weights.append(np.full(v.size, norm**2))
    return np.concatenate(samples), np.concatenate(weights)


@pytest.fixture(scope="session")
def buckets():
    return make_buckets


def laws() -> dict:
    """Distributions of every kind, with and without atoms."""
    rng = np.random.default_rng(5)
    edges = np.sort(np.concatenate([[0.0, 1.0], rng.random(40)]))
    return {
        "histogram": Histogram(edges, rng.random(41)),
        "atoms": Histogram(edges, rng.random(41), zero_mass=7.0, one_mass=3.0),
        "gaps": Histogram([0.0, 0.1, 0.3, 0.35, 0.8, 1.0], [0.0, 2.0, 0.0, 1.0, 0.0], 0.4, 0.0),
        "normal": Mixture([0.05], [0.2], [1.0]),
        "mixture": Mixture([0.0, 0.3, -1.2], [0.05, 0.4, 0.2], [5.0, 2.0, 1.0]),
    }
