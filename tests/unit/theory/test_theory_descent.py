"""Lemmas 5 and 6, Eqs 22 and 23 and Remarks 1 and 4 of the QCS paper: simulated descents that use
none of the functions' formulas, and recursions of second moments that are exact on a quadratic."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.linalg import hadamard
from theory_runs import Wells, mean_and_error, sparsified

from hvd_adaptive.theory import best_feedback, compressed_descent, feedback_descent, residual_bound

GAMMAS = (0.2, 3.0)
STEPS, RUNS = 400, 60


def descend(problem, gamma, step_size, *, estimator="unbiased", beta=0.0, steps=STEPS, seed=0):
    """Eq. 14 with Eq. 21; squared gradients (steps, runs) at the iterates."""
    rng = np.random.default_rng(seed)
    w = np.tile(problem.start, (RUNS, 1))
    r, squares = np.zeros_like(w), []
    for _ in range(steps):
        squares.append(np.square(problem.gradient(w)).sum(axis=1))
        z = problem.sample(rng, w, 1)[:, 0] + beta * r
        sent = sparsified(z, gamma, estimator, rng)
        r = (1 - beta) * r + z - sent if beta else r
        w = w - step_size * sent
    return np.array(squares)


def constants(problem) -> dict[str, float]:
    return {
        "smoothness": problem.smoothness,
        "initial_gap": float(problem.value(problem.start)),
        "second_moment": problem.second_moment,
    }


@pytest.mark.parametrize("estimator", ["unbiased", "mmse"])
@pytest.mark.parametrize(("gamma", "rate"), [(0.2, 1.0), (3.0, 0.1), (3.0, 1.0), (3.0, None)])
def test_lemma_5_and_eq_22(gamma, estimator, rate):
    """Eq. 22: at the step 1/√T (mmse: (1 + γ)/√T) both estimators have the same bound."""
    problem = Wells()
    first, last = (1, 1 + gamma) if estimator == "unbiased" else (1 + gamma, 1)
    step_size = rate / problem.smoothness if rate else first / math.sqrt(STEPS)
    squares = descend(problem, gamma, step_size, estimator=estimator)
    mean, error = mean_and_error(squares.mean(axis=0))
    shared = constants(problem)
    bound = compressed_descent(
        iterations=STEPS, step_size=step_size, gamma=gamma, estimator=estimator, **shared
    )
    assert mean + 5 * error <= bound <= 60 * mean
    # As printed.
    gap, curvature, moment = shared["initial_gap"], shared["smoothness"], shared["second_moment"]
    printed = first * gap / (STEPS * step_size) + curvature / 2 * step_size * last * moment
    if rate is None:
        printed = (gap + curvature / 2 * (1 + gamma) * moment) / math.sqrt(STEPS)
    assert bound == pytest.approx(printed)


FEEDBACK = [("unbiased", None), ("mmse", 1.0), ("mmse", 0.3)]


@pytest.mark.parametrize(("estimator", "beta"), FEEDBACK)
@pytest.mark.parametrize(("gamma", "rate"), [(0.2, 1.0), (3.0, 0.1), (3.0, 1.0)])
def test_lemma_6(gamma, estimator, beta, rate):
    """With four times the last term, as printed, and without."""
    problem, beta = Wells(), beta or best_feedback(gamma)[0]
    step_size = rate / problem.smoothness
    eta = residual_bound(gamma, beta, estimator)
    squares = descend(problem, gamma, step_size, estimator=estimator, beta=beta)
    mean, error = mean_and_error(squares.mean(axis=0))
    shared = constants(problem)
    bound = feedback_descent(iterations=STEPS, step_size=step_size, residual=eta, **shared)
    assert mean + 5 * error <= bound
    gap, curvature, moment = shared["initial_gap"], shared["smoothness"], shared["second_moment"]
    printed = gap / (STEPS * step_size / 2) + curvature * moment * (
        step_size + 4 * curvature * eta * step_size**2
    )
    assert bound <= printed
    assert printed - bound == pytest.approx(3 * moment * eta * (curvature * step_size) ** 2)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
@pytest.mark.parametrize(("estimator", "beta"), FEEDBACK)
def test_eq_23(estimator, beta, epsilon):
    problem, gamma = Wells(), 3.0
    beta = beta or best_feedback(gamma)[0]
    shared, root = constants(problem), math.sqrt(1 + epsilon)
    squares = descend(problem, gamma, root / math.sqrt(STEPS), estimator=estimator, beta=beta)
    gap, curvature, moment = shared["initial_gap"], shared["smoothness"], shared["second_moment"]
    eta = residual_bound(gamma, beta, estimator)
    printed = (gap + curvature / 2 * moment * (1 + epsilon)) / math.sqrt(STEPS)
    printed += curvature**2 * moment * (1 + epsilon) ** 2 / (root - 1) * eta / STEPS
    assert squares.mean(axis=1).min() <= printed


def moments(gamma, step_size, beta, steps, *, curvature=1.0, noise=1.0, start=1.0) -> np.ndarray:
    """E||∇f(w_t)||² for f = λ ||w||²/2, g = λ w + ξ, E||ξ||² = noise, and an unbiased quantiser of
    error exactly γ ||z||²: the recursion of E||w||², E<w, r>, E||r||². β = 0: no feedback."""
    w, cross, r = start, 0.0, 0.0
    shrunk, found = 1 - step_size * curvature, []
    for _ in range(steps):
        found.append(curvature**2 * w)
        z = curvature**2 * w + noise + 2 * curvature * beta * cross + beta**2 * r
        w, cross, r = (
            shrunk**2 * w
            - 2 * shrunk * step_size * beta * cross
            + step_size**2 * (beta**2 * r + noise + gamma * z),
            shrunk * (1 - beta) * cross - step_size * beta * (1 - beta) * r + step_size * gamma * z,
            (1 - beta) ** 2 * r + gamma * z,
        )
        if not beta:
            cross = r = 0.0
    return np.array(found)


class Quadratic:
    """f = ||w||²/2 and Gaussian noise; second moments are not bounded."""

    def __init__(self, dimension: int = 20) -> None:
        self.dimension = dimension
        self.start = np.full(dimension, 1 / math.sqrt(dimension))

    def gradient(self, w):
        return w

    def sample(self, rng, w, processors):
        noise = rng.standard_normal((len(w), processors, self.dimension))
        return w[:, None] + noise / math.sqrt(self.dimension)


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("gamma", [0.5, 3.0])
def test_the_recursion_is_that_of_simulated_descents(gamma, beta):
    expected = moments(gamma, 0.1, beta, 60)
    squares = descend(Quadratic(), gamma, 0.1, beta=beta, steps=60)
    error = squares.std(axis=1, ddof=1) / math.sqrt(RUNS)
    assert np.all(np.abs(squares.mean(axis=1) - expected) <= 5 * error + 1e-12)


def test_feedback_dwarfs_the_effect_of_compression(gamma=3.0):
    """What compression adds to the mean squared gradient at the step 1/√T falls by ten from T to
    100 T without feedback, by a hundred with it: O(1/√T) and O(1/T), as section 5 says."""
    beta = best_feedback(gamma, correlated=False)[0]
    added = {}
    for steps in (3_000, 300_000):
        exact = moments(0.0, steps**-0.5, 0.0, steps).mean()
        for name, weight in (("plain", 0.0), ("feedback", beta)):
            added[name, steps] = moments(gamma, steps**-0.5, weight, steps).mean() - exact
    plain, feedback = ([added[name, t] for t in (3_000, 300_000)] for name in ("plain", "feedback"))
    assert plain[0] / plain[1] == pytest.approx(10, rel=0.15)
    assert feedback[0] / feedback[1] == pytest.approx(100, rel=0.15)
    assert feedback[1] < 0.2 * plain[1]


def test_the_bound_of_eq_23_does_not_show_it():
    """Its ε adds L B ε/(2 √T): at the best ε the printed excess over SGD's bound falls by 100^(3/4)
    from T to 100 T, not by a hundred."""

    def excess(steps: float, eta: float) -> float:
        epsilon = np.geomspace(1e-8, 10, 4000)
        root = np.sqrt(1 + epsilon)
        return float(
            (epsilon / 2 / math.sqrt(steps) + (1 + epsilon) ** 2 / (root - 1) * eta / steps).min()
        )

    for eta in (0.1, 10.0):
        assert excess(1e10, eta) / excess(1e12, eta) == pytest.approx(100**0.75, rel=0.1)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_remark_4(gamma):
    """With the variance σ² alone bounded: E||ĝ||² <= (1 + γ)(||∇f||² + σ²) in Lemma 5's proof gives
    (1 - L μ (1 + γ)/2) mean <= gap/(T μ) + L μ (1 + γ) σ²/2, and a quadratic keeps it."""
    for start in (1.0, 1e4):
        for step_size in (0.02, 0.3 / (1 + gamma)):
            mean = moments(gamma, step_size, 0.0, 500, start=start).mean()
            share = 1 - step_size * (1 + gamma) / 2
            bound = start / 2 / (500 * step_size) + step_size * (1 + gamma) / 2
            assert mean <= bound / share <= 2.5 * mean


def test_remark_1():
    """A transform's rows span k dimensions; those of 2 n/k random ones "almost all" n: nine in ten
    or more, but not always all, as two columns may get equal signs each time."""
    n, k = 64, 16
    rng = np.random.default_rng(0)
    rows = hadamard(n)[:k].astype(float)
    ranks = []
    for _ in range(30):
        stack = np.concatenate([rows * rng.choice([-1.0, 1.0], n) for _ in range(2 * n // k)])
        ranks.append(np.linalg.matrix_rank(stack))
        assert np.linalg.matrix_rank(stack[:k]) == k
    assert 0.9 * n <= min(ranks) < n
