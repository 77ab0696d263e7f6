"""Random rounding by the documented integers: unbiased, of the variance in Eqs 1, 2, 27, 28 of the
ALQ paper, since the upper level is taken by a share rho of the 2**24 integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unit_oracles as oracle

from hvd_adaptive.kernels.numba import tables as cpu
from hvd_adaptive.kernels.reference import tables as reference
from hvd_adaptive.kernels.tables import kernel_table

N, BUCKET, KEY = 3000, 700, 99
# Magnitudes, and whether they are symmetric: uneven, uniform, of powers.
TABLES = (
    ([0.1, 1.0], True),
    ([0.0048, 0.018, 0.13, 1.0], True),
    ([0.0, 0.05, 0.25, 1.0], False),
    (np.linspace(0, 1, 4), False),
    (np.linspace(1 / 16, 1, 16), True),
    ((np.arange(32) / 31) ** 2, False),
    (np.append(0, 0.9 ** np.arange(30.0, -1, -1)), False),
    (0.9 ** np.arange(31.0, -1, -1), True),
    ((np.arange(1, 129) / 128) ** 1.5, True),
)


def coordinates(magnitudes: np.ndarray, norm: str, scale: float) -> np.ndarray:
    """At levels, between them, between -l1 and l1, zeros, tiny; both signs; each bucket has 1."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, N)
    x[::3] *= np.exp(-10 * generator.uniform(size=N))[::3]
    levels = np.array(magnitudes)[np.linspace(0, len(magnitudes) - 1, 8).astype(int)]
    inner = (magnitudes[0] or magnitudes[1]) * np.array([0.5, -0.5, 0.9, -0.9, 1e-3, 1e-30])
    own = np.concatenate([levels, -levels, inner, [0.0, -0.0]])
    x[1 : 1 + own.size] = own
    if norm == "l2":
        x *= np.where(generator.random(N) < 0.97, 0.02, 0.3)
    x[::BUCKET] = 1
    return (x * scale).astype(np.float32)


@pytest.mark.parametrize("kernels", (cpu, reference), ids=("cpu", "reference"))
@pytest.mark.parametrize("norm", ("l2", "linf"))
@pytest.mark.parametrize("number", range(len(TABLES)))
@pytest.mark.parametrize("scale", (1e-37, 1e-20, 1, 3, 1e37))
def test_codes_follow_from_the_documented_integers(kernels, norm, number, scale):
    """Upper level if and only if (k + 1/2) / 2**24 < rho, in float64, rounding errors aside."""
    magnitudes, symmetric = TABLES[number]
    x = coordinates(magnitudes, norm, scale)
    table = kernel_table(np.array(magnitudes), symmetric)
    scales = torch.empty(-(-N // BUCKET))
    words = torch.empty(oracle.word_count(N, table.alphabet), dtype=torch.int32)
    kernels.encode(torch.from_numpy(x), scales, words, BUCKET, norm, table, KEY)
    out = torch.zeros(N)
    kernels.decode_add([(scales, words)], BUCKET, table, 1.0, out)
    u = np.concatenate([oracle.uniform_integers(KEY, b, BUCKET) for b in range(5)])[:N]
    buckets = np.split(x.astype(np.float64), range(BUCKET, N, BUCKET))
    order = 2 if norm == "l2" else np.inf
    exact = np.concatenate([np.full(b.size, np.linalg.norm(b, order)) for b in buckets])
    r = np.abs(x) / exact
    lower, upper = oracle.neighbours(r, magnitudes, symmetric)
    margin = (r - lower) / (upper - lower) - (u + 0.5) / 2**24
    want = np.where(margin > 0, upper, lower) * np.where(x < 0, -1, 1)
    # r and, on exponential tables, its logarithm are float32 numbers: thresholds err a little.
    clear = np.abs(margin) > 1e-5 + 4e-7 * upper / (upper - lower)
    assert clear.mean() > 0.99
    np.testing.assert_allclose(out.numpy()[clear] / exact[clear], want[clear], atol=1e-6)
