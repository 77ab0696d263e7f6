"""ORQ's levels against brute force, payloads of levels that each bucket has of its own.

Each split and quantiles are in tests/oracle/test_levels.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive import ORQ, BinGrad, LinearQuantile, SignSGD
from hvd_adaptive.codec.bucket_codec import FORMATS
from hvd_adaptive.kernels.numba import levels as cpu_levels
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


def rounding_variance(values: np.ndarray, levels: np.ndarray) -> float:
    """Eq. 9: sum of (v - b_k-1)(b_k - v) for v within the levels."""
    above = np.clip(np.searchsorted(levels, values), 1, len(levels) - 1)
    return float(((values - levels[above - 1]) * (levels[above] - values)).sum())


def best_variance(values: np.ndarray, count: int) -> float:
    """Least variance of ``count`` levels that are coordinates, by dynamic programme.

    The variance is linear in each level between coordinates, so no others can be better.
    """
    points = np.unique(values)
    cost = np.full((len(points), len(points)), np.inf)
    for i, a in enumerate(points):
        for j in range(i, len(points)):
            inside = values[(values >= a) & (values <= points[j])]
            cost[i, j] = ((inside - a) * (points[j] - inside)).sum()
    best = cost[0]
    for _ in range(count - 2):
        best = (best[:, None] + cost).min(axis=0)
    return float(best[-1])


def levels_of(values: np.ndarray, count: int, sweeps: int = 0) -> np.ndarray:
    rows = cpu_levels.orq_levels(torch.from_numpy(values), len(values), count, None, sweeps)
    return rows[0].double().numpy()


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
def test_coordinate_descent_is_never_worse(kind, count):
    better = 0
    for seed in range(3):
        values = sample(kind, 300, seed)
        exact = values.astype(np.float64)
        greedy, descent = levels_of(values, count), levels_of(values, count, 1000)
        before, after = rounding_variance(exact, greedy), rounding_variance(exact, descent)
        assert after <= before * (1 + 1e-9)
        better += after < before * (1 - 1e-6)
        assert descent[0] == greedy[0] and descent[-1] == greedy[-1]
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
    best = {s: best_variance(exact, s) for s in found}
    assert found[3] <= best[3] * (1 + 1e-9)
    assert all(found[s] >= best[s] * (1 - 1e-9) for s in found)
    if kind in ("normal", "heavy", "skewed", "positive"):
        assert found[5] <= 1.2 * best[5] and found[9] <= 1.2 * best[9]


def test_levels_of_a_law_satisfy_equation_eight():
    """A large normal sample between -4 and 4: the integrals of Eq. 8 hold for each split."""
    from scipy import stats

    n = 400_000
    values = stats.norm.ppf((np.arange(n) + 0.5) / n * 0.9998 + 0.0001).astype(np.float32)
    levels = levels_of(values, 9, 500)
    mass, moment = np.diff(stats.norm.cdf(levels)), -np.diff(stats.norm.pdf(levels))
    left = levels[:-2] * mass[:-1] + levels[2:] * mass[1:]
    np.testing.assert_allclose(left, moment[:-1] + moment[1:], atol=2e-4)


@pytest.mark.parametrize(
    ("scheme", "paper"),
    [
        (ORQ(levels=3), 20.2),
        (ORQ(levels=5, solver="coordinate_descent"), 13.8),
        (ORQ(levels=9), 10.1),
        (LinearQuantile(levels=5), 13.8),
        (BinGrad(), 32),
        (BinGrad(variant="biased"), 32),
        (SignSGD(), 32),
    ],
    ids=lambda of: type(of).__name__,
)
def test_ratios_of_the_paper_at_bucket_8192(scheme, paper):
    """Levels' own bytes counted; headers too."""
    n = 100 * 8192
    assert abs(4 * n / scheme.encode(torch.zeros(n)).numel() / paper - 1) < 0.03


@pytest.mark.parametrize("kind", ("normal", "heavy", "skewed", "outlier", "positive"))
@pytest.mark.parametrize("scale", (2.0**-120, 1e-20, 1.0, 1e30))
def test_float16_levels_bracket_and_survive_the_wire(kind, scale):
    half = FORMATS["float16"]
    values = (sample(kind, 300, 1).astype(np.float64) * scale).astype(np.float32)
    levels = cpu_levels.orq_levels(torch.from_numpy(values), 300, 9, None, 0)
    for signed in (levels, -levels.flip(1).contiguous()):
        rounded = half.rounded(signed)
        assert rounded[0, 0] <= signed[0, 0] and rounded[0, -1] >= signed[0, -1]
        assert (rounded.diff() >= 0).all()
        largest = signed.abs().max().double()
        allowed = 2.0**-10 * signed.double().abs() + 2.0**-27 * largest + 2.0**-136
        assert ((rounded.double() - signed).abs() <= allowed).all()
        nearest = allowed - 2.0**-11 * signed.double().abs()
        assert ((rounded.double() - signed).abs() <= nearest)[:, 1:-1].all()
        section = torch.full((half.section_bytes(1, 9),), 0xFF, dtype=torch.uint8)
        assert section.numel() == 20  # 9 numbers of 2 bytes, an exponent, padded
        half.write(rounded, section)
        assert torch.equal(half.read(section, 1, 9), rounded)
        assert not section[19:].any()


@pytest.mark.parametrize("levels", ([-(2.0**20), -1.0, 0.0], [0.0, 1.0, 2.0**20]))
def test_float16_levels_scale_with_the_largest_magnitude(levels):
    half, section = FORMATS["float16"], torch.zeros(8, dtype=torch.uint8)
    half.write(torch.tensor([levels]), section)
    assert half.read(section, 1, 3).tolist() == [levels]


def test_float16_extremes_beyond_float32_become_nan():
    largest = torch.finfo(torch.float32).max
    rounded = FORMATS["float16"].rounded(torch.tensor([[-1.0, 0.0, largest], [-1, 0, 1]]))
    assert rounded[0].isnan().all() and torch.equal(rounded[1], torch.tensor([-1.0, 0, 1]))


def test_codes_that_no_encoder_makes_become_nan():
    scheme = LinearQuantile(levels=250, bucket_size=500, keep_zeros=False)
    data = bytearray(scheme.encode(torch.from_numpy(sample("heavy", 500, 0))).numpy().tobytes())
    end = 96 + scheme.parts.default.body_bytes(500)
    data[96 + 1000 : end] = b"\xff" * (end - 96 - 1000)
    assert scheme.decode(oracle.forged(bytes(data))).isnan().all()


def test_solvers_read_each_others_payloads():
    greedy, descent = (ORQ(levels=5, solver=s) for s in ("greedy", "coordinate_descent"))
    payload = descent.encode(torch.from_numpy(sample("heavy", 900, 0)))
    assert torch.equal(greedy.decode(payload), descent.decode(payload))
    assert greedy.parts.default.settings_fingerprint != descent.parts.default.settings_fingerprint
