"""The dynamic programme against every table of a tiny grid, and against random tables."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from levels_oracles import BOTH, LAWS, random_magnitudes

from hvd_adaptive.levels import expected_variance, sample_variance
from hvd_adaptive.levels.optimal import best_on_grid, grid_optimum


def sample_moments(r, w, x):
    inside = r[None, :] <= x[:, None]
    return tuple((inside * w * r**k).sum(1) / w.sum() for k in range(3))


@BOTH
@given(seed=st.integers(0, 10_000), size=st.integers(6, 11), count=st.integers(2, 5))
def test_best_on_grid_by_brute_force(symmetric, seed, size, count):
    rng = np.random.default_rng(seed)
    r = rng.beta(0.4, 3, 30) * (rng.random(30) < 0.9)
    w = rng.random(30)
    grid = np.concatenate([[0.0], np.sort(rng.random(size)), [1.0]])
    found = best_on_grid(grid, sample_moments(r, w, grid), count, symmetric)
    inner = (
        [(*c, 1.0) for c in combinations(grid[1:-1], count - 1)]
        if symmetric
        else [(0.0, *c, 1.0) for c in combinations(grid[1:-1], count - 2)]
    )
    best = min(sample_variance(levels, r, symmetric, w) for levels in inner)
    assert len(found) == count and set(found) <= set(grid)
    np.testing.assert_allclose(sample_variance(found, r, symmetric, w), best, rtol=1e-9, atol=1e-15)


@BOTH
def test_best_on_grid_agrees_with_a_plain_programme(symmetric):
    """All predecessors of all levels, no monotony assumed, on a grid of 300."""
    rng = np.random.default_rng(3)
    r, w = rng.beta(0.3, 4, 2000), rng.random(2000)
    grid = np.concatenate([[0.0], np.sort(rng.random(298)), [1.0]])
    mass, mean, second = sample_moments(r, w, grid)
    a, c = grid[:, None], grid[None, :]
    cost = (a + c) * (mean[None] - mean[:, None]) - (second[None] - second[:, None])
    cost -= a * c * (mass[None] - mass[:, None])
    cost[np.tril_indices(300)] = np.inf
    best = (
        np.where(grid > 0, grid**2 * mass - second, np.inf)
        if symmetric
        else np.where(grid == 0, 0.0, np.inf)
    )
    for _ in range(15):
        best = (best[:, None] + cost).min(0)
    found = best_on_grid(grid, (mass, mean, second), 16, symmetric)
    value = sample_variance(found, r, symmetric, w) / w.sum()
    np.testing.assert_allclose(value, best[-1], rtol=1e-9)


@BOTH
def test_grid_optimum_of_a_law(symmetric):
    law = LAWS["atoms"]
    levels = grid_optimum(law, 4, symmetric, 300)
    rng = np.random.default_rng(1)
    rows = np.stack([random_magnitudes(rng, 4, symmetric) for _ in range(2000)])
    assert expected_variance(levels, law, symmetric) < expected_variance(rows, law, symmetric).min()


@pytest.mark.parametrize("count", [0, 7])
def test_bad_counts(count):
    grid = np.linspace(0, 1, 5)
    with pytest.raises(ValueError, match="count"):
        best_on_grid(grid, LAWS["normal"].moments(grid), count, False)
