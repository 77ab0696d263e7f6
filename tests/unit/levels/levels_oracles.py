"""Laws and samples that the level tests share."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.levels import Histogram, Mixture

DIMENSION = 8192


def _laws() -> dict:
    """Distributions of every kind, with and without atoms."""
    rng = np.random.default_rng(5)
    edges = np.sort(np.concatenate([[0.0, 1.0], rng.random(40)]))
    return {
        "histogram": Histogram(edges, rng.random(41)),
        "atoms": Histogram(edges, rng.random(41), zero_mass=7.0, one_mass=3.0),
        "gaps": Histogram([0.0, 0.1, 0.3, 0.35, 0.8, 1.0], [0.0, 2.0, 0.0, 1.0, 0.0], 0.4),
        "normal": Mixture([0.05], [0.2], [1.0]),
        "mixture": Mixture([0.0, 0.3, -1.2], [0.05, 0.4, 0.2], [5.0, 2.0, 1.0]),
    }


LAWS = _laws()
SHAPES = {
    "normal": lambda rng, n: rng.normal(size=DIMENSION),
    # Buckets of different shapes and of norms 1 : 2 : 4, weighted by the squares of these.
    "mixture": lambda rng, n: (
        rng.normal(size=DIMENSION)
        * np.exp(rng.normal(size=DIMENSION) * 0.15 * (n % 4))
        * 2.0 ** (n % 3)
    ),
    "laplace": lambda rng, n: rng.laplace(size=DIMENSION),
    "student": lambda rng, n: rng.standard_t(3, size=DIMENSION),
    "sparse": lambda rng, n: rng.normal(size=DIMENSION) * (rng.random(DIMENSION) < 0.01),
}


def make_buckets(shape: str, order: float, count: int, seed: int = 0):
    """(r, weights): normalised magnitudes of ``count`` buckets, and their squared norms."""
    rng = np.random.default_rng(seed)
    samples, weights = [], []
    for n in range(count):
        v = SHAPES[shape](rng, n)
        norm = np.linalg.norm(v, ord=order)
        samples.append(np.abs(v) / norm)
        weights.append(np.full(v.size, norm**2))
    return np.concatenate(samples), np.concatenate(weights)


def random_magnitudes(rng, count: int, symmetric: bool):
    """A table of levels drawn at random, some close together, some spread over decades."""
    levels = np.sort(10.0 ** rng.uniform(-4, 0, count))
    levels[-1] = 1.0
    if not symmetric:
        levels[0] = 0.0
    return levels
