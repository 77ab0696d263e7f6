"""Variance bounds: never exceeded, nearly reached, and the infimum over p against a scan."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from theory_oracles import (
    ORDERS,
    TABLES,
    exponential,
    hard_vectors,
    neighbours,
    signed,
    uniform,
)

from hvd_adaptive.theory import (
    exact_variance,
    exponent_constant,
    nuqsgd_variance_bound,
    qsgd_variance_bound,
    small_coordinates,
    variance_bound,
)

pytestmark = pytest.mark.many
DIMENSIONS = [2, 17, 300, 8192]
BOTH = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-based"])


def relative_variance(v, magnitudes, symmetric, order):
    """E||Q(v) - v||^2 / ||v||^2."""
    norm = np.linalg.norm(v, ord=order)
    theta = np.clip(v / norm, -1, 1)
    _, low, high = neighbours(theta, signed(magnitudes, symmetric))
    return norm**2 * np.sum((high - theta) * (theta - low)) / (v @ v)


def worst(magnitudes, symmetric, dimension, order, seed=0):
    hard = hard_vectors(magnitudes, symmetric, dimension, order, seed)
    return max(relative_variance(v, magnitudes, symmetric, order) for v in hard)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_published_bounds_are_never_exceeded(dimension):
    for order, size in product(ORDERS, (1, 3, 7, 127)):
        found = worst(uniform(size), False, dimension, order)
        assert found <= qsgd_variance_bound(size, dimension, order) * (1 + 1e-9), (order, size)
    for order, size, p in product(ORDERS, (1, 3, 7), (0.5, 0.2, 0.75)):
        found = worst(exponential(size, p), False, dimension, order)
        assert found <= nuqsgd_variance_bound(size, dimension, p, order) * (1 + 1e-9), (order, p)


@BOTH
@given(
    seed=st.integers(0, 10_000),
    dimension=st.sampled_from([1, 2, 5, 40, 1000]),
    order=st.sampled_from([1, 1.3, 2, 2.5, 7, np.inf]),
)
def test_bound_of_random_tables_is_never_exceeded(symmetric, seed, dimension, order):
    rng = np.random.default_rng(seed)
    magnitudes = np.sort(10.0 ** rng.uniform(-4, 0, rng.integers(2, 9)))
    magnitudes[-1] = 1.0
    if not symmetric:
        magnitudes[0] = 0.0
    bound = variance_bound(magnitudes, dimension, order, symmetric)
    assert worst(magnitudes, symmetric, dimension, order, seed) <= bound * (1 + 1e-9) + 1e-300


@pytest.mark.parametrize(
    ("name", "dimension", "order", "slack"),
    [
        ("ternary", 100_000, 2, 1.0),  # the constant vector costs sqrt(d) - 1
        ("nuqsgd-2", 8192, 2, 1.01),
        ("nuqsgd-3", 8192, 1, 1.001),
        ("nuqsgd-7", 8192, 2, 1.65),  # both terms count, and no vector is worst for both
        ("nuqsgd-3", 100_000, np.inf, 2.01),  # the coordinate that is 1 counts in ||v||^2
        ("qsgd-7", 100_000, 2, 1.01),
        ("fitted", 300, 2, 1.001),
        ("alq-paper", 8192, 2, 1.002),
        ("alq-paper", 8192, np.inf, 1.14),
    ],
)
def test_bound_is_nearly_reached(name, dimension, order, slack):
    """So the bounds cannot be made much smaller, and the tests above can fail."""
    magnitudes, symmetric = TABLES[name]
    bound = variance_bound(magnitudes, dimension, order, symmetric)
    assert bound <= slack * worst(magnitudes, symmetric, dimension, order) * (1 + 1e-12)


@pytest.mark.parametrize("reach", [0.01, 1.0, 1.9, 2.0, 2.1, 5.0, 1e4])
def test_infimum_over_p(reach):
    found = optimize.minimize_scalar(
        lambda p: np.log(exponent_constant(p)) + (2 - p) * np.log(reach),
        bounds=(1e-9, 1 - 1e-9),
        method="bounded",
        options={"xatol": 1e-11},
    )
    np.testing.assert_allclose(small_coordinates(reach), np.exp(found.fun), rtol=1e-6)


@pytest.mark.parametrize("p", [0.001, 0.5, 0.999])
def test_exponent_constant_is_the_least(p):
    """K_p = max of r (l1 - r) / (l1^(2-p) r^p), for any l1; Eq. 41 as printed, too."""
    r = np.linspace(0, 1, 100_001)[1:]
    np.testing.assert_allclose(exponent_constant(p), np.max(r ** (1 - p) * (1 - r)), rtol=1e-5)
    printed = (1 / p) / (2 / p - 1) * ((1 / p - 1) / (2 / p - 1)) ** (1 - p)
    np.testing.assert_allclose(exponent_constant(p), printed)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["qsgd-7", "nuqsgd-2", "fitted", "alq-paper"])
def test_exact_variance(name, order):
    magnitudes, symmetric = TABLES[name]
    v = np.random.default_rng(3).standard_cauchy(9) * 1e-3
    expected = relative_variance(v, magnitudes, symmetric, order) * (v @ v)
    np.testing.assert_allclose(exact_variance(magnitudes, v, order, symmetric), expected, rtol=1e-9)


def test_exact_variance_of_extreme_scales():
    v = np.array([3.0, -4.0, 0.1])
    expected = exact_variance([0, 0.5, 1], v, 7)
    for scale in (1e-140, 1e140):
        measured = exact_variance([0, 0.5, 1], v * scale, 7)
        np.testing.assert_allclose(measured, expected * scale**2)
    assert exact_variance([0, 1], np.zeros(5)) == 0.0
    assert exact_variance([0, 1], []) == 0.0


def test_published_values():
    np.testing.assert_allclose(qsgd_variance_bound(16, 512), np.sqrt(512) / 16)  # section 4's 1.41
    np.testing.assert_allclose(qsgd_variance_bound(100, 100), 0.01)  # d/s^2, below sqrt(d)/s
    assert qsgd_variance_bound(10, 100) == 1.0  # s = sqrt(n): at most twice the second moment
    assert qsgd_variance_bound(1, 16, 1) == 16.0
    assert variance_bound([0.0, 1.0], 100) == 9.0
    assert variance_bound([1.0], 100, 2, True) == 100.0
    assert nuqsgd_variance_bound(3, 2**8) == 1 / 8 + 2.0**-6 * 2**8 / 4
    assert nuqsgd_variance_bound(3, 2**10) == 1 / 8 + 2.0**-3 * 2**5 - 1
