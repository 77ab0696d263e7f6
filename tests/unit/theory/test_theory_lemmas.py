"""Statements of the papers that no function of the package stands for: each by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from theory_oracles import quantize

from hvd_adaptive.theory import nuqsgd_variance_bound, qsgd_variance_bound


@pytest.mark.parametrize(("p", "q"), [(0.3, 0.8), (0.5, 2), (1, 2), (1, 3), (2, 4), (0.9, 50)])
def test_alq_lemma_1(p, q):
    """||v||_q <= ||v||_p <= d^(1/p - 1/q) ||v||_q, reached by a single coordinate and by equal
    ones."""
    rng = np.random.default_rng(int(10 * p + q))

    def norm(v, order):
        return (np.abs(v) ** order).sum() ** (1 / order)

    for d in (1, 2, 7, 100):
        most = d ** (1 / p - 1 / q)
        for v in (rng.standard_normal(d), rng.standard_t(2, d), rng.random(d) < 0.5):
            assert norm(v, q) <= norm(v, p) * (1 + 1e-12) <= most * norm(v, q) * (1 + 2e-12)
        assert norm(np.eye(d)[0], p) == pytest.approx(norm(np.eye(d)[0], q))
        assert norm(np.ones(d), p) == pytest.approx(most * norm(np.ones(d), q))


@pytest.mark.parametrize("bits", range(3, 9))
def test_nuqsgd_figure_2(bits):
    """At equal bits NUQSGD's bound on the variance is below QSGD's in all dimensions from 10^4 on,
    and from 10^6 on below half of it, at 3 bits three quarters."""
    intervals = 2 ** (bits - 1) - 1
    for dimension in (10**4, 10**5, 10**6, 10**7, 10**8):
        ours = nuqsgd_variance_bound(intervals - 1, dimension)
        theirs = qsgd_variance_bound(intervals, dimension)
        assert ours < theirs
        if dimension >= 10**6:
            assert ours < theirs * (0.76 if bits == 3 else 0.5)


def test_orq_proposition_1():
    """Eq. 6, E f(x') - f(x) <= (L γ²/2 - γ) ||∇f||² + L γ²/2 (E||Q(G) - G||² + σ²): on a quadratic
    of curvature L an equality, so of unbiased quantisers that of least error descends most."""
    rng = np.random.default_rng(0)
    x, curvature, rate, sigma = rng.standard_normal(6), 1.5, 0.3, 0.4
    gradient = curvature * x
    runs = 200_000
    noisy = gradient + sigma / math.sqrt(6) * rng.choice([-1.0, 1.0], (runs, 6))
    found = {}
    for name, table in (("coarse", [0.0, 1.0]), ("fine", [0.0, 0.25, 0.5, 1.0])):
        sent = quantize(rng, noisy[:, None], np.array(table))[1][:, 0]
        error = np.square(sent - noisy).sum(axis=1)
        step = curvature / 2 * (np.square(x - rate * sent).sum(axis=1) - x @ x)
        bound = (curvature * rate**2 / 2 - rate) * (gradient @ gradient)
        bound += curvature * rate**2 / 2 * (error + sigma**2)
        gap = step - bound
        assert abs(gap.mean()) <= 5 * gap.std(ddof=1) / math.sqrt(runs)
        found[name] = error.mean(), step.mean()
    assert found["fine"][0] < found["coarse"][0] and found["fine"][1] < found["coarse"][1]


def test_orq_corollary_1_1():
    """The least and greatest coordinates are levels of an optimal table: the best table on a grid
    wider than the coordinates ends at them."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        v = np.sort(rng.integers(-4, 5, 12)).astype(float)
        grid = np.arange(-7.0, 8.0)
        best = math.inf
        for levels in itertools.combinations(grid, 4):
            if levels[0] <= v[0] and v[-1] <= levels[-1]:
                above = np.clip(np.searchsorted(levels, v), 1, 3)
                low, high = np.take(levels, above - 1), np.take(levels, above)
                error = float(((v - low) * (high - v)).sum())
                if error < best - 1e-12:
                    best, ends = error, (levels[0], levels[-1])
        assert ends == (v[0], v[-1]) or best == 0
