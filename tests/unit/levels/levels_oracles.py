"""Laws and samples that the level tests share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from scipy import integrate

from hvd_adaptive.levels import Histogram, Mixture

DIMENSION = 8192
BOTH = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-based"])


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


def integral(law, f: Callable[[float], float], *knots: float) -> float:
    """f dF over [0, 1], atoms included, by quadrature between the law's own breaks and these."""
    breaks = getattr(law, "edges", np.linspace(0, 1, 41))
    points = np.unique(np.concatenate([[0.0, 1.0], breaks, knots]))
    total = f(0.0) * float(law.cdf(0.0)) + f(1.0) * getattr(law, "one_mass", 0.0)
    for low, high in pairwise(points):
        own = integrate.quad(lambda r: f(r) * float(law.pdf(r)), low, high, epsabs=0, epsrel=1e-9)
        total += own[0]
    return float(total)
