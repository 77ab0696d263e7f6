"""QCS's estimators against the paper by Monte Carlo, within 5 standard errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_cases import constant, hadamard_matrix, ordinary, vector

from hvd_adaptive import QCS
from hvd_adaptive.schemes.qcs import variance_bound

SIZES = (1, 2, 4, 16, 64, 96, 100, 192, 200, 320, 1024)


def sparse(n: int, generator: np.random.Generator) -> np.ndarray:
    """One coordinate in 16, at most one in the smallest."""
    return np.where(np.arange(n) % 16 == 0, generator.standard_normal(n), 0.0)


def single(n: int, generator: np.random.Generator) -> np.ndarray:
    return np.eye(n)[n // 3]


VECTORS = (ordinary, sparse, single, constant)


def projections(n: int) -> list[tuple[int, float]]:
    """Some (k, Q) of a partition of n."""
    wanted = [(1, 0.5), (2, 0.5), (n // 5 + 1, 2), (n // 2 + 1, 0.5), (n, 1), (n, 7)]
    return sorted({(k, q) for k, q in wanted if 1 <= k <= n})


def samples(scheme: QCS, g: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Estimates (count, n) of g and the scales (count,), float64: every bucket is a draw."""
    flat = torch.from_numpy(np.tile(g.astype(np.float32), count))
    payload = scheme.encode(flat, seed=seed)
    scales = payload[96 : 96 + 4 * count].clone().view(torch.float32)
    return scheme.decode(payload).double().numpy().reshape(count, -1), scales.double().numpy()


def assert_mean(values: np.ndarray, expected: np.ndarray | float, slack: float) -> None:
    """Within 5 standard errors and the rounding errors of float32."""
    error = 5 * values.std(axis=0) / math.sqrt(len(values)) + slack
    assert np.all(np.abs(values.mean(axis=0) - expected) <= error)


@pytest.mark.many
@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("n", SIZES)
def test_theorem_two_and_lemma_three(n, kind):
    """P1, unbiased: one projection of the mean error and each coordinate. P2: the squared error is
    n/k - 1 and the dither's noise n ς²/12, and no more than γ. MMSE's: (1 - α)² and α² times
    that, and no more than 1 - α."""
    g = vector(kind, n).double().numpy()
    norm, count = float(g @ g), 1500 if n <= 400 else 800
    signs, slack = np.random.default_rng(1).choice([-1.0, 1.0], n), 1e-6 * math.sqrt(norm)
    for index, (k, q) in enumerate(projections(n)):
        for estimator in ("unbiased", "mmse"):
            scheme = QCS(bucket_size=n, measurements=k, quantizer_range=q, estimator=estimator)
            gamma = scheme.parts.default.gamma
            alpha, most = (1.0, gamma) if estimator == "unbiased" else (1 / (gamma + 1), 0.0)
            estimates, scales = samples(scheme, g, count, 1000 * n + index)
            assert_mean(estimates @ signs, alpha * g @ signs, n * slack)
            deviations = estimates.std(axis=0) * 6 / math.sqrt(count) + slack
            assert np.all(np.abs(estimates.mean(axis=0) - alpha * g) <= deviations)
            squared = np.square(estimates - g).sum(axis=1)
            expected = ((1 - alpha) ** 2 + alpha**2 * (n / k - 1)) * norm
            assert_mean(squared - alpha**2 * n * scales**2 / 12, expected, 1e-5 * norm)
            error = squared.std() / math.sqrt(count)
            assert squared.mean() <= (most or 1 - alpha) * norm + 5 * error + 1e-6 * norm


def test_lemma_one():
    """E TᵀT = I for the first k rows, by all sign patterns; T Tᵀ = n/k I."""
    n, k = 8, 3
    h = hadamard_matrix(n)[:k].astype(np.float64)
    patterns = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    t = h * patterns[:, None, :] / math.sqrt(k)
    np.testing.assert_allclose(np.einsum("pki,pkj->ij", t, t) / 2**n, np.eye(n), atol=1e-12)
    np.testing.assert_allclose(t[5] @ t[5].T, n / k * np.eye(k), atol=1e-12)


def test_equation_ten_bounds_the_largest_measurement():
    """E‖v‖∞² <= (Σ_i E v_i^2p)^(1/p) <= (k (2p - 1)!!)^(1/p) ‖g‖²/k (Khinchine) for every g and p;
    the least over p lies below Eq. 10's 3 log(k)/(k - 1) for all k."""
    k = np.unique([*range(2, 5000), *np.geomspace(5e3, 2**24, 3000).astype(int)])
    least, log_factorial = np.full(k.size, np.inf), 0.0
    for p in range(1, 60):
        log_factorial += math.log(2 * p - 1)
        least = np.minimum(least, np.exp((np.log(k) + log_factorial) / p) / k)
    assert np.all(least < 3 * np.log(k) / (k - 1))


def test_gamma_as_printed_and_as_mended():
    assert variance_bound(384, 100, 3) == pytest.approx(2.84 + 384 / 36 * math.log(100) / 99)
    assert variance_bound(64, 64, 0.5) == pytest.approx(64 * math.log(64) / 63)
    assert variance_bound(64, 1, 2) == pytest.approx(63 + 64 / 48)
    assert variance_bound(1, 1, 0.5) == pytest.approx(1 / 3)


def test_one_measurement_needs_its_dither():
    """k = 1: the error is n - 1 + n/(12 Q²), beyond the printed n - 1."""
    scheme, g = QCS(bucket_size=4, measurements=1, quantizer_range=0.5), np.array([0, 0, 1.0, 0])
    estimates, _ = samples(scheme, g, 20_000, 5)
    squared = np.square(estimates - g).sum(axis=1)
    error = squared.std() / math.sqrt(len(squared))
    assert abs(squared.mean() - (3 + 4 / 3)) < 5 * error and squared.mean() > 3 + 5 * error
