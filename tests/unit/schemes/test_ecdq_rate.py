"""ECDQ's rate: the law of its integers, its books, the bound, the budget."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import scipy.integrate
import torch
from rate_bound import rate_bound

from hvd_adaptive import ECDQ, QSGD
from hvd_adaptive.codec.dithered_code import (
    GAUSSIAN_UNIT,
    LARGEST_CORRECTION,
    LEAST_DELTA,
    MOST_DELTA,
    DitheredCode,
    RateControl,
    classes_of,
    dithered_probabilities,
    gaussian_code,
    gaussian_law,
)
from hvd_adaptive.levels import Histogram, entropy_bits
from hvd_adaptive.schemes.ecdq import often

LAWS = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "student": lambda rng, n: rng.standard_t(2.5, n),
    "sparse": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.05),
    "positive": lambda rng, n: rng.exponential(size=n),
    "constant": lambda rng, n: np.full(n, 0.7),
}
COORDINATES = 1 << 18


@functools.cache
def vector(law: str, n: int = COORDINATES, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng([seed, n])
    return torch.from_numpy(LAWS[law](rng, n).astype(np.float32))


def bits_of(scheme: ECDQ, flat: torch.Tensor, seed: int = 0) -> float:
    """Wire bits per coordinate, measured."""
    return scheme.encode(flat, seed=seed).numel() * 8 / flat.numel()


ATOMS = Histogram([0.0, 0.1, 0.3, 0.35, 0.8, 1.0], [1.0, 2.0, 0.0, 1.0, 0.5], 3.0, 0.7)


@pytest.mark.parametrize("step", (0.05, 0.4, 3.0))
@pytest.mark.parametrize("classes", (1, 4))
def test_probabilities_by_quadrature(step, classes):
    """P(q | a) from the law's distribution function, integrated over a numerically."""
    most = 3
    got = dithered_probabilities(ATOMS, step, classes, most)
    np.testing.assert_allclose(got.sum(axis=1), 1, rtol=1e-12)

    def at_most(y: float) -> float:
        """P(±t/step <= y) with random signs."""
        return float((1 + np.sign(y) * ATOMS.cdf(abs(y) * step)) / 2)

    for c in range(classes):
        low, high = c / classes / 2, (c + 1) / classes / 2
        for k in range(-most, most + 1):
            jumps = [k + s - y / step for s in (0.5, -0.5) for y in (*ATOMS.edges, *-ATOMS.edges)]
            wanted, _ = scipy.integrate.quad(
                lambda a, k=k: at_most(k + 0.5 - a) - at_most(k - 0.5 - a),
                low,
                high,
                points=[j for j in jumps if low < j < high] or None,
                limit=200,
            )
            assert abs(got[c, k + most] - wanted / (high - low)) < 1e-7


@pytest.mark.many
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("delta", (0.02, 0.3, 1.0, 1.5, 3.0, 5.0))
def test_rate_is_within_the_bound(law, delta):
    """½ log2(2πe (1/δ² + 1/12)) and 1.3 % + 0.01 bits: classes, books, steps, offsets, header."""
    flat = vector(law)
    scheme = ECDQ(relative_variance=delta**2 / 12, keep_zeros=False)
    scheme.fit(flat)
    measured = bits_of(scheme, flat)
    assert measured <= 1.013 * rate_bound(delta) + 0.01
    # The model, which sees no header, foresaw it, where the histogram's bins, 0.8 % wide, are finer
    # than the steps or the law is smooth.
    modelled = scheme.parts.default.code.bits(histogram(flat), 128.0)
    if law != "constant" or delta > 1:
        assert abs(measured - modelled) < 0.01 * modelled + 0.01


def histogram(flat: torch.Tensor) -> Histogram:
    """Of abs(v)/(128 rms), bucket by bucket, made anew."""
    buckets = flat.double().view(-1, 8192).numpy()
    sizes = np.abs(buckets) / np.sqrt(np.square(buckets).mean(axis=1, keepdims=True)) / 128
    return Histogram.from_samples(np.minimum(sizes, 1))


@pytest.mark.parametrize("law", ("gaussian", "laplace", "student"))
def test_books_come_close_to_what_the_dither_allows(law):
    """Within 1.5 % of H(q | dither), by 64 classes of it, and 0.005 bits of steps and offsets; one
    blind book is 5 % above that."""
    delta, flat = 1.5, vector(law)
    scheme = ECDQ(relative_variance=delta**2 / 12)
    if law == "gaussian":  # as docs/rate.md says
        assert abs(rate_bound(delta) - 1.586) < 1e-3 and bits_of(scheme, flat) < 1.61
    scheme.fit(flat)
    fine = dithered_probabilities(histogram(flat), delta / 128, 64, 40)
    best = entropy_bits(fine) / 64
    assert best <= bits_of(scheme, flat) < 1.015 * best + 0.005
    # Without the dither's sign or size: q of either sign alike.
    blind = fine.mean(axis=0)
    blind[:-1] = (blind[:-1] + blind[-2::-1]) / 2
    assert entropy_bits(blind) > 1.05 * best


@pytest.mark.parametrize(
    ("delta", "classes", "more"), [(1.5, 4, 1.0015), (4.0, 4, 1.011), (0.5, 1, 1.0013)]
)
def test_what_few_classes_cost_gaussian_buckets(delta, classes, more):
    law = gaussian_law()
    few, many = (
        entropy_bits(dithered_probabilities(law, delta / GAUSSIAN_UNIT, c, 60)) / c
        for c in (classes, 512)
    )
    assert classes_of(delta) == classes and many < few < more * many
    assert many < rate_bound(delta) + 1e-4  # the law is a histogram


@pytest.mark.parametrize("bits", (0.5, 1.0, 3.3, 10.0))
def test_the_default_is_for_gaussian_buckets(bits):
    scheme = ECDQ(bits=bits)
    assert abs(bits_of(scheme, vector("gaussian")) / bits - 1) < 0.01
    assert gaussian_code(bits - scheme.parts.default._side, None) is scheme.parts.default.code


@pytest.mark.many
@pytest.mark.parametrize("law", ("laplace", "student", "positive"))
@pytest.mark.parametrize(
    ("bits", "size"), [(0.5, 8192), (1.0, 8192), (2.0, 8192), (5.0, 8192), (8.0, 8192), (2.0, 32)]
)
def test_a_fit_meets_the_budget(law, bits, size):
    """Buckets of few coordinates pay for their steps."""
    scheme, flat = ECDQ(bits=bits, bucket_size=size), vector(law)
    scheme.fit(flat)
    assert abs(bits_of(scheme, flat) / bits - 1) < 0.02


def test_sparse_gradients_use_what_they_need():
    """5 % of the coordinates: 0.5 bits go to them, and 8 cannot be spent."""
    flat, scheme = vector("sparse"), ECDQ(bits=0.5)
    scheme.fit(flat)
    assert abs(bits_of(scheme, flat) / 0.5 - 1) < 0.015
    assert scheme.parts.default.relative_variance < 0.05
    scheme = ECDQ(bits=8.0)
    scheme.fit(flat)
    assert scheme.parts.default.delta == LEAST_DELTA and bits_of(scheme, flat) < 1.5
    law = Histogram.from_samples(np.full(100, 0.5))
    assert DitheredCode.of_rate(law, 2.0, 1e-3).delta == MOST_DELTA
    zeros = Histogram([0, 0.5, 1.0], [0, 1e-9], zero_mass=1.0)
    assert DitheredCode.of_rate(zeros, 2.0, 3.0).delta == LEAST_DELTA


def test_update_steps_become_rarer():
    steps = [step for step in range(2501) if often(step)]
    assert steps == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1500, 2000, 2500]


def train(scheme: ECDQ, steps: int, ranks: int = 2) -> np.ndarray:
    """Bits per coordinate of every step of a training whose gradients drift from Gaussian to
    heavy-tailed and sparse, through the hooks that Horovod's steps call."""
    n, spent = 16_384, []
    codec, updates = scheme.parts.default, scheme._training.updates
    for step in range(steps):
        rng, share = np.random.default_rng(step), min(1.0, 2 * step / steps)
        v = rng.standard_normal((ranks, n)) * np.exp(1.5 * share * rng.standard_normal((ranks, n)))
        v *= rng.random((ranks, n)) < 1 - 0.5 * share
        flats = torch.from_numpy(v.astype(np.float32))
        if updates.due(step):
            # As in a simulation: one codec has sent for all ranks, so its counters stand for all.
            own = [codec.collect(flat.split(8192)) for flat in flats]
            updates.schedule.done(step, codec.apply_update(codec.refit(own), step))
        payloads = [
            codec.payloads.encode(f, n, 7 * step + r, layout=1) for r, f in enumerate(flats)
        ]
        for payload in payloads:
            codec.count(payload)
        spent.append(sum(p.header.length for p in payloads) * 8 / n / ranks)
    return np.array(spent)


@pytest.mark.parametrize(("bits", "keep"), ((0.7, False), (2.0, True)))
def test_training_that_drifts_stays_within_two_percent(bits, keep):
    """In the end half of the coordinates are zero, whose places alone would take 1 bit."""
    scheme = functools.partial(ECDQ, bits=bits, keep_zeros=keep)
    spent = train(scheme(update_steps=[0, 1, 4, *range(16, 120, 16)]), 120)
    assert abs(spent.mean() / bits - 1) < 0.02
    assert abs(spent[80:].mean() / bits - 1) < 0.03
    if bits < 1:  # without the later updates the drift is seen
        assert abs(train(scheme(update_steps=[0]), 120).mean() / bits - 1) > 0.04


def test_places_of_zeros_that_take_more_than_the_budget_are_told(caplog):
    """Half of the coordinates, independently: 1 bit."""
    scheme, flat = ECDQ(bits=0.7, keep_zeros=True), vector("gaussian").clone()
    flat[::2] *= (vector("laplace")[::2] > 0).to(torch.float32)
    flat[1::2] *= (vector("student")[1::2] > 0).to(torch.float32)
    scheme.fit(flat)
    assert "bits=0.7 cannot be met" in caplog.text and "keep_zeros" in caplog.text


def test_rate_control_pays_back():
    control = RateControl(2.0)
    for bits in (np.nan, np.inf, -1.0):
        assert control.updated(bits, 100.0, 2.0) is control
        assert control.updated(100.0, bits, 2.0) is control
    assert control.aim == 2.0 and control.updated(0, 0, 1.0) == control
    control = control.updated(2.1 * 1000, 1000, 2.0)  # 5 % more than modelled, and than the budget
    assert control.ratio == pytest.approx(1.05) and control.aim == pytest.approx(1.9 / 1.05)
    control = control.updated(1.9 * 1000, 1000, 1.9 / 1.05)
    assert control.aim == pytest.approx(2.0 / 1.05)
    far = RateControl(2.0).updated(5.0 * 1000, 1000, 2.0)
    assert far.aim * far.ratio == pytest.approx(2.0 * (1 - LARGEST_CORRECTION))


def test_a_budget_that_headers_use_up_is_told(caplog):
    codec = ECDQ(bits=0.5, bucket_size=512).parts.default
    flat = vector("gaussian")[:600]
    for step in range(3):
        codec.apply_update(codec.refit([codec.collect(flat.split(512)[:1])]), step)
        codec.count(codec.payloads.encode(flat, flat.numel(), step))
    assert "bits=0.5 cannot be met" in caplog.text


# Where it is not the best: mostly zeros, at low rates (docs/choosing.md).


def rate_and_error(compressor, values: np.ndarray) -> tuple[float, float]:
    """Bits per coordinate of the whole payload, and ||Q(v) - v||² / ||v||², in NumPy."""
    flat = torch.from_numpy(values)
    compressor.fit(flat)
    payload = compressor.encode(flat, seed=1)
    decoded = compressor.decode(payload).double().numpy()
    error = np.square(decoded - values).sum() / np.square(values.astype(np.float64)).sum()
    return 8 * payload.numel() / values.size, float(error)


def test_a_coded_table_with_a_zero_has_a_quarter_of_its_error_at_half_a_bit():
    draw = np.random.default_rng(0)
    values = draw.normal(size=2 * COORDINATES) * (draw.random(2 * COORDINATES) < 0.05)
    values = values.astype(np.float32)
    bits, error = rate_and_error(ECDQ(bits=0.5, keep_zeros=True), values)
    table_bits, table_error = rate_and_error(QSGD(bits=8, coding="huffman"), values)
    assert bits == pytest.approx(0.5, abs=0.01) and table_bits == pytest.approx(0.5, abs=0.01)
    assert error / table_error == pytest.approx(4, rel=0.1)
    # Of which its zeros, whose places take half of the bits, are a part no longer.
    bits, rounded = rate_and_error(ECDQ(bits=0.5), values)
    assert bits == pytest.approx(0.5, abs=0.01) and rounded / table_error == pytest.approx(
        9, rel=0.1
    )
    # Dense coordinates: the other way round, at the same rate.
    dense = draw.normal(size=2 * COORDINATES).astype(np.float32)
    table_bits, table_error = rate_and_error(QSGD(bits=4, norm="linf", coding="huffman"), dense)
    bits, error = rate_and_error(ECDQ(bits=round(table_bits, 3)), dense)
    assert bits == pytest.approx(table_bits, rel=0.01) and error < table_error / 2
