"""ECDQ's error: unbiased, of variance Δ²/12 in every coordinate. kernels/test_ecdq_kernels.py has
the integers it follows from, kernels/test_random_numbers.py that these are independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import constant, heavy, one_outlier, ordinary, vector

from hvd_adaptive import ECDQ

BUCKET, REPEATS = 400, 200


def sparse(n: int, generator: np.random.Generator) -> np.ndarray:
    return generator.standard_normal(n) * (generator.random(n) < 0.03)


def two_values(n: int, generator: np.random.Generator) -> np.ndarray:
    """At and between the thresholds of δ = 1."""
    return np.where(np.arange(n) % 4 < 2, 1.0, -0.5)


KINDS = (sparse, constant, two_values, heavy, ordinary, one_outlier)


def errors(kind, variance: float) -> np.ndarray:
    """Of many encodings, in steps, float64 (repeats, n)."""
    flat = vector(kind, 2 * BUCKET + 150)
    scheme = ECDQ(relative_variance=variance, bucket_size=BUCKET)
    exact = flat.double().numpy()
    decoded = [scheme.decode(scheme.encode(flat, seed=s)).double() for s in range(REPEATS)]
    buckets = np.split(exact, [BUCKET, 2 * BUCKET])
    step = np.concatenate(
        [np.full(b.size, np.sqrt(12 * variance * np.square(b).mean())) for b in buckets]
    )
    return (np.array([d.numpy() for d in decoded]) - exact) / step


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("variance", (0.02, 1 / 12, 1.5))
def test_every_coordinate_is_unbiased_with_variance_one_twelfth(kind, variance):
    """Five standard errors of the mean, of the sum of squares, and of the fourth moment: those of
    the uniform law on (-1/2, 1/2), 1/12 and 1/80, whatever the vector."""
    error = errors(kind, variance)
    # float32 rounds large coordinates: at most 2**-24 of 1e9 or so times the others.
    assert np.abs(error).max() <= 0.5 + 2e-5
    per_coordinate = error.mean(axis=0) * np.sqrt(12 * REPEATS)
    assert np.abs(per_coordinate).max() < 5.5
    assert abs(np.square(per_coordinate).mean() - 1) < 5 * np.sqrt(2 / error.shape[1])
    assert abs(error.mean()) < 5 / np.sqrt(12 * error.size)
    squares, fourth = np.square(error), error**4
    assert abs(squares.mean() - 1 / 12) < 5 * np.sqrt((1 / 80 - 1 / 144) / error.size)
    assert abs(fourth.mean() - 1 / 80) < 5 * np.sqrt((1 / 2304 - 1 / 6400) / error.size)


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("bits", (2.0, 8.0))
@pytest.mark.parametrize("sign", (1, -1))
def test_a_coordinate_next_to_the_largest_float32_stays_finite(bits, sign):
    """That one where half a step leads beyond it."""
    scheme = ECDQ(bits=bits, bucket_size=64)
    flat = torch.linspace(-1e30, 1e30, 128)
    flat[5] = sign * LARGEST
    # A bucket's root mean square is an eighth of its one huge value here.
    decoded = torch.stack([scheme.decode(scheme.encode(flat, seed=seed)) for seed in range(30)])
    huge, others = sign * decoded[:, 5], decoded[:, torch.arange(128) != 5]
    assert others.isfinite().all() and not decoded.isnan().any()
    assert others.abs().max() < LARGEST / 2 and huge.min() > LARGEST / 2
    assert huge.isfinite().all() and 0 < (huge == LARGEST).sum() < 30
