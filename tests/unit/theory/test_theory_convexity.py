"""Theorem 1's nonconvexity, Corollary 2 and the variance gap, by differences and quadrature."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from hvd_adaptive.levels import Histogram, Mixture, TruncatedNormal, expected_variance, gradient
from hvd_adaptive.theory import (
    best_single_level,
    convexity_margin,
    least_convex_pair,
    objective_hessian,
    variance_gap,
    variance_gap_bound,
)

UNIFORM = Histogram([0.0, 1.0], [1.0])
MIXTURE = Mixture([0.0, 0.3, 0.9], [0.05, 0.1, 0.03], [5.0, 2.0, 1.0])
SMOOTH = {"uniform": UNIFORM, "normal": Mixture([0.1], [0.2], [1.0]), "mixture": MIXTURE}
BOTH = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-based"])


def psi(law, levels):
    """Psi by quadrature over the density, of a table that begins at 0."""
    total = 0.0
    for low, high in pairwise(levels):
        cost = lambda r, a=low, b=high: (b - r) * (r - a) * float(law.pdf(r))  # noqa: E731
        parts = pairwise(np.linspace(low, high, 4))
        total += sum(integrate.quad(cost, a, b, epsabs=1e-14)[0] for a, b in parts)
    return total


@BOTH
@pytest.mark.parametrize("name", SMOOTH)
def test_hessian_by_finite_differences(name, symmetric):
    law = SMOOTH[name]
    levels = np.array([0.04, 0.11, 0.36, 0.71, 1.0])
    if not symmetric:
        levels[0] = 0.0
    moving = range(0 if symmetric else 1, 4)
    hessian = objective_hessian(levels, law, symmetric)
    assert hessian.shape == (len(moving), len(moving))
    for column, j in zip(hessian, moving, strict=True):
        step = 1e-5 * np.eye(5)[j]
        slope = gradient(levels + step, law, symmetric) - gradient(levels - step, law, symmetric)
        np.testing.assert_allclose(column, slope[moving] / 2e-5, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", SMOOTH)
def test_margin_is_the_determinant(name):
    law = SMOOTH[name]
    rng = np.random.default_rng(0)
    for a, b in np.sort(rng.uniform(0.01, 0.99, (50, 2)), axis=1):
        determinant = np.linalg.det(objective_hessian([0, a, b, 1], law))
        np.testing.assert_allclose(convexity_margin(a, b, law), determinant, atol=1e-12)


def test_uniform_law_is_convex_but_not_strictly():
    """Corollary 1: b (1 - b) + a (b - a) >= 0, and = 0 at three corners, where '>' is printed."""
    grid = np.linspace(0, 1, 41)
    a, b = np.meshgrid(grid, grid)
    a, b = a[a <= b], b[a <= b]
    margin = convexity_margin(a, b, UNIFORM)
    np.testing.assert_allclose(margin, b * (1 - b) + a * (b - a), atol=1e-12)
    np.testing.assert_array_equal(convexity_margin([0, 0, 1], [0, 1, 1], UNIFORM), 0.0)
    assert least_convex_pair(UNIFORM, np.linspace(0.01, 0.99, 50))[2] > 0


@pytest.mark.parametrize("law", [MIXTURE, Mixture([0.0], [0.1], [1.0])], ids=["mixture", "normal"])
def test_theorem_1_problem_is_not_convex(law):
    """At the pair found Psi really lies above its chord, by quadrature too."""
    assert least_convex_pair(law)[2] < 0
    a, b, margin = least_convex_pair(law, np.linspace(0.02, 0.98, 97))
    assert margin < 0
    values, directions = np.linalg.eigh(objective_hessian([0, a, b, 1], law))
    assert values[0] < 0 < values[1]
    h = 0.1 * min(a, b - a, 1 - b)
    ends = [np.array([0, *([a, b] + s * h * directions[:, 0]), 1]) for s in (-1, 1)]
    middle = np.array([0, a, b, 1])
    for cost in (lambda levels: expected_variance(levels, law, False), lambda x: psi(law, x)):
        chord = (cost(ends[0]) + cost(ends[1])) / 2
        assert cost(middle) > chord
        np.testing.assert_allclose(chord - cost(middle), values[0] * h * h / 2, rtol=0.1)


@pytest.mark.parametrize(
    "law",
    [
        UNIFORM,
        MIXTURE,
        Mixture([0.0], [0.1], [1.0]),
        Histogram([0, 0.2, 1.0], [1.0, 1.0], 0.4, 0.1),
    ],
    ids=["uniform", "mixture", "normal", "atoms"],
)
def test_best_single_level_by_minimisation(law):
    def cost(b):
        return expected_variance([0.0, b, 1.0], law, False)

    best = optimize.minimize_scalar(cost, bounds=(1e-6, 1 - 1e-6), options={"xatol": 1e-10})
    level = best_single_level(law)
    assert cost(level) <= best.fun * (1 + 1e-9)
    np.testing.assert_allclose(level, best.x, rtol=1e-4)
    assert abs(law.cdf(level) - (1 - law.moments(1.0)[1])) < 1e-9


NORMALS = [(0.0, 0.05), (0.2, 0.1), (0.5, 0.2), (-0.5, 0.2), (0.4, 3.0)]


@pytest.mark.parametrize(("mu", "sigma"), NORMALS)
def test_closed_form_of_proposition_7(mu, sigma):
    """b* = sigma Phi^-1(Delta (1 - mu) + sigma delta + Phi(-mu/sigma)) + mu, as printed."""
    law = TruncatedNormal(mu, sigma, 0.0, 1.0)
    low, high = -mu / sigma, (1 - mu) / sigma
    mass = stats.norm.cdf(high) - stats.norm.cdf(low)
    slope = stats.norm.pdf(high) - stats.norm.pdf(low)
    inside = mass * (1 - mu) + sigma * slope + stats.norm.cdf(low)
    printed = sigma * stats.norm.ppf(inside) + mu
    np.testing.assert_allclose(best_single_level(law), printed, rtol=1e-6)


@pytest.mark.parametrize(("mu", "sigma"), NORMALS)
def test_gap_bound_by_quadrature(mu, sigma):
    law = TruncatedNormal(mu, sigma, 0.0, 1.0)
    best = best_single_level(law)
    exact = 1000 * (psi(law, np.array([0, 0.5, 1])) - psi(law, np.array([0, best, 1])))
    np.testing.assert_allclose(variance_gap(law, 1000), exact, rtol=1e-6, atol=1e-9)
    bound = variance_gap_bound(law, 1000)
    assert 0 <= bound <= exact + 1e-9
    # Near 1/2 the density between the two levels is nearly constant, and the bound nearly exact.
    if abs(best - 0.5) < 0.1:
        assert bound > 0.8 * exact - 1e-9


def test_gap_grows_with_the_dimension_only_where_the_law_stays():
    """Omega(d) of Prop. 7; under L2 the law shrinks and the gap stays below sqrt(d)/2."""
    law = TruncatedNormal(0.1, 0.1, 0.0, 1.0)
    assert variance_gap(law, 10_000) == pytest.approx(100 * variance_gap(law, 100))
    assert variance_gap_bound(law, 100) > 0
    for d in (100, 10_000, 1_000_000):
        shrinking = Mixture([0.0], [d**-0.5], [1.0])
        assert 0 < variance_gap(shrinking, d) < np.sqrt(d) / 2


def test_gap_bound_needs_a_density_without_a_dip():
    """Two humps around 1/2 and b*: the bound is above the gap, as its docstring warns."""
    law = Mixture([0.5, 0.2], [0.01, 0.01], [0.1, 0.9])
    assert variance_gap_bound(law, 1) > variance_gap(law, 1) > 0
