"""Variance bounds: never exceeded, nearly reached, and the infimum over p against a scan."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from theory_oracles import (
    ORDERS,
    TABLES,
    adversaries,
    exponential,
    neighbours,
    quantize,
    signed,
    uniform,
    vectors,
)

from hvd_adaptive import ALQ, NUQSGD, QSGD, TernGrad
from hvd_adaptive.levels import Histogram, fit_levels
from hvd_adaptive.theory import (
    exact_variance,
    exponent_constant,
    nuqsgd_variance_bound,
    qsgd_variance_bound,
    small_coordinates,
    variance_bound,
)

pytestmark = pytest.mark.many
DIMENSIONS = [2, 3, 17, 300, 8192, 100_000]
BOTH = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-based"])


def relative_variance(v, magnitudes, symmetric, order):
    """E||Q(v) - v||^2 / ||v||^2, in the scale of the largest coordinate."""
    v = v / np.max(np.abs(v))
    norm = np.linalg.norm(v, ord=order)
    theta = np.clip(v / norm, -1, 1)
    _, low, high = neighbours(theta, signed(magnitudes, symmetric))
    return norm**2 * np.sum((high - theta) * (theta - low)) / (v @ v)


def worst(magnitudes, symmetric, dimension, order, seed=0):
    rng = np.random.default_rng(seed)
    hard = [*vectors(rng, dimension), *adversaries(magnitudes, symmetric, dimension, order)]
    found = [relative_variance(v, magnitudes, symmetric, order) for _, v in hard if v.any()]
    return max(found)


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("name", TABLES)
def test_bound_is_never_exceeded(name, dimension):
    magnitudes, symmetric = TABLES[name]
    for order in ORDERS:
        bound = variance_bound(magnitudes, dimension, order, symmetric)
        found = worst(magnitudes, symmetric, dimension, order)
        assert found <= bound * (1 + 1e-9), (order, found, bound)


@pytest.mark.parametrize(("dimension", "intervals"), list(product(DIMENSIONS, [1, 3, 7, 127])))
def test_qsgd_bound_is_never_exceeded(dimension, intervals):
    for order in ORDERS:
        bound = qsgd_variance_bound(intervals, dimension, order)
        found = worst(uniform(intervals), False, dimension, order)
        assert found <= bound * (1 + 1e-9), (order, found, bound)


@pytest.mark.parametrize(("dimension", "internal"), list(product(DIMENSIONS, range(1, 8))))
def test_nuqsgd_bound_is_never_exceeded(dimension, internal):
    for order, p in product(ORDERS, (0.5, 0.2, 0.75)):
        bound = nuqsgd_variance_bound(internal, dimension, p, order)
        found = worst(exponential(internal, p), False, dimension, order)
        assert found <= bound * (1 + 1e-9), (order, p, found, bound)


@BOTH
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_bound_of_fitted_tables_is_never_exceeded(bits, symmetric):
    rng = np.random.default_rng(bits)
    samples = np.abs(rng.laplace(size=50_000))
    law = Histogram.from_samples(samples / np.linalg.norm(samples[:8192]))
    magnitudes = fit_levels(law, bits, symmetric).magnitudes
    for order, dimension in product(ORDERS, DIMENSIONS):
        bound = variance_bound(magnitudes, dimension, order, symmetric)
        assert worst(magnitudes, symmetric, dimension, order) <= bound * (1 + 1e-9)


@BOTH
@given(
    seed=st.integers(0, 10_000),
    dimension=st.sampled_from([1, 2, 5, 40, 1000]),
    order=st.sampled_from([1, 1.3, 2, 2.5, 7, np.inf]),
)
def test_bound_of_random_tables_is_never_exceeded(symmetric, seed, dimension, order):
    rng = np.random.default_rng(seed)
    magnitudes = np.sort(10.0 ** rng.uniform(-4, 0, rng.integers(2, 9)))
    magnitudes[-1] = 1.0
    if not symmetric:
        magnitudes[0] = 0.0
    bound = variance_bound(magnitudes, dimension, order, symmetric)
    assert worst(magnitudes, symmetric, dimension, order, seed) <= bound * (1 + 1e-9) + 1e-300


@pytest.mark.parametrize(
    ("name", "dimension", "order", "slack"),
    [
        ("ternary", 100_000, 2, 1.0),  # the constant vector costs sqrt(d) - 1
        ("nuqsgd-2", 8192, 2, 1.01),
        ("nuqsgd-3", 8192, 1, 1.001),
        ("nuqsgd-7", 8192, 2, 1.65),  # both terms count, and no vector is worst for both
        ("nuqsgd-3", 100_000, np.inf, 2.01),  # the coordinate that is 1 counts in ||v||^2
        ("qsgd-7", 100_000, 2, 1.01),
        ("fitted", 300, 2, 1.001),
        ("alq-paper", 8192, 2, 1.002),
        ("alq-paper", 8192, np.inf, 1.14),
    ],
)
def test_bound_is_nearly_reached(name, dimension, order, slack):
    """So the bounds cannot be made much smaller, and the tests above can fail."""
    magnitudes, symmetric = TABLES[name]
    bound = variance_bound(magnitudes, dimension, order, symmetric)
    assert bound <= slack * worst(magnitudes, symmetric, dimension, order) * (1 + 1e-12)


@pytest.mark.parametrize("reach", [0.01, 0.5, 1.0, 1.9, 2.0, 2.1, 5.0, 90.0, 1e4])
def test_infimum_over_p(reach):
    """Against a scan of 10^5 exponents and a bounded minimisation."""
    grid = (np.arange(100_000) + 0.5) / 100_000
    values = np.exp(
        -np.log(2 - grid)
        + (1 - grid) * np.log((1 - grid) / (2 - grid))
        + (2 - grid) * np.log(reach)
    )
    assert small_coordinates(reach) <= values.min() * (1 + 1e-12)
    np.testing.assert_allclose(small_coordinates(reach), values.min(), rtol=1e-4, atol=1e-12)
    found = optimize.minimize_scalar(
        lambda p: np.log(exponent_constant(p)) + (2 - p) * np.log(reach),
        bounds=(1e-9, 1 - 1e-9),
        method="bounded",
        options={"xatol": 1e-11},
    )
    np.testing.assert_allclose(small_coordinates(reach), np.exp(found.fun), rtol=1e-6)


@pytest.mark.parametrize("p", [0.001, 0.2, 0.5, 0.9, 0.999])
def test_exponent_constant_is_the_least(p):
    """K_p = max of r (l1 - r) / (l1^(2-p) r^p), for any l1; Eq. 41 as printed, too."""
    r = np.linspace(0, 1, 1_000_001)[1:]
    np.testing.assert_allclose(exponent_constant(p), np.max(r ** (1 - p) * (1 - r)), rtol=1e-6)
    printed = (1 / p) / (2 / p - 1) * ((1 / p - 1) / (2 / p - 1)) ** (1 - p)
    np.testing.assert_allclose(exponent_constant(p), printed)


@pytest.mark.parametrize("reach", [0.3, 1.0, 2.0, 3.0, 20.0])
def test_small_coordinates_is_reached_under_l2(reach):
    """n coordinates of l1 t with n (l1 t)^2 <= 1: the most that any vector's lower ones cost."""
    dimension = 1_000_000
    level = reach / np.sqrt(dimension)
    t = np.linspace(0, 1, 200_001)[1:]
    n = np.minimum(dimension, 1 / (level * t) ** 2)
    most = np.max(n * level**2 * t * (1 - t))
    np.testing.assert_allclose(small_coordinates(reach), most, rtol=1e-4)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["qsgd-3", "nuqsgd-2", "fitted", "alq-paper"])
def test_exact_variance_by_enumeration(name, order):
    """All 2^d roundings of a short vector, each with its probability."""
    magnitudes, symmetric = TABLES[name]
    rng = np.random.default_rng(3)
    v = rng.standard_cauchy(9) * 1e-3
    norm = np.linalg.norm(v, ord=order)
    _, low, high = neighbours(v / norm, signed(magnitudes, symmetric))
    up = (v / norm - low) / (high - low)
    total = mean = 0.0
    for choice in product([False, True], repeat=v.size):
        chance = np.prod(np.where(choice, up, 1 - up))
        value = norm * np.where(choice, high, low)
        total += chance * np.sum((value - v) ** 2)
        mean = mean + chance * value
    np.testing.assert_allclose(mean, v, atol=1e-15)
    np.testing.assert_allclose(exact_variance(magnitudes, v, order, symmetric), total, rtol=1e-9)


def test_exact_variance_of_extreme_scales():
    v = np.array([3.0, -4.0, 0.1])
    expected = exact_variance([0, 0.5, 1], v, 7)
    for scale in (1e-140, 1e140):
        measured = exact_variance([0, 0.5, 1], v * scale, 7)
        np.testing.assert_allclose(measured, expected * scale**2)
    assert exact_variance([0, 1], np.zeros(5)) == 0.0
    assert exact_variance([0, 1], []) == 0.0


BUCKET, REPEATS = 512, 400
SCHEMES = {
    "qsgd-s1": (lambda: QSGD(intervals=1, bucket_size=BUCKET), lambda: 512**0.5),
    "qsgd-s3": (lambda: QSGD(intervals=3, bucket_size=BUCKET), lambda: 512**0.5 / 3),
    "qsgd-8bit": (
        lambda: QSGD(bits=8, bucket_size=BUCKET),
        lambda: qsgd_variance_bound(127, BUCKET),
    ),
    "qsgd-linf": (
        lambda: QSGD(bits=3, bucket_size=BUCKET, norm="linf"),
        lambda: qsgd_variance_bound(3, BUCKET, np.inf),
    ),
    "nuqsgd": (
        lambda: NUQSGD(bits=4, bucket_size=BUCKET),
        lambda: nuqsgd_variance_bound(6, BUCKET),
    ),
    "nuqsgd-p": (
        lambda: NUQSGD(bits=3, multiplier=0.3, bucket_size=BUCKET),
        lambda: nuqsgd_variance_bound(2, BUCKET, 0.3),
    ),
    "alq": (lambda: ALQ(bits=3, bucket_size=BUCKET), None),
    "terngrad": (
        lambda: TernGrad(clip=None, bucket_size=BUCKET),
        lambda: qsgd_variance_bound(1, BUCKET, np.inf),
    ),
}


@pytest.mark.parametrize("shape", ["normal", "sparse", "constant", "cauchy", "lognormal"])
@pytest.mark.parametrize("name", SCHEMES)
def test_real_encodings_at_five_sigma(name, shape):
    """Decoded buckets: their mean squared error is Eq. 1's, and below the published bound."""
    make, published = SCHEMES[name]
    scheme, rng = make(), np.random.default_rng(8)
    buckets = [dict(vectors(rng, size))[shape] for size in (BUCKET, BUCKET, 100)]
    flat = np.concatenate(buckets).astype(np.float32)
    if name == "alq":
        scheme.fit(torch.from_numpy(np.tile(flat[: 2 * BUCKET], 30)))
    levels = scheme.levels.numpy()
    symmetric = not (levels == 0).any()
    magnitudes = levels[levels >= 0]
    order = np.inf if scheme.parts.default.norm == "linf" else 2
    parts = np.split(flat.astype(np.float64), [BUCKET, 2 * BUCKET])
    exact = sum(exact_variance(magnitudes, part, order, symmetric) for part in parts)
    tensor = torch.from_numpy(flat)
    errors = np.array(
        [
            (scheme.decode(scheme.encode(tensor, seed=seed)).double() - tensor).square().sum()
            for seed in range(REPEATS)
        ]
    )
    deviation = errors.std() / np.sqrt(REPEATS)
    rounding = 1e-5 * exact + 1e-10 * float(tensor.double().square().sum())
    assert abs(errors.mean() - exact) <= 5 * deviation + rounding
    general = variance_bound(magnitudes, BUCKET, order, symmetric)
    squared = sum(part @ part for part in parts)
    for bound in (general, *([published()] if published else [])):
        assert exact <= bound * squared
        assert errors.mean() - 5 * deviation <= bound * squared


def test_the_oracles_rounding_is_the_packages_variance():
    rng = np.random.default_rng(1)
    v = rng.standard_t(3, size=400)
    for name, (magnitudes, symmetric) in TABLES.items():
        _, values = quantize(rng, np.tile(v, (2000, 1)), magnitudes, symmetric)
        errors = np.square(values - v).sum(axis=1)
        exact = exact_variance(magnitudes, v, 2, symmetric)
        assert abs(errors.mean() - exact) <= 5 * errors.std() / np.sqrt(2000) + 1e-9, name


def test_published_values():
    np.testing.assert_allclose(qsgd_variance_bound(16, 512), np.sqrt(512) / 16)  # section 4's 1.41
    np.testing.assert_allclose(qsgd_variance_bound(100, 100), 0.01)  # d/s^2, below sqrt(d)/s
    assert qsgd_variance_bound(10, 100) == 1.0  # s = sqrt(n): at most twice the second moment
    assert qsgd_variance_bound(1, 16, 1) == 16.0
    assert variance_bound([0.0, 1.0], 100) == 9.0
    assert variance_bound([1.0], 100, 2, True) == 100.0
    assert nuqsgd_variance_bound(3, 2**8) == 1 / 8 + 2.0**-6 * 2**8 / 4
    assert nuqsgd_variance_bound(3, 2**10) == 1 / 8 + 2.0**-3 * 2**5 - 1


def test_monotone():
    """More dimensions never less; more levels of one ratio never more."""
    dims = [variance_bound([0, 0.1, 0.5, 1], d) for d in range(1, 3000, 7)]
    assert np.all(np.diff(dims) >= 0)
    for function in (nuqsgd_variance_bound, qsgd_variance_bound):
        assert np.all(np.diff([function(s, 8192) for s in range(1, 20)]) <= 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: variance_bound([0, 1], 0), "dimension=0: must be a whole number >= 1"),
        (lambda: variance_bound([0, 1], 2.5), "dimension=2.5"),
        (lambda: variance_bound([0, 1], 4, 0.5), "norm_order=0.5: must be a number >= 1"),
        (lambda: variance_bound([0, 1], 4, np.nan), "norm_order=nan"),
        (lambda: variance_bound([0.5, 1], 4), "magnitudes: the first must be zero"),
        (lambda: qsgd_variance_bound(0, 4), "intervals=0"),
        (lambda: qsgd_variance_bound(True, 4), "intervals=True"),
        (lambda: nuqsgd_variance_bound(0, 4), "internal_levels=0"),
        (lambda: nuqsgd_variance_bound(2, 4, 1.0), "multiplier=1.0: .* above 0 and below 1.0"),
        (lambda: exponent_constant(0), "exponent=0"),
        (lambda: small_coordinates(-1), "reach=-1"),
        (lambda: exact_variance([0, 1], [1.0, np.nan]), "vector: must be finite"),
        (lambda: exact_variance([0, 1], [1.0], 0), "norm_order=0"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("reach", [2.0, 2.5, 4.0, 7.5])
def test_equal_coordinates_reach_the_bound_and_all_of_them_cost_most(reach):
    """From reach 2 on. Brute force over how many coordinates are equal, the others zero."""
    d = 400
    first = reach / np.sqrt(d)
    costs = [
        exact_variance([0.0, first, 1.0], np.repeat([1.0, 0.0], [n, d - n])) / n
        for n in range(1, d + 1)
        if n**-0.5 <= first
    ]
    assert np.argmax(costs) == len(costs) - 1
    np.testing.assert_allclose(costs[-1], small_coordinates(reach), rtol=1e-9)


@pytest.mark.parametrize("reach", [0.5, 1.0, 1.7, 1.9])
def test_halves_of_the_first_level_reach_the_bound_below_reach_two(reach):
    """Beside one coordinate that holds the rest of the norm, and whose own cost is left out."""
    d = 400
    first = reach / np.sqrt(d)
    small = np.full(d, first / 2)
    rest = np.sqrt(1 - small @ small)
    cost = exact_variance([0.0, first, 1.0], [*small, rest]) - (1 - rest) * (rest - first)
    np.testing.assert_allclose(cost, small_coordinates(reach), rtol=1e-9)
    equal = exact_variance([0.0, first, 1.0], np.ones(d)) / d if reach >= 1 else 0.0
    assert equal < cost


def test_no_small_coordinates_cost_more():
    """Random vectors of norm at most 1 in [0, l1]^d, and what projected ascent makes of them."""
    draw = np.random.default_rng(5)
    for reach in (0.7, 1.5, 2.0, 3.0, 6.0):
        d = 50
        first, best = reach / np.sqrt(d), 0.0
        for _ in range(20):
            r = draw.uniform(0, first, d)
            for _ in range(400):
                r = np.clip(r + 0.05 * (first - 2 * r), 0, first)
                r /= max(1.0, np.linalg.norm(r))
            best = max(best, float(np.sum(r * (first - r))))
        assert best <= small_coordinates(reach) * (1 + 1e-9)
        assert best == pytest.approx(small_coordinates(reach), rel=1e-3)
