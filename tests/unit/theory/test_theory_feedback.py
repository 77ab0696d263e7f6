"""Lemmas 3 and 4 of the QCS paper: exact recursions, Monte Carlo, and their own statements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from theory_runs import sparsified

from hvd_adaptive.theory import (
    best_feedback,
    feedback_limit,
    mmse_error,
    residual_bound,
)

GAMMAS = (0.05, 1.0, 20.0)
KINDS = [(e, c) for e in ("unbiased", "mmse") for c in (False, True)]


def squared_residuals(gamma, beta, estimator, steps, runs=400, n=50) -> np.ndarray:
    """||r_t||² of Eqs 14a-d, (steps, runs), for independent gradients of mean zero, E||g||² = 1."""
    rng = np.random.default_rng(int(1000 * gamma) + 7)
    r, out = np.zeros((runs, n)), []
    for _ in range(steps):
        z = rng.standard_normal((runs, n)) / math.sqrt(n) + beta * r
        r = (1 - beta) * r + z - sparsified(z, gamma, estimator, rng)
        out.append((r**2).sum(1))
    return np.array(out)


def assert_mean(samples: np.ndarray, expected: float) -> None:
    deviation = samples.std(ddof=1) / math.sqrt(samples.size)
    assert abs(samples.mean() - expected) < 5 * deviation, (samples.mean(), expected, deviation)


@pytest.mark.parametrize("estimator", ("unbiased", "mmse"))
@pytest.mark.parametrize("gamma", (0.5, 3.0))
def test_lemma_4_is_reached_where_gradient_and_residual_are_uncorrelated(gamma, estimator):
    """Eq. 15 and its like for mmse are the limits of ||r||², here for an error of exactly γ."""
    for beta in (best_feedback(gamma, estimator, correlated=False)[0], 0.1):
        expected = residual_bound(gamma, beta, estimator, correlated=False)
        norms = squared_residuals(gamma, beta, estimator, 120)
        assert_mean(norms[-1], expected)
        deviation = norms.std(1, ddof=1) / math.sqrt(norms.shape[1])
        assert np.all(norms.mean(1) < expected + 5 * deviation)


def test_correlated_bounds_hold_for_a_gradient_that_feeds_the_residual():
    """g = r/||r|| makes <g, r> as large as it can be, and noise of fixed length across z (of mean
    zero, so unbiased) keeps ||r|| at its mean: the bound is reached, and Eq. 15 exceeded."""
    gamma, beta, n = 3.0, 0.1, 100
    rng = np.random.default_rng(0)
    for estimator, scale in (("unbiased", 1.0), ("mmse", 1 / (gamma + 1))):
        r, top = np.zeros(n), 0.0
        for _ in range(2000):
            length = np.linalg.norm(r)
            g = r / length if length else np.full(n, 1 / math.sqrt(n))
            z = g + beta * r
            noise = rng.standard_normal(n)
            noise -= (noise @ g) * g
            noise *= math.sqrt(gamma) * np.linalg.norm(z) / np.linalg.norm(noise)
            r = (1 - beta) * r + z - scale * (z + noise)
            top = max(top, float(r @ r))
        bound = residual_bound(gamma, beta, estimator)
        assert top == pytest.approx(bound, rel=1e-9)
        assert top > 1.5 * residual_bound(gamma, beta, estimator, correlated=False)


@pytest.mark.parametrize("factor", (0.95, 1.05))
def test_the_limit_of_unbiased_feedback(factor):
    """E||r||² = ((1 - β)² + β² γ) E||r||² + γ: a limit below 2/(1 + γ), growth above it."""
    gamma = 3.0
    beta = factor * feedback_limit(gamma)
    growth, expected = (1 - beta) ** 2 + beta**2 * gamma, 0.0
    norms = squared_residuals(gamma, beta, "unbiased", 12)
    for row in norms:
        expected = growth * expected + gamma
        assert_mean(row, expected)
    assert (growth < 1) == (factor < 1)
    bound = residual_bound(gamma, beta, correlated=False)
    assert math.isinf(bound) == (factor > 1)
    if factor < 1:
        assert bound == pytest.approx(gamma / (1 - growth))


@pytest.mark.parametrize("gamma", GAMMAS)
def test_lemma_3(gamma):
    rng = np.random.default_rng(3)
    z = np.repeat(rng.standard_normal((1, 40)), 5_000, axis=0)
    errors = ((z - sparsified(z, gamma, "mmse", rng)) ** 2).sum(1)
    assert_mean(errors, mmse_error(gamma) * float((z[0] ** 2).sum()))


@pytest.mark.parametrize(("estimator", "correlated"), KINDS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_best_feedback_is_where_the_bound_is_least(gamma, estimator, correlated):
    weight, bound = best_feedback(gamma, estimator, correlated)
    top = min(1.0, 0.999999 * feedback_limit(gamma, estimator))
    found = minimize_scalar(
        lambda beta: math.log(residual_bound(gamma, beta, estimator, correlated)),
        bounds=(1e-9, top),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert bound == pytest.approx(math.exp(found.fun), rel=1e-5)
    assert weight == pytest.approx(found.x, abs=1e-3)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_equations_as_printed(gamma):
    """Eqs 16, 17, 18; Remark 3's 4 γ (γ + 1) is the larger; Remark 2 compares two assumptions."""
    for beta in (0.2, 0.7, 1.0):
        printed = gamma / (math.sqrt(gamma + 1 - (1 - beta) ** 2) - math.sqrt(gamma)) ** 2
        assert residual_bound(gamma, beta, "mmse") == pytest.approx(printed)
    assert best_feedback(gamma, correlated=False) == (
        pytest.approx(1 / (gamma + 1)),
        pytest.approx(gamma * (gamma + 1)),
    )
    weight, bound = best_feedback(gamma, "mmse")
    assert weight == 1
    assert bound == pytest.approx(gamma / (math.sqrt(gamma + 1) - math.sqrt(gamma)) ** 2)
    assert bound < 4 * gamma * (gamma + 1)
    assert best_feedback(gamma, correlated=False)[1] < bound
    assert best_feedback(gamma)[1] == pytest.approx(bound)
    assert best_feedback(gamma, "mmse", correlated=False)[1] == pytest.approx(gamma)


def test_no_quantisation_no_residual():
    assert residual_bound(0, 1.0) == residual_bound(0, 0.5, "mmse") == mmse_error(0) == 0
    assert best_feedback(0) == (1.0, 0.0)
