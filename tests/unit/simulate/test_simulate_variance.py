"""The variance of quantised and of minibatch gradients, against other ways to compute it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact_errors import bucket_errors
from scheme_cases import schemes
from simulated_steps import take_step

from hvd_adaptive import ALQ, QSGD, TernGrad, simulate

SIZE, BUCKET = 1000, 128
SCHEMES = schemes("alq-3", "alq-3-paper", "qsgd-s5", "qsgd-2-linf-symmetric", bucket_size=BUCKET)


def gradient(seed: int = 0) -> torch.Tensor:
    """Heavy tails, some exact zeros."""
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) ** 3
    values[::17] = 0
    return values


@pytest.mark.parametrize("name", SCHEMES)
def test_equals_equation_one_bucket_by_bucket(name):
    scheme, flat = SCHEMES[name](), gradient(1)[: 7 * BUCKET]
    codec, order = scheme.parts.default, {"linf": np.inf, "l2": 2}[scheme.parts.default.norm]
    expected = bucket_errors(flat.numpy(), scheme.levels.numpy(), BUCKET, codec.norm)
    norms = np.linalg.norm(flat.double().numpy().reshape(7, BUCKET), order, axis=1)
    told = simulate.quantization_error(scheme, flat)
    # The scale that travels is float32.
    assert told.variance == pytest.approx(expected.sum(), rel=1e-5)
    assert told.normalized == pytest.approx((expected / norms**2).sum(), rel=1e-5)
    assert told.bias is None


def test_clipping_is_a_bias_and_less_variance():
    flat = gradient(2)[: 2 * BUCKET]
    scheme = TernGrad(bucket_size=BUCKET, clip=1.5)
    clipped = simulate.quantization_error(scheme, flat)
    plain = simulate.quantization_error(TernGrad(bucket_size=BUCKET, clip=None), flat)
    assert plain.bias is None and clipped.variance < 0.7 * plain.variance
    buckets = flat.double().view(2, BUCKET)
    most = 1.5 * buckets.square().mean(dim=1, keepdim=True).sqrt()
    cut = torch.minimum(torch.maximum(buckets, -most), most)
    torch.testing.assert_close(clipped.bias, (cut - buckets).view(-1), rtol=1e-5, atol=1e-6)
    errors = bucket_errors(cut.view(-1).numpy(), scheme.levels.numpy(), BUCKET, "linf")
    assert clipped.variance == pytest.approx(errors.sum(), rel=1e-5)


def test_schemes_without_a_table_are_drawn():
    """Any codec will do: here one that hides its table."""

    class Hidden:
        def __init__(self, scheme):
            self.settings, self.payloads = scheme.settings, scheme.parts.default.payloads

    scheme, flat = QSGD(bits=4, bucket_size=BUCKET, norm="linf"), gradient()
    exact = simulate.quantization_error(scheme, flat)
    drawn = simulate.quantization_error(Hidden(scheme), flat)
    assert drawn.variance == pytest.approx(exact.variance, rel=0.3)
    assert np.isnan(drawn.normalized) and drawn.bias is None


def test_zero_and_non_finite_buckets():
    scheme = ALQ(bits=3, bucket_size=10)
    flat = torch.zeros(30)
    assert simulate.quantization_error(scheme, flat) == simulate.QuantizationError(0.0, 0.0)
    assert simulate.quantization_error(scheme, flat[:0]) == simulate.QuantizationError(0.0, 0.0)
    flat[:10] = torch.arange(10.0)
    alone = simulate.quantization_error(scheme, flat[:10])
    assert simulate.quantization_error(scheme, flat) == alone
    assert alone.variance > 0
    flat[25] = float("inf")
    assert np.isnan(simulate.quantization_error(scheme, flat).variance)


def test_scatter_is_the_unbiased_variance_over_ranks():
    flats = [torch.randn(5, 30), torch.randn(5, 7) * 3]
    everything = torch.cat(flats, dim=1).double().numpy()
    told = simulate.scatter(flats, 30)
    assert told.variance == pytest.approx(everything.var(axis=0, ddof=1).mean(), rel=1e-6)
    units = [
        f.double().numpy() / np.linalg.norm(f.double().numpy(), axis=1, keepdims=True)
        for f in flats
    ]
    expected = np.concatenate(units, axis=1).var(axis=0, ddof=1).mean()
    assert told.normalized == pytest.approx(expected, rel=1e-6)
    assert np.isnan(simulate.scatter([flats[0][:1]], 30).variance)


def test_estimator_variance_of_ranks():
    """(minibatch + excess) / M + squared bias, from gradients known by heart."""
    scheme, flats = TernGrad(bucket_size=BUCKET, min_numel=0), list(map(gradient, range(3)))
    ranks = simulate.Ranks([("w", torch.nn.Parameter(torch.zeros(SIZE)))], scheme, 3)
    (average,) = take_step(ranks, 0, ranks.parameters, [[flat] for flat in flats])
    errors = [simulate.quantization_error(scheme, flat) for flat in flats]
    told = ranks.variance(0)
    excess = sum(error.variance for error in errors) / 3 / SIZE
    bias = float((sum(error.bias for error in errors) / 3).square().sum()) / SIZE
    minibatch = float(torch.stack(flats).double().var(dim=0).mean())
    assert told.excess == pytest.approx(excess, rel=1e-9)
    assert told.squared_bias == pytest.approx(bias, rel=1e-9)
    assert told.minibatch == pytest.approx(minibatch, rel=1e-5)
    assert told.estimator == pytest.approx((minibatch + excess) / 3 + bias, rel=1e-5)
    exact = sum(flats) / 3
    error = float((average - exact).square().sum() / exact.square().sum())
    assert ranks.relative_error == pytest.approx(error, rel=1e-4)
