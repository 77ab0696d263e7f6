"""Stochastic rounding: unbiased, of the variance in Eqs 1, 2, 27, 28 of the ALQ paper.

A bucket is encoded many times with different keys; how often each coordinate takes its upper level
is binomial with probability rho(r) = (r - lower) / (upper - lower), computed here in float64.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from unit_oracles import neighbours, signed_levels, word_count

from hvd_adaptive.kernels.numba import tables as cpu
from hvd_adaptive.kernels.tables import kernel_table

REPEATS = 10_000
# The probability that a normal number lies beyond 5 sigma.
FIVE_SIGMA = 5.7e-7
# Float32 arithmetic moves rho by a few units of 2**-24 where gaps are not tiny.
SLACK = 2e-6

TABLES = {
    (2, True): [0.1, 1.0],
    (3, True): [0.0048, 0.018, 0.13, 1.0],
    (3, False): [0.0, 0.05, 0.25, 1.0],
    (5, True): list(np.linspace(1 / 16, 1, 16)),
    (6, False): list((np.arange(32) / 31) ** 2),
    (8, True): list((np.arange(1, 129) / 128) ** 1.5),
}
CASES = list(itertools.product(TABLES, ("l2", "linf")))


def bucket(magnitudes: list[float], norm: str) -> np.ndarray:
    """48 coordinates: levels, points between them, between -l1 and l1, zeros, tiny; both signs."""
    generator = np.random.default_rng(9)
    levels = np.array(magnitudes)[np.linspace(0, len(magnitudes) - 1, 8).astype(int)]
    first = magnitudes[0] or magnitudes[1]
    inner = first * np.array([0.5, -0.5, 0.9, -0.9, 1e-3, 1e-30])
    x = np.concatenate([levels, -levels, inner, [0.0, -0.0], generator.uniform(-1, 1, 24)])
    if norm == "linf":
        return x.astype(np.float32)
    # Coordinates lie at levels only if the norm is exactly one: a last one makes up for the rest.
    x[np.abs(x) > 0.2] *= 0.1
    x = (x * 0.9 / np.linalg.norm(x)).astype(np.float32) if np.linalg.norm(x) > 0.9 else x
    return np.append(x, np.sqrt(1 - np.sum(x.astype(np.float64) ** 2))).astype(np.float32)


@functools.cache
def experiment(bits: int, symmetric: bool, norm: str, scale: float = 3.0):
    """x (float64), norms of the format's scale, and REPEATS decodings of x."""
    magnitudes = TABLES[bits, symmetric]
    x = bucket(magnitudes, norm) * np.float32(scale)
    flat = torch.from_numpy(np.tile(x, REPEATS))
    table = kernel_table(np.array(magnitudes), symmetric)
    scales = torch.empty(REPEATS)
    words = torch.empty(word_count(flat.numel(), table.alphabet), dtype=torch.int32)
    cpu.encode(flat, scales, words, x.size, norm, table, key=2024 * bits + symmetric)
    out = torch.zeros(flat.numel())
    cpu.decode_add([(scales, words)], x.size, table, 1.0, out)
    x64 = x.astype(np.float64)
    exact = np.abs(x64).max() if norm == "linf" else np.linalg.norm(x64)
    return x64, exact, out.numpy().reshape(REPEATS, x.size)


def around(x: np.ndarray, exact: float, table: tuple[int, bool]):
    """r of coordinates, and the levels below and above."""
    r = np.abs(x) / exact
    return r, *neighbours(r, TABLES[table], table[1])


@pytest.mark.parametrize(("table", "norm"), CASES)
def test_values_and_probabilities_are_those_of_unbiased_rounding(table, norm):
    x, exact, decoded = experiment(*table, norm)
    r, lower, upper = around(x, exact, table)
    sign = np.where(x < 0, -1, 1)
    near_lower = np.abs(decoded - sign * lower * exact) <= 1e-6 * exact
    near_upper = np.abs(decoded - sign * upper * exact) <= 1e-6 * exact
    # At a level, rounding errors in r may take the level itself for either end of the interval;
    # the far end must then be (nearly) impossible, as its probability says.
    at_level = np.isclose(r, upper, rtol=1e-6)
    assert np.all((near_lower | near_upper)[:, ~at_level])
    values = np.unique(decoded).astype(np.float64) / exact
    assert np.abs(values[:, None] - signed_levels(TABLES[table], table[1])).min(1).max() <= 1e-6
    rho = (r - lower) / (upper - lower)
    taken = np.sum(decoded * sign > (lower + upper) / 2 * exact, axis=0)
    slack = SLACK + 2e-7 * upper / (upper - lower)
    low, high = np.clip(rho - slack, 0, 1), np.clip(rho + slack, 0, 1)
    assert np.all(stats.binom.sf(taken - 1, REPEATS, high) > FIVE_SIGMA / 2), taken
    assert np.all(stats.binom.cdf(taken, REPEATS, low) > FIVE_SIGMA / 2), taken


@pytest.mark.parametrize(("table", "norm"), CASES)
def test_variance_of_equations_1_and_2(table, norm):
    """Mean of ||Q(v) - v||**2 against ||v||**2 * sum (l_up - r)(r - l_low), at 5 sigma."""
    x, exact, decoded = experiment(*table, norm)
    r, lower, upper = around(x, exact, table)
    want = exact**2 * np.sum((upper - r) * (r - lower))
    errors = np.sum((decoded - x) ** 2, axis=1)
    assert abs(errors.mean() - want) <= 5 * errors.std() / np.sqrt(REPEATS) + 1e-5 * want


@pytest.mark.parametrize("scale", (1e-37, 1e-20, 1e20, 1e37))
def test_unbiased_at_any_magnitude(scale):
    x, exact, decoded = experiment(3, True, "linf", scale)
    r, lower, upper = around(x, exact, (3, True))
    sigma = np.sqrt(np.maximum((upper - r) * (r - lower), 0) / REPEATS)
    error = np.abs((decoded.astype(np.float64) / exact).mean(axis=0) - x / exact)
    assert np.all(error <= 5 * sigma + (upper - lower) / REPEATS + 1e-6)
