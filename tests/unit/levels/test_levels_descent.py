"""Coordinate and gradient descent: single levels by brute force, whole runs by their properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from levels_oracles import BOTH, LAWS, random_magnitudes

from hvd_adaptive.levels import (
    STARTS,
    Histogram,
    check_magnitudes,
    coordinate_descent,
    expected_variance,
    gradient,
    gradient_descent,
)
from hvd_adaptive.levels.fit import best_level

SOLVER = pytest.mark.parametrize("solver", [coordinate_descent, gradient_descent])


@pytest.mark.parametrize("name", LAWS)
def test_best_level_by_brute_force(name):
    law = LAWS[name]
    for low, high in [(0.0, 1.0), (0.0, 0.2), (0.05, 0.4), (0.3, 0.9), (0.31, 0.34), (0.2, 0.8)]:
        grid = np.linspace(low, high, 4001)[1:-1]
        candidate = float(best_level(low, high, law))
        assert low <= candidate <= high

        def cost(level, low=low, high=high):
            (m0, a0, b0), (m1, a1, b1), (m2, a2, b2) = (law.moments(x) for x in (low, level, high))
            left = (low + level) * (a1 - a0) - (b1 - b0) - low * level * (m1 - m0)
            return left + (level + high) * (a2 - a1) - (b2 - b1) - level * high * (m2 - m1)

        assert cost(candidate) <= cost(grid).min() + 1e-12


@pytest.mark.parametrize("name", LAWS)
def test_first_level_by_brute_force(name):
    law = LAWS[name].tabulate()
    for high in (0.01, 0.2, 0.33, 1.0):
        grid = np.linspace(0, high, 4001)[1:-1]
        others = [] if high == 1 else [1.0]
        rows = np.stack([np.concatenate([[b, high], others]) for b in grid])
        candidate = float(law.balance_point(high))
        found = expected_variance([max(candidate, 1e-300), high, *others], law, True)
        assert found <= expected_variance(rows, law, True).min() + 1e-12


@BOTH
@SOLVER
@pytest.mark.parametrize("name", ["histogram", "atoms", "gaps"])
def test_descends_to_a_stationary_table(name, solver, symmetric):
    law = LAWS[name]
    rng = np.random.default_rng(1)
    starts = np.stack([random_magnitudes(rng, 5, symmetric) for _ in range(20)])
    descent = solver(starts, law, symmetric, tolerance=1e-12, max_sweeps=5000)
    assert np.all(np.diff(descent.history, axis=0) <= 1e-15)
    np.testing.assert_allclose(
        descent.history[-1], expected_variance(descent.magnitudes, law, symmetric)
    )
    assert np.all(descent.history[-1] < descent.history[0])
    check_magnitudes(descent.magnitudes, symmetric)
    before = np.abs(gradient(starts, law, symmetric)).max()
    free = np.diff(descent.magnitudes, axis=-1).min(axis=-1) > 1e-4
    after = np.abs(gradient(descent.magnitudes[free], law, symmetric))
    assert free.any() and after.max() < 1e-3 * before
    assert descent.converged.all()


@BOTH
@SOLVER
@settings(max_examples=40)
@given(
    masses=st.lists(st.sampled_from([0.0, 1e-12, 1.0, 3.0]), min_size=8, max_size=8),
    zero=st.sampled_from([0.0, 0.5, 40.0]),
    one=st.sampled_from([0.0, 1.0]),
    count=st.integers(2, 9),
    seed=st.integers(0, 99),
)
def test_never_leaves_the_feasible_set(solver, symmetric, masses, zero, one, count, seed):
    if not sum(masses) + zero + one:
        masses = [1.0] * 8
    law = Histogram([0.0, 1e-9, 1e-5, 0.01, 0.0101, 0.2, 0.5, 0.999, 1.0], masses, zero, one)
    start = random_magnitudes(np.random.default_rng(seed), count, symmetric)
    descent = solver(start, law, symmetric, max_sweeps=30)
    check_magnitudes(descent.magnitudes.astype(np.float32), symmetric)
    assert np.all(np.diff(descent.history) <= 1e-15 * descent.history[0])


@SOLVER
def test_ends(solver):
    """Tables without a free level, the most sweeps, and bad starts."""
    descent = solver([0.0, 1.0], LAWS["atoms"], False)
    np.testing.assert_array_equal(descent.magnitudes, [0.0, 1.0])
    assert descent.converged
    descent = solver(STARTS["exponential"](None, 64, True), LAWS["histogram"], True, max_sweeps=3)
    assert len(descent.history) == 1 + 3 and not descent.converged
    with pytest.raises(ValueError, match="magnitudes"):
        solver([0.5, 0.3, 1.0], LAWS["histogram"], True)


@BOTH
def test_gradient_steps_stay_within_half_the_distance_to_a_neighbour(symmetric):
    """Eq. 7: with delta / 2 as the most that a level moves, levels never cross."""
    rng = np.random.default_rng(2)
    closest = 0.0
    for law in (LAWS["histogram"], LAWS["atoms"]):
        for _ in range(50):
            start = random_magnitudes(rng, 6, symmetric)
            moved = gradient_descent(start, law, symmetric, max_sweeps=1).magnitudes
            gaps = np.diff(start, prepend=-start[0] if symmetric else -1.0, append=2.0)
            share = np.abs(moved - start) / np.minimum(gaps[:-1], gaps[1:])
            assert share.max() < 0.5
            closest = max(closest, share.max())
    assert closest > 0.4  # the limit was felt
