"""Convergence bounds: real quantized runs keep them, and they say what they say by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from theory_oracles import uniform
from theory_runs import (
    CHANGING,
    STEPS,
    AbsoluteValues,
    Logistic,
    Wells,
    epsilon_of,
    mean_and_error,
    train,
)

from hvd_adaptive.theory import (
    exact_variance,
    nonsmooth_convex,
    qsgd_variance_bound,
    quantized_variance,
    smooth_convex,
    smooth_convex_to_reach,
    smooth_nonconvex,
    variance_bound,
)

# Tables and numbers of processors; one plan changes along the run.
RUNS = pytest.mark.parametrize(
    ("plan", "processors"),
    [([], 1), (CHANGING, 1), (CHANGING, 4), ([(uniform(1), STEPS)], 4)],
    ids=["exact", "changing", "changing on 4", "ternary on 4"],
)


def shared(problem, plan, processors):
    epsilon = epsilon_of(plan, problem.dimension)
    return {
        "iterations": STEPS,
        "second_moment": problem.second_moment,
        "epsilon": epsilon,
        "processors": processors,
    }


def trained(problem, plan, processors, promise, **keywords):
    own = {"step_size": promise.step_size, "tables": plan, "processors": processors}
    return train(problem, steps=STEPS, **own, **keywords)


@RUNS
def test_nonsmooth_convex_holds(plan, processors):
    """Theorem 4, mended: at 5 standard errors, and within 12 of what was reached."""
    problem = AbsoluteValues()
    promise = nonsmooth_convex(**shared(problem, plan, processors), radius=problem.radius)
    path = trained(problem, plan, processors, promise)
    gap, error = mean_and_error(problem.value(path[:-1].mean(axis=0)) - problem.least)
    assert gap + 5 * error <= promise.bound <= 12 * gap, (gap, error, promise)


@RUNS
def test_smooth_convex_holds(plan, processors):
    """QSGD Theorem 3.4, NUQSGD Theorem 4: at 5 standard errors, and within 55 of it."""
    problem = Logistic()
    constants = shared(problem, plan, processors)
    constants |= {"smoothness": problem.smoothness, "radius": problem.radius}
    promise = smooth_convex(**constants)
    path = trained(problem, plan, processors, promise)
    gap, error = mean_and_error(problem.value(path[1:].mean(axis=0)) - problem.least)
    assert gap + 5 * error <= promise.bound <= 55 * gap, (gap, error, promise)
    sharper = smooth_convex(**constants, step_size=promise.step_size)
    assert gap + 5 * error <= sharper.bound
    assert promise.bound / 2 <= sharper.bound <= promise.bound * 3 / 4


@RUNS
@pytest.mark.parametrize("alpha", (0.2, 1.5))
def test_smooth_nonconvex_holds(plan, processors, alpha):
    """Theorem 6, mended: mean over the iterates of ||grad||^2, and within 80 of it."""
    problem = Wells()
    promise = smooth_nonconvex(
        **shared(problem, plan, processors),
        smoothness=problem.smoothness,
        initial_gap=problem.value(problem.start),
        variance=problem.variance,
        step_size=alpha / problem.smoothness,
    )
    path = trained(problem, plan, processors, promise, project=False)
    squares = np.square(problem.gradient(path[:-1])).sum(axis=-1)
    found, error = mean_and_error(squares.mean(axis=0))
    assert found + 5 * error <= promise.bound <= 80 * found, (found, error, promise)


@pytest.mark.parametrize("table", [uniform(1), uniform(127)], ids=["ternary", "fine"])
def test_quantized_variance_by_simulation(table):
    """Own variance and rounding add up, over M; QSGD and NUQSGD print the second part alone."""
    problem, processors, runs = Logistic(), 4, 2000
    w = train(
        problem, steps=1, step_size=1.0, tables=[(table, 1)], processors=processors, runs=runs
    )[1]
    # From w0 = 0 with step 1, not far enough to be projected.
    errors = np.square(-w - problem.gradient(problem.start)).sum(axis=1)
    found, error = mean_and_error(errors)
    samples = problem.x / 2
    own = np.mean(np.sum(samples**2, axis=1)) - np.sum(problem.gradient(problem.start) ** 2)
    exact = (own + np.mean([exact_variance(table, x) for x in samples])) / processors
    assert abs(found - exact) < 5 * error
    moment, epsilon = 0.25, variance_bound(table, problem.dimension)
    assert exact <= quantized_variance(moment, epsilon, processors, own)
    if table.size > 2:
        assert exact > 5 * epsilon * moment / processors
    assert quantized_variance(2.0, 0.5, 4) == 0.75
    assert quantized_variance(2.0, 0.5, 4, variance=1.0) == 0.5


def test_without_quantisation_the_classical_bounds():
    r, b, steps, smooth = 2.0, 9.0, 400, 0.5
    classical = nonsmooth_convex(iterations=steps, radius=r, second_moment=b, bits=10.0)
    assert (classical.iterations, classical.total_bits) == (steps, 4000)
    np.testing.assert_allclose(classical.bound, r * 3 / 20)
    np.testing.assert_allclose(classical.step_size, r / (3 * 20))
    bubeck = smooth_convex(
        iterations=steps, smoothness=smooth, radius=r, second_moment=b, variance=4.0
    )
    np.testing.assert_allclose(bubeck.bound, r * np.sqrt(2 * 4 / steps) + smooth * r**2 / steps)
    gamma = r / 2 * np.sqrt(2 / steps)
    np.testing.assert_allclose(bubeck.step_size, 1 / (smooth + 1 / gamma))
    descent = smooth_nonconvex(
        iterations=steps, smoothness=smooth, initial_gap=7.0, second_moment=b, variance=0.0, bits=1
    )
    assert (descent.iterations, descent.total_bits, bubeck.total_bits) == (steps, 400, None)
    np.testing.assert_allclose(descent.bound, 2 * smooth * 7 / steps)
    assert descent.step_size == 2.0


def test_default_steps_are_the_best():
    constants = {"iterations": 100, "radius": 2.0, "second_moment": 3.0, "epsilon": 0.7}
    best = nonsmooth_convex(**constants, processors=3)
    for factor in (0.9, 1.1):
        other = nonsmooth_convex(**constants, processors=3, step_size=best.step_size * factor)
        assert other.bound > best.bound


@pytest.mark.parametrize("target", [0.7, 0.004])
@pytest.mark.parametrize(("processors", "noise"), [(1, 0.0), (1, 4.0), (16, 4.0)])
def test_iterations_to_reach(target, processors, noise):
    constants = {"smoothness": 2.0, "radius": 1.5, "second_moment": noise}
    constants |= {"epsilon": 0.4, "processors": processors}
    found = smooth_convex_to_reach(target, **constants, bits=100.0)
    steps = found.iterations
    assert found.bound <= target and found.total_bits == steps * 100.0
    if steps > 1:
        assert smooth_convex(iterations=steps - 1, **constants).bound > target
    # The O() of Theorem 3.4 with its constants: between 1/2 and 4 times its maximum.
    moment = quantized_variance(noise, 0.4, processors)
    printed = 1.5**2 * max(2 * moment / target**2, 2.0 / target)
    assert printed / 2 <= steps <= 4 * printed + 1


def test_theorem_4_as_printed_fails():
    """f = |w| on [-1, 1] from 1, exact gradients, 100 processors: they are of no use."""
    processors, steps = 100, 16
    printed = 1 / (processors * np.sqrt(steps))
    mended = nonsmooth_convex(
        iterations=steps, radius=1.0, second_moment=1.0, processors=processors
    )
    w, path = 1.0, []
    for _ in range(steps):
        path.append(w)
        w = float(np.clip(w - mended.step_size * np.sign(w), -1, 1))
    assert printed < abs(np.mean(path)) <= mended.bound == 1 / np.sqrt(steps)


def test_theorem_6_as_printed_fails():
    """f = w^2/2, exact gradients, 100 processors, alpha = 0.01 < 2/L: 10 steps hardly move."""
    w = 0.99 ** np.arange(10)
    found = np.mean(w**2)
    printed = 0.5 / 10 + 2 * 1.0 / 100
    mended = smooth_nonconvex(
        iterations=10,
        smoothness=1.0,
        initial_gap=0.5,
        second_moment=1.0,
        variance=0.0,
        processors=100,
        step_size=0.01,
    )
    assert printed < found <= mended.bound


def test_variance_without_the_gradients_own_fails():
    """QSGD Theorem 3.4 with B' = min(n/s^2, sqrt(n)/s) B at s = 1000: a slope under noise.

    f = c w on [-1, 1], gradients c + N(0, 1), one step from 0: it ends at the wrong end as often
    as noise beats slope, and f is L-smooth for every L > 0.
    """
    slope, smooth = 0.5, 1e-3
    gap = 2 * slope * stats.norm.cdf(-slope)
    moment = 1 + slope**2
    epsilon = qsgd_variance_bound(1000, 1)
    printed = np.sqrt(2 * epsilon * moment) + smooth
    mended = smooth_convex(
        iterations=1, smoothness=smooth, radius=1.0, second_moment=moment, epsilon=epsilon
    )
    assert printed < gap <= mended.bound
