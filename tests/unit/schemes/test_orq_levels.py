"""ORQ's levels against brute force; each split and quantiles are in tests/oracle/test_levels.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bucket_oracles import best_levels, least_between, of_level, rounding_variance
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.kernels.numba import levels as cpu_levels
from hvd_adaptive.kernels.reference import levels as reference_levels
from hvd_adaptive.schemes.orq import SWEEPS

DESCENT = SWEEPS["coordinate_descent"]


def sample(kind: str, n: int, seed: int) -> np.ndarray:
    """float32 coordinates of a law."""
    rng = np.random.default_rng([seed, n])
    made = {
        "normal": lambda: rng.standard_normal(n),
        "heavy": lambda: rng.standard_normal(n) * np.exp(2 * rng.standard_normal(n)),
        "skewed": lambda: rng.exponential(size=n) ** 2 - 0.1,
        "ties": lambda: np.round(2 * rng.standard_normal(n)) / 2,
        "positive": lambda: 1 + 1e-3 * rng.random(n),
        "outlier": lambda: np.append(1e-6 * rng.standard_normal(n - 1), -7.0),
    }
    return made[kind]().astype(np.float32)


KINDS = ("normal", "heavy", "skewed", "ties", "positive", "outlier")


def levels_of(values: np.ndarray, count: int, sweeps: int = 0) -> np.ndarray:
    rows = cpu_levels.orq_levels(torch.from_numpy(values), len(values), count, None, sweeps)
    return rows[0].double().numpy()


def check_split(values: np.ndarray, a: float, b: float, c: float) -> None:
    """b is as good as any level between a and c."""
    least, scale = least_between(values, a, c), of_level(values, a, a, c)
    assert of_level(values, a, b, c) <= least + 1e-9 * scale


@settings(max_examples=80)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40))
def test_equation_twelve_counted_once(numbers):
    """#{v >= b} lies between the two sides of the sign change; samples at b are counted once."""
    values = np.array(numbers, np.float32) + np.float32(0)
    a, b, c = levels_of(values, 3)
    exact = values.astype(np.float64)
    if np.abs(exact).max() < 2.0**-126:
        assert a == b == c == 0
        return
    if a == c:
        assert b == a
        return
    wanted = (exact - a).sum() / (c - a)
    assert (exact > b).sum() <= wanted + 1e-9 and wanted <= (exact >= b).sum() + 1e-9


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", (3, 5, 9, 17, 33))
def test_coordinate_descent_is_never_worse_and_ends_at_equation_twelve(kind, count):
    better = 0
    for seed in range(3):
        values = sample(kind, 300, seed)
        exact = values.astype(np.float64)
        greedy, descent = levels_of(values, count), levels_of(values, count, 1000)
        before, after = rounding_variance(exact, greedy), rounding_variance(exact, descent)
        assert after <= before * (1 + 1e-9)
        better += after < before * (1 - 1e-6)
        assert descent[0] == greedy[0] and descent[-1] == greedy[-1]
        for k in range(1, count - 1):
            check_split(exact, descent[k - 1], descent[k], descent[k + 1])
    assert better > 0 or count == 3 or kind not in ("normal", "heavy", "skewed")


@pytest.mark.parametrize("kind", ("normal", "heavy", "skewed"))
def test_the_sweeps_allowed_come_close_to_the_end(kind):
    values = sample(kind, 8192, 5)
    exact = values.astype(np.float64)
    for count in (5, 9, 17):
        few = rounding_variance(exact, levels_of(values, count, DESCENT))
        many = rounding_variance(exact, levels_of(values, count, 3000))
        assert many <= few <= 1.01 * many


@pytest.mark.parametrize("kind", KINDS)
def test_three_levels_are_optimal_and_more_are_near_the_optimum(kind):
    """Against the dynamic programme over all sets of coordinates. Three levels leave one choice;
    the outlier law's optimum of more levels is far from where halving starts."""
    values = sample(kind, 60, 3)
    exact = values.astype(np.float64)
    found = {s: rounding_variance(exact, levels_of(values, s, 100)) for s in (3, 5, 9)}
    best = {s: best_levels(exact, s) for s in found}
    assert found[3] <= best[3] * (1 + 1e-9)
    assert all(found[s] >= best[s] * (1 - 1e-9) for s in found)
    if kind in ("normal", "heavy", "skewed", "positive"):
        assert found[5] <= 1.2 * best[5] and found[9] <= 1.2 * best[9]


def test_uniform_coordinates_have_even_levels():
    """Remark 1.1."""
    values = np.linspace(-1, 3, 4001).astype(np.float32)
    np.testing.assert_allclose(levels_of(values, 9), np.linspace(-1, 3, 9), atol=2e-3)


def test_levels_of_a_law_satisfy_equation_eight():
    """A large normal sample between -4 and 4: the integrals of Eq. 8 hold for each split."""
    from scipy import stats

    n = 400_000
    values = stats.norm.ppf((np.arange(n) + 0.5) / n * 0.9998 + 0.0001).astype(np.float32)
    levels = levels_of(values, 9, 500)
    mass, moment = np.diff(stats.norm.cdf(levels)), -np.diff(stats.norm.pdf(levels))
    left = levels[:-2] * mass[:-1] + levels[2:] * mass[1:]
    np.testing.assert_allclose(left, moment[:-1] + moment[1:], atol=2e-4)


def test_each_bucket_has_its_own_levels():
    parts = [sample("normal", 700, 1), 50 + sample("heavy", 700, 2), sample("skewed", 123, 3)]
    flat = torch.from_numpy(np.concatenate(parts))
    for module in (cpu_levels, reference_levels):
        rows = module.orq_levels(flat, 700, 5, None, 0)
        for row, part in zip(rows, parts, strict=True):
            assert row.tolist() == levels_of(part, 5).tolist()
