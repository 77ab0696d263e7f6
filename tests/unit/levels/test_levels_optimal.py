"""The dynamic programme against a plain one, and against random tables."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from levels_oracles import BOTH, LAWS, random_magnitudes

from hvd_adaptive.levels import expected_variance, sample_variance
from hvd_adaptive.levels.optimal import best_on_grid, grid_optimum


def sample_moments(r, w, x):
    inside = r[None, :] <= x[:, None]
    return tuple((inside * w * r**k).sum(1) / w.sum() for k in range(3))


@BOTH
@given(seed=st.integers(0, 10_000), size=st.integers(3, 300), count=st.integers(2, 16))
def test_best_on_grid_agrees_with_a_plain_programme(symmetric, seed, size, count):
    """All predecessors of all levels, no monotony assumed."""
    rng = np.random.default_rng(seed)
    r, w = rng.beta(0.4, 3, 60) * (rng.random(60) < 0.9), rng.random(60)
    grid = np.concatenate([[0.0], np.sort(rng.random(size)), [1.0]])
    mass, mean, second = sample_moments(r, w, grid)
    a, c = grid[:, None], grid[None, :]
    cost = (a + c) * (mean[None] - mean[:, None]) - (second[None] - second[:, None])
    cost -= a * c * (mass[None] - mass[:, None])
    cost[np.tril_indices(grid.size)] = np.inf
    first = grid**2 * mass - second if symmetric else np.zeros(grid.size)
    best = np.where((grid > 0) == symmetric, first, np.inf)
    count = min(count, size)
    for _ in range(count - 1):
        best = (best[:, None] + cost).min(0)
    found = best_on_grid(grid, (mass, mean, second), count, symmetric)
    assert len(found) == count and set(found) <= set(grid)
    value = sample_variance(found, r, symmetric, w) / w.sum()
    np.testing.assert_allclose(value, best[-1], rtol=1e-9, atol=1e-15)


@BOTH
def test_grid_optimum_of_a_law(symmetric):
    law = LAWS["atoms"]
    levels = grid_optimum(law, 4, symmetric, 300)
    rng = np.random.default_rng(1)
    rows = np.stack([random_magnitudes(rng, 4, symmetric) for _ in range(2000)])
    assert expected_variance(levels, law, symmetric) < expected_variance(rows, law, symmetric).min()
