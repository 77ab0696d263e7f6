"""Residuals of real quantisers in long runs, against Lemma 4 of the QCS paper."""

from __future__ import annotations

import math

import pytest
import torch
from feedback_steps import OneRank

from hvd_adaptive import QCS, QSGD, ResidualError
from hvd_adaptive.theory import (
    best_feedback,
    qcs_variance_bound,
    qsgd_variance_bound,
    residual_bound,
)

D, BUCKETS, STEPS = 64, 40, 400


def squared_residuals(compressor, steps: int = STEPS, mean: float = 0.0) -> torch.Tensor:
    """||r||² of every bucket after each step, (steps, BUCKETS), for Gaussian gradients with
    E||g||² = 1 in each bucket, which know nothing of the quantiser."""
    rank = OneRank(compressor, [D * BUCKETS])
    generator = torch.Generator().manual_seed(0)
    norms = []
    for _ in range(steps):
        noise = torch.randn(D * BUCKETS, generator=generator)
        rank.step([(mean + math.sqrt(1 - mean**2) * noise) / math.sqrt(D)])
        norms.append(rank.residuals()["a"].double().view(BUCKETS, D).square().sum(1))
    return torch.stack(norms)


def assert_within(norms: torch.Tensor, bound: float, at_least: float) -> None:
    """Each step's mean is below the bound at 5 sigma, the long-run mean not far below it."""
    deviation = norms.std(1) / math.sqrt(BUCKETS)
    assert bool((norms.mean(1) < bound + 5 * deviation).all())
    late = float(norms[len(norms) // 4 :].mean())
    assert at_least * bound < late < bound, late / bound


def qcs(weight: float, estimator: str = "unbiased", k: int = 16) -> QCS:
    return QCS(
        bucket_size=D, measurements=k, quantizer_range=2, estimator=estimator, error_feedback=weight
    )


@pytest.mark.parametrize(("factor", "mean"), ((0.3, 0.0), (1.0, 0.9), (1.5, 0.0)))
def test_unbiased_qcs_stays_within_eq_15(factor, mean):
    """A mean of its own makes the gradient no more correlated with the residual."""
    gamma = qcs_variance_bound(D, 16, 2)
    weight = factor * best_feedback(gamma, correlated=False)[0]
    bound = residual_bound(gamma, weight, correlated=False)
    assert_within(squared_residuals(qcs(weight), mean=mean), bound, 0.4)


@pytest.mark.parametrize("weight", (0.3, 1.0))
def test_mmse_qcs_stays_within_eq_16(weight):
    gamma = qcs_variance_bound(D, 16, 2)
    bound = residual_bound(gamma, weight, "mmse", correlated=False)
    assert_within(squared_residuals(qcs(weight, "mmse")), bound, 0.4)
    # A steady gradient is what Eq. 16 is for: its residual exceeds the uncorrelated bound.
    norms = squared_residuals(qcs(weight, "mmse"), mean=0.99)
    assert_within(norms, residual_bound(gamma, weight, "mmse"), 0.2)
    assert float(norms[-100:].mean()) > 1.2 * bound


@pytest.mark.parametrize("factor", (0.5, 1.0))
def test_coarse_qsgd_stays_within_eq_15(factor):
    gamma = qsgd_variance_bound(1, D)  # levels -1, 0, 1
    weight = factor * best_feedback(gamma, correlated=False)[0]
    compressor = QSGD(bits=2, bucket_size=D, error_feedback=weight)
    bound = residual_bound(gamma, weight, correlated=False)
    assert_within(squared_residuals(compressor), bound, 0.2)


DIVERGING = {
    "qsgd": lambda weight: QSGD(bits=2, bucket_size=D, error_feedback=weight),
    "qcs": lambda weight: qcs(weight),
}


@pytest.mark.parametrize("scheme", DIVERGING)
def test_classical_feedback_diverges_where_the_error_exceeds_1(scheme, caplog):
    """The same quantiser with β* keeps its residuals. Instead of growing, they raise an error."""
    gamma = {"qsgd": qsgd_variance_bound(1, D), "qcs": qcs_variance_bound(D, 16, 2)}[scheme]
    best = best_feedback(gamma, correlated=False)[0]
    kept = squared_residuals(DIVERGING[scheme](best), 40)
    assert not caplog.messages
    assert float(kept[-1].mean()) < residual_bound(gamma, best, correlated=False)
    with pytest.raises(ResidualError, match="at rank 0; the measured relative error"):
        squared_residuals(DIVERGING[scheme](1.0), 40)
    assert ["residuals grow without bound" in m for m in caplog.messages] == [True]


def test_classical_feedback_of_mmse_and_of_fine_tables_does_not(caplog):
    """Measured errors are below 1: 1 - α of Lemma 3, and 0.03 of four bits under L-infinity."""
    mmse = squared_residuals(qcs(1.0, "mmse"), 100)
    fine = squared_residuals(QSGD(bits=4, norm="linf", bucket_size=D, error_feedback=1.0), 100)
    assert float(mmse[-1].mean()) < 2 * float(mmse[20:60].mean())
    assert float(fine[-1].mean()) < 2 * float(fine[20:60].mean()) < 0.2
    assert not caplog.messages
