"""Residuals of real quantisers in long runs, against Lemma 4 of the QCS paper."""

from __future__ import annotations

import math
from functools import partial

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
SCHEMES = {
    "qsgd": partial(QSGD, bits=2, bucket_size=D),  # levels -1, 0, 1
    "qcs": partial(QCS, bucket_size=D, measurements=16, quantizer_range=2),
    "mmse": partial(QCS, bucket_size=D, measurements=16, quantizer_range=2, estimator="mmse"),
}
GAMMA = {"qsgd": qsgd_variance_bound(1, D), "qcs": qcs_variance_bound(D, 16, 2)}
GAMMA["mmse"] = GAMMA["qcs"]


def best(scheme: str) -> float:
    return best_feedback(GAMMA[scheme], correlated=False)[0]


def bound_of(scheme: str, weight: float, correlated: bool = False) -> float:
    estimator = "mmse" if scheme == "mmse" else "unbiased"
    return residual_bound(GAMMA[scheme], weight, estimator, correlated=correlated)


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


@pytest.mark.parametrize(
    ("scheme", "weight", "mean", "at_least"),
    [
        ("qcs", 0.3 * best("qcs"), 0.0, 0.4),
        ("qcs", best("qcs"), 0.9, 0.4),  # no more correlated with the residual
        ("qcs", 1.5 * best("qcs"), 0.0, 0.4),
        ("qsgd", 0.5 * best("qsgd"), 0.0, 0.2),
        ("qsgd", best("qsgd"), 0.0, 0.2),
        ("mmse", 0.3, 0.0, 0.4),
        ("mmse", 1.0, 0.0, 0.4),
    ],
)
def test_eq_15(scheme, weight, mean, at_least):
    norms = squared_residuals(SCHEMES[scheme](error_feedback=weight), mean=mean)
    assert_within(norms, bound_of(scheme, weight), at_least)


@pytest.mark.parametrize("weight", (0.3, 1.0))
def test_eq_16_is_for_steady_gradients(weight):
    """Their residual exceeds the uncorrelated bound."""
    norms = squared_residuals(SCHEMES["mmse"](error_feedback=weight), mean=0.99)
    assert_within(norms, bound_of("mmse", weight, correlated=True), 0.2)
    assert float(norms[-100:].mean()) > 1.2 * bound_of("mmse", weight)


@pytest.mark.parametrize("scheme", ("qsgd", "qcs"))
def test_classical_feedback_diverges_where_the_error_exceeds_1(scheme, caplog):
    """The same quantiser with β* keeps its residuals. Instead of growing, they raise an error."""
    kept = squared_residuals(SCHEMES[scheme](error_feedback=best(scheme)), 40)
    assert not caplog.messages
    assert float(kept[-1].mean()) < bound_of(scheme, best(scheme))
    with pytest.raises(ResidualError, match="at rank 0; the measured relative error"):
        squared_residuals(SCHEMES[scheme](error_feedback=1.0), 40)
    assert ["residuals grow without bound" in m for m in caplog.messages] == [True]


def test_classical_feedback_of_mmse_and_of_fine_tables_does_not(caplog):
    """Measured errors are below 1: 1 - α of Lemma 3, and 0.03 of four bits under L-infinity."""
    mmse = squared_residuals(SCHEMES["mmse"](error_feedback=1.0), 100)
    fine = squared_residuals(QSGD(bits=4, norm="linf", bucket_size=D, error_feedback=1.0), 100)
    assert float(mmse[-1].mean()) < 2 * float(mmse[20:60].mean())
    assert float(fine[-1].mean()) < 2 * float(fine[20:60].mean()) < 0.2
    assert not caplog.messages


@pytest.mark.parametrize("scheme", ("qsgd", "qcs"))
def test_adapted_weights_stay_within_eq_17(scheme):
    compressor, gamma = SCHEMES[scheme](error_feedback="auto"), GAMMA[scheme]
    assert_within(squared_residuals(compressor), gamma * (1 + gamma), 0.2)
    assert 0.9 * best(scheme) < compressor._training.residuals.weights.of("") < 1


def test_adapted_feedback_of_a_contraction():
    """QCS's MMSE estimate has ρ = γ/(1 + γ): its bound at β = 1/(1 + ρ) is at most a third above
    that at β = 1."""
    compressor, gamma = SCHEMES["mmse"](error_feedback="auto"), GAMMA["mmse"]
    norms = squared_residuals(compressor)
    beta = compressor._training.residuals.weights.of("")
    assert beta == pytest.approx(1 / (1 + gamma / (1 + gamma)), rel=0.1)
    assert bound_of("mmse", beta) < 4 / 3 * bound_of("mmse", 1.0)
    assert_within(norms, bound_of("mmse", beta), 0.4)
