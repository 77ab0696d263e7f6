"""Psi against its definition, its gradient against finite differences, and what is measured."""

import numpy as np
import pytest
from levels_oracles import BOTH, LAWS, integral, random_magnitudes

from hvd_adaptive.levels import (
    check_magnitudes,
    expected_variance,
    gradient,
    sample_variance,
    signed_levels,
)
from hvd_adaptive.levels.magnitudes import LEAST_LEVEL, MIN_RATIO, separated
from hvd_adaptive.levels.objective import curvature_bound
from hvd_adaptive.theory import objective_hessian


def psi_by_definition(levels, law, symmetric):
    """Integral of E[(q(r) - r)^2] dF, with the two neighbours' probabilities written out."""
    table = signed_levels(levels, symmetric)

    def noise(r):
        above = int(np.clip(np.searchsorted(table, r, side="right"), 1, table.size - 1))
        low, high = table[above - 1], table[above]
        up = (r - low) / (high - low)
        return up * (high - r) ** 2 + (1 - up) * (r - low) ** 2

    return integral(law, noise, *np.abs(table))


@BOTH
@pytest.mark.parametrize("name", LAWS)
def test_expected_variance_is_its_definition(name, symmetric):
    rng = np.random.default_rng(1)
    for count in (2, 5):
        levels = random_magnitudes(rng, count, symmetric)
        expected = psi_by_definition(levels, LAWS[name], symmetric)
        np.testing.assert_allclose(
            expected_variance(levels, LAWS[name], symmetric), expected, rtol=1e-8
        )


@BOTH
@pytest.mark.parametrize("name", LAWS)
def test_gradient_is_the_slope_of_psi(name, symmetric):
    rng = np.random.default_rng(2)
    law = LAWS[name]
    levels = np.sort(rng.uniform(0.02, 0.9, 6))
    levels[-1] = 1.0
    levels[0] *= symmetric
    computed = gradient(levels, law, symmetric)
    step = 1e-6
    for j in range(0 if symmetric else 1, 5):
        up, down = levels.copy(), levels.copy()
        up[j] += step
        down[j] -= step
        slope = expected_variance(up, law, symmetric) - expected_variance(down, law, symmetric)
        np.testing.assert_allclose(computed[j], slope / (2 * step), rtol=1e-5, atol=1e-9)
    assert computed[-1] == 0 and (symmetric or computed[0] == 0)


@BOTH
def test_curvature_bound_exceeds_the_hessian(symmetric):
    law = LAWS["mixture"]
    levels = np.array([0.05 * symmetric, 0.13, 0.3, 0.55, 1.0])
    bound = curvature_bound(levels, law, symmetric)
    rows = np.abs(objective_hessian(levels, law, symmetric)).sum(axis=1)
    moving = slice(0 if symmetric else 1, 4)
    assert np.all(rows <= bound[moving])
    np.testing.assert_allclose(rows[-2], bound[2])  # all of its neighbours move


@BOTH
def test_rows_are_tables(symmetric):
    rng = np.random.default_rng(3)
    rows = np.stack([random_magnitudes(rng, 4, symmetric) for _ in range(6)]).reshape(2, 3, 4)
    law = LAWS["atoms"]
    values, slopes = expected_variance(rows, law, symmetric), gradient(rows, law, symmetric)
    assert values.shape == (2, 3) and slopes.shape == rows.shape
    one = rows[1, 2]
    np.testing.assert_allclose(values[1, 2], expected_variance(one, law, symmetric))
    np.testing.assert_allclose(slopes[1, 2], gradient(one, law, symmetric))


def test_samples_on_levels_cost_nothing():
    np.testing.assert_array_equal(signed_levels([0.25, 1.0], True), [-1, -0.25, 0.25, 1])
    np.testing.assert_array_equal(signed_levels([0, 0.25, 1.0], False), [-1, -0.25, 0, 0.25, 1])
    assert sample_variance([0.0, 0.25, 1.0], [0.0, 0.25, 1.0], False) == 0
    assert sample_variance([0.25, 1.0], [0.25, 1.0], True) == 0
    assert sample_variance([0.25, 1.0], [0.0], True) == 0.0625


ORDERED = [0.5, 0.4, 1.0], [0.5, 0.5, 1.0], [0.1, 0.9], [0.0, 1.0], [], [np.nan, 1.0], [-0.1, 1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [(lambda r=r: sample_variance([0.5, 1.0], r, True), "r:") for r in (-0.01, 1.01, np.nan)]
    + [(lambda m=m: check_magnitudes(m, True), "magnitudes") for m in (*ORDERED, 1.0)]
    + [(lambda m=m: check_magnitudes(m, False), "magnitudes") for m in ([0.1, 1.0], [1.0])],
)
def test_wrong_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@BOTH
@pytest.mark.parametrize(
    "levels", [[0, 0, 0, 0], [1, 1, 1, 1], [0.3, 0.3, 0.3, 1], [0, 1, 1, 1], [0, 0.9999999, 1, 1]]
)
def test_separated(levels, symmetric):
    table = separated(levels, symmetric)
    check_magnitudes(table, symmetric)
    check_magnitudes(table.astype(np.float32), symmetric)
    positive = table[0 if symmetric else 1 :]
    assert positive[0] >= LEAST_LEVEL
    assert np.all(positive[1:] / positive[:-1] >= MIN_RATIO * (1 - 1e-12))


@BOTH
def test_separated_leaves_good_tables_alone(symmetric):
    rng = np.random.default_rng(6)
    for _ in range(20):
        levels = random_magnitudes(rng, 8, symmetric)
        np.testing.assert_array_equal(separated(levels, symmetric), levels)
