"""The variance of quantised and of minibatch gradients, against other ways to compute it.

monitor/test_reported_error.py has the error of each table.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from simulated_steps import take_step

from hvd_adaptive import QSGD, TernGrad, simulate

SIZE, BUCKET = 1000, 128


def gradient(seed: int = 0) -> torch.Tensor:
    """Heavy tails, some exact zeros."""
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) ** 3
    values[::17] = 0
    return values


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
    nothing = simulate.QuantizationError(0.0, 0.0)
    assert simulate.quantization_error(scheme, flat[:0]) == nothing


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
