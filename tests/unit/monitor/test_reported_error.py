"""Errors that reports and simulations tell against exact ones, computed in NumPy alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exact_errors import bucket_errors, relative_error
from feedback_steps import OneRank
from parcels import parcel
from scheme_cases import schemes

from hvd_adaptive import ALQ, ECDQ, ORQ, QCS, QSGD, TernGrad, simulate
from hvd_adaptive.exchange.parcel import ERROR_BUCKETS

BUCKET = 512
TABLES = schemes(
    *("alq-3", "alq-8", "alq-3-paper", "qsgd-4", "qsgd-2-linf-symmetric", "nuqsgd-5"),
    "terngrad-unclipped",
)


def heavy(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(count, generator=generator)
    return torch.randn(count, generator=generator) * scale.exp()


def fitted(make, v: torch.Tensor, **keywords):
    scheme = make(bucket_size=BUCKET, min_numel=0, **keywords)
    if isinstance(scheme, ALQ):
        scheme.fit(v)
    return scheme


@pytest.mark.many
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("count", [1, 100, BUCKET, 3 * BUCKET + 77])
def test_errors_of_tables_are_exact(name, count):
    v = heavy(count, 1)
    scheme = fitted(TABLES[name], v)
    codec = scheme.parts.default
    nothing, nan = torch.zeros(BUCKET), torch.full((BUCKET,), torch.nan)
    found = codec.payloads.squared_errors(torch.cat([nothing, nan, v]), key=3)
    wanted = bucket_errors(v.numpy(), scheme.levels.numpy(), BUCKET, codec.norm)
    squares = [float(part.double().square().sum()) for part in v.split(BUCKET)]
    assert found.dtype == torch.float64 and found.shape == (2 + len(squares), 2)
    assert found[0].tolist() == [0.0, 0.0] and found[1].isnan().all()
    np.testing.assert_allclose(found[2:, 0].numpy(), wanted, rtol=2e-5, atol=1e-9 * max(squares))
    np.testing.assert_allclose(found[2:, 1].numpy(), squares, rtol=1e-12)
    told = simulate.quantization_error(scheme, torch.cat([nothing, v]))
    order = {"l2": 2, "linf": np.inf}[codec.norm]
    norms = [np.linalg.norm(part.double().numpy(), order) for part in v.split(BUCKET)]
    share = (wanted / np.square(norms)).sum()
    assert told.variance == pytest.approx(wanted.sum(), rel=2e-5, abs=1e-9 * max(squares))
    assert told.normalized == pytest.approx(share, rel=2e-5, abs=1e-9) and told.bias is None
    assert np.isnan(simulate.quantization_error(scheme, torch.cat([v, nan])).variance)


def test_clipping_counts_with_its_squared_bias():
    v, clip = heavy(2 * BUCKET + 50, 2), 1.5
    scheme = TernGrad(bucket_size=BUCKET, clip=clip)
    parts = np.split(v.double().numpy(), [BUCKET, 2 * BUCKET])
    limits = [clip * np.sqrt(np.mean(part**2)) for part in parts]
    cut = [np.clip(part, -most, most) for part, most in zip(parts, limits, strict=True)]
    errors = bucket_errors(np.concatenate(cut), scheme.levels.numpy(), BUCKET, "linf")
    bias = [np.sum((c - part) ** 2) for c, part in zip(cut, parts, strict=True)]
    found = scheme.parts.default.payloads.squared_errors(v, key=0)[:, 0].numpy()
    np.testing.assert_allclose(found, errors + bias, rtol=1e-5)
    told = simulate.quantization_error(scheme, v)
    assert told.variance == pytest.approx(errors.sum(), rel=1e-5)
    np.testing.assert_allclose(told.bias, np.concatenate(cut) - v.double().numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "make", [lambda **k: ECDQ(bits=3.0, **k), QCS, ORQ], ids=["ecdq", "qcs", "orq"]
)
def test_errors_of_other_schemes_are_those_of_a_draw(make):
    """The mean of 200 draws against 200 payloads decoded by hand, within 5 sigma of both."""
    v, scheme = heavy(2 * BUCKET + 100, 4), make(bucket_size=BUCKET)

    def by_hand(seed: int) -> list[float]:
        error = scheme.decode(scheme.encode(v, seed=seed)).double() - v.double()
        return [float(part.square().sum()) for part in error.split(BUCKET)]

    decoded = np.array([by_hand(seed) for seed in range(200)])
    found = np.array(
        [scheme.parts.default.payloads.squared_errors(v, key)[:, 0].tolist() for key in range(200)]
    )
    spread = np.sqrt(decoded.var(axis=0) + found.var(axis=0)) / np.sqrt(200)
    assert (np.abs(decoded.mean(axis=0) - found.mean(axis=0)) <= 5 * spread).all()


def sent(rank: OneRank, gradients) -> list[np.ndarray]:
    """A step's groups as they are quantised."""
    return [
        torch.cat([gradients[p.slot][p.start : p.stop] for p in group.pieces])[
            : group.quantized
        ].numpy()
        for group in rank.layout.groups
    ]


def test_all_of_few_buckets_are_measured_exactly():
    gradients = [heavy(2 * BUCKET + 77, 5), 30 * heavy(BUCKET + 3, 6)]
    rank = OneRank(
        fitted(TABLES["alq-8"], gradients[0]), [2 * BUCKET + 77, BUCKET + 3], fusion=9 * BUCKET
    )
    flats = sent(rank, gradients)
    assert len(flats) == 2
    rank.step(gradients)
    levels, norm = rank.compressor.levels.numpy(), rank.compressor.parts.default.norm
    error = sum(bucket_errors(flat, levels, BUCKET, norm).sum() for flat in flats)
    wanted = error / sum(np.sum(flat.astype(np.float64) ** 2) for flat in flats)
    assert rank.compressor.report()["relative_error"] == pytest.approx(wanted, rel=1e-4)


def test_estimates_are_unbiased_in_every_group():
    """Groups of many and of few buckets, whose energies differ a hundredfold, over 300 steps: 5
    sigma of their scatter."""
    sizes = [40 * BUCKET + 100, 7 * BUCKET, BUCKET // 2]
    gradients = [
        heavy(size, 10 + slot) * torch.linspace(0.1, 10, size) for slot, size in enumerate(sizes)
    ]
    rank = OneRank(fitted(TABLES["alq-3"], gradients[0]), sizes, fusion=40 * BUCKET)
    rank.compressor._training.meter.detailed = True
    flats, levels = sent(rank, gradients), rank.compressor.levels.numpy()
    assert len(flats) > 2
    found = []
    for _ in range(300):
        rank.step(gradients)
        of_groups = map(rank.compressor._training.meter.last_groups.get, range(len(flats)))
        found.append([[own.squared_error, own.squared_norm] for own in of_groups])
    errors = [bucket_errors(flat, levels, BUCKET, "linf").sum() for flat in flats]
    squares = [np.sum(flat.astype(np.float64) ** 2) for flat in flats]
    wanted = np.stack([errors, squares], axis=1)
    spread = np.std(found, axis=0) / np.sqrt(300)
    assert (np.abs(np.mean(found, axis=0) - wanted) <= 5 * spread + 1e-5 * wanted).all()
    # Neither is far from what it estimates on average.
    assert (spread <= 0.1 * wanted).all()


def test_a_bucket_that_is_not_finite_counts_nothing():
    gradient = heavy(BUCKET + 100, 8)
    gradient[BUCKET + 5] = float("inf")
    rank = OneRank(QSGD(bits=4, bucket_size=BUCKET, min_numel=0), [BUCKET + 100])
    rank.step([gradient])
    levels = rank.compressor.levels.numpy()
    wanted = relative_error(gradient[:BUCKET].numpy(), levels, BUCKET)
    assert rank.compressor.report()["relative_error"] == pytest.approx(wanted, rel=1e-4)


def test_measure_takes_buckets_at_equal_distances():
    """Of eight full buckets two that are four apart, whichever comes first."""
    own, taken = QSGD(bits=4, bucket_size=BUCKET).parts.default, []
    flat = torch.arange(8.0).repeat_interleave(BUCKET)

    def squared_errors(sample, key):
        taken.append([int(v) for v in sample.view(-1, BUCKET)[:, 0]])
        return own.payloads.squared_errors(sample, key)

    payloads = SimpleNamespace(squared_errors=squared_errors)
    codec = SimpleNamespace(settings=own.settings, payloads=payloads)
    parcel(codec, flat, flat.numel(), 1.0).measure(flat)
    ((first, second),) = taken
    assert (second - first) % 8 == 8 // ERROR_BUCKETS == 4
