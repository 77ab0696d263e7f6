"""BinGrad against Eqs 14 to 17, 1-bit SGD; any vectors are in tests/oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import heavy, ordinary, vector
from scipy import integrate, optimize, stats
from test_orq_levels import KINDS, sample

from hvd_adaptive import BinGrad, OneBitSGD
from hvd_adaptive.kernels.numba import levels as cpu_levels
from hvd_adaptive.kernels.reference import levels as reference_levels


def roundtrip(scheme, values: np.ndarray, seed: int = 0) -> np.ndarray:
    return scheme.decode(scheme.encode(torch.from_numpy(values), seed=seed)).double().numpy()


def symmetric_level(values: np.ndarray, clip: float | None = None) -> float:
    return cpu_levels.symmetric_levels(torch.from_numpy(values), len(values), clip).item()


def test_level_of_a_normal_law_satisfies_equation_fifteen():
    """b/2 = integral of v p(v) beyond b: root by quadrature."""
    values = stats.norm.ppf((np.arange(200_000) + 0.5) / 200_000).astype(np.float32)

    def condition(b: float) -> float:
        return b / 2 - integrate.quad(lambda v: v * stats.norm.pdf(v), b, np.inf)[0]

    want = optimize.brentq(condition, 0.1, 2)
    assert abs(symmetric_level(values) / want - 1) < 0.05  # flat: 1 % of the error is 5 % of b

    def error(b: float) -> float:
        inner = integrate.quad(lambda v: (b * b - v * v) * stats.norm.pdf(v), 0, b)[0]
        return inner + integrate.quad(lambda v: (v - b) ** 2 * stats.norm.pdf(v), b, np.inf)[0]

    assert error(want) <= min(error(want * 0.98), error(want * 1.02))
    assert error(symmetric_level(values)) <= 1.01 * error(want)


def test_partially_biased_clips_beyond_its_levels():
    """Eq. 14, its third condition the right way round; between them tests/oracle has the law."""
    values = sample("heavy", 1500, 4)
    decoded, b = roundtrip(BinGrad(bucket_size=1500), values), symmetric_level(values)
    assert set(np.unique(decoded)) == {-b, b}
    beyond = np.abs(values) >= b
    assert beyond.sum() > 50 and np.all(decoded[beyond] == b * np.sign(values[beyond]))


@pytest.mark.parametrize("kind", KINDS)
def test_iterated_levels_satisfy_all_of_equation_seventeen(kind):
    values = sample(kind, 1000, 7)
    exact = values.astype(np.float64)
    low, high, cut = cpu_levels.conditional_means(torch.from_numpy(values), 1000, None, True)[0]
    above = exact >= cut.item()
    means = [exact[~above].mean(), exact[above].mean()]
    np.testing.assert_allclose([low, high], means, rtol=1e-6)
    # Within a float32 step of the fixed point, or between the same two coordinates.
    middle = (low.item() + high.item()) / 2
    assert abs(middle - cut.item()) < 1e-6 * (high - low) + 1e-7 * abs(cut)
    errors = [
        np.square(roundtrip(BinGrad(variant="biased", iterate=i, bucket_size=1000), values) - exact)
        for i in (False, True)
    ]
    assert errors[1].sum() <= errors[0].sum() * (1 + 1e-9)


def test_lane_sums_in_plain_python():
    values = torch.linspace(-1, 2, 77, dtype=torch.float64) ** 3
    lanes = [0.0] * 32
    for i, v in enumerate(values.tolist()):
        lanes[i % 32] += v
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    assert reference_levels.lane_sum(values) == lanes[0]


@pytest.mark.parametrize("kind", (ordinary, heavy))
def test_each_side_becomes_its_mean(kind):
    """Of 1-bit SGD, in float64 (extended sums)."""
    flat = vector(kind, 1077)
    scheme = OneBitSGD(bucket_size=500, error_feedback=None)
    decoded = scheme.decode(scheme.encode(flat)).numpy()
    halves = (np.split(v, [500, 1000]) for v in (flat.numpy(), decoded))
    for part, found in zip(*halves, strict=True):
        for side in (part < 0, part >= 0):
            assert (found[side] == np.float32(part[side].astype(np.longdouble).mean())).all()
    negative = -flat.abs() - 1
    one_side = scheme.decode(scheme.encode(negative, seed=1))[:500]
    np.testing.assert_allclose(one_side, negative[:500].double().mean(), rtol=1e-6)
    assert torch.equal(scheme.encode(flat, seed=1)[96:], scheme.encode(flat, seed=2)[96:])


def test_enormous_and_tiny_means_do_not_overflow_or_vanish():
    assert OneBitSGD().settings.error_feedback == 1.0
    scheme = OneBitSGD(error_feedback=None)
    for size in (3.4e38, 1e-40):
        flat = torch.full((2000,), size)
        flat[::3] = -size / 2
        assert torch.equal(scheme.decode(scheme.encode(flat)), flat)
