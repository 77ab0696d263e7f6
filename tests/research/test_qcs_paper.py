"""qcs_paper.py: a tiny run from end to end, and the numbers its figures rest on."""

from __future__ import annotations

import itertools
import math
import shlex

import pytest
import torch
from pages import command_of, look_up, made, verdicts_of
from script_runs import run

from hvd_adaptive import SparseSGD
from hvd_adaptive.schemes.qcs import variance_bound
from hvd_adaptive.simulate import Records

pytest.importorskip("mlxtend")
pytest.importorskip("sklearn")
from qcs_gain import (
    GAIN,
    ORDER,
    REGRESSION,
    body_gain,
    qsgd_gain,
    sparse_density,
    ternary_bucket,
    ternary_entropy,
    ternary_gain,
    told_gain,
)
from qcs_regression import CONVERGED, RATES, Paths, losses, widest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(330)]

FIGURES = {"qcs_regression", "qcs_variance", "qcs_error", "qcs_workers", "qcs_convergence"}
# Each alphabet that the package does not compile at set-up costs seconds here: so one gain.
FLAGS = shlex.split("--workers 1 --repeats 2 --regression-steps 20 --gains 21 --intervals 1")


@pytest.mark.thorough
def test_end_to_end_and_resumed(tmp_path, monkeypatch):
    command = [*command_of("qcs"), "--seeds", "1", "--steps", "2", *FLAGS]
    words = verdicts_of(made(tmp_path, command, FIGURES))
    # Two regressions and one seed decide nothing; a claim on bounds is computed.
    assert len(words) == 22 and [word for word, how in words if how == "computed"] == ["Holds"]
    assert sum(word == "Not decided" for word, _ in words) == 21
    # One gain is no range to interpolate in.
    look_up(tmp_path / "docs", monkeypatch, "qcs.md", left_out="Sparse SGD")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.csv")}
    # 10 regressions, Fig. 3's, a trajectory, 3 methods of 2 models with 1 and 4 workers, and Adam.
    assert len(stamps) == 10 + 1 + 1 + 12 + 3
    run(command, tmp_path, 300)
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}


@pytest.mark.parametrize("bucket", [2, 8, 40])
def test_ternary_entropy_is_that_of_drawn_symbols(bucket):
    draw = torch.Generator().manual_seed(bucket)
    v = torch.randn(200_000, bucket, generator=draw, dtype=torch.float64)
    p = float((v.abs() / v.norm(dim=1, keepdim=True)).mean())
    entropy = -sum(q * math.log2(q) for q in (p / 2, p / 2, 1 - p))
    assert ternary_entropy(bucket) == pytest.approx(entropy, rel=2e-3)


def test_ternary_bucket_by_brute_force():
    size = ternary_bucket(21, 3200)
    assert 3200 % size == 0 and ternary_gain(size) >= 21
    assert all(ternary_gain(d) < 21 for d in range(2, size) if 3200 % d == 0)


def test_fixed_length_gain_counts_codes_and_scale():
    for bucket, s in itertools.product((5, 64, 512), (1, 2, 7)):
        words = 2 * s + 1
        assert qsgd_gain(bucket, s) == pytest.approx(
            32 * bucket / (32 + math.log2(words**bucket)), rel=1e-12
        )
    # Codes of three levels never reach 21, whatever the bucket.
    assert qsgd_gain(10**9, 1) < 21


def test_sparse_density_is_the_largest_that_reaches_the_gain():
    density = sparse_density(21, 64)
    flat = torch.randn(64_000, generator=torch.Generator().manual_seed(1))
    assert body_gain(SparseSGD(density=density, bucket_size=64), flat) >= 21
    assert body_gain(SparseSGD(density=density + 0.001, bucket_size=64), flat) < 21


def test_baseline_regression_follows_the_exact_mean():
    """E of E_{t+1} is E_t (I - μR): with a tiny rate the loss is the noiseless descent's."""
    *_, last = losses(None, 8, 10)
    values = torch.linspace(1, 4, 64, dtype=torch.float64)
    exact = float((values * (1 - RATES[0] * values) ** 20).sum() / values.sum())
    assert float(last[0].mean()) == pytest.approx(exact, rel=0.05)


def test_eq_11_by_brute_force():
    """The paper's account leaves the scale out: QSGD's three levels have gain 32 / log2(3)."""
    qsgd, qcs = REGRESSION["QSGD, Eq. 11"](), REGRESSION["QCS, Eq. 11"]()
    assert told_gain("QSGD, Eq. 11", qsgd) == pytest.approx(32 / math.log2(3))
    bits = 32 * ORDER / GAIN
    wanted = min(
        variance_bound(ORDER, k, q)
        for k in range(1, ORDER + 1)
        for q in (0.5, *range(1, 128))
        if k * math.log2(2 * q + 1) <= bits
    )
    assert (
        qcs.parts.default.gamma == pytest.approx(wanted) and told_gain("QCS, Eq. 11", qcs) >= GAIN
    )


def test_paths_of_runs_by_hand():
    """Each run's first step below the threshold, and its widest step size, at every rate below."""
    paths, low, high = Paths(3, 2), CONVERGED / 2, 1.0
    ratios = torch.full((3, len(RATES), 3), high)
    ratios[1:, :4, 0] = low  # at four rates from step 1 on
    ratios[2, [0, 2], 1] = low  # not at the second rate
    ratios[0, 0, 2] = low  # and then no more
    for step, ratio in enumerate(ratios):
        paths.follow(step, ratio)
    assert paths.limits() == [RATES[3], RATES[0], 0.0]
    assert paths.first[0].tolist() == [1, 2, 0] and paths.first[1].tolist() == [1, 3, 3]


def test_widest_stops_at_the_first_rate_that_fails():
    shares = {0.01: 1.0, 0.02: 0.5, 0.03: 0.4, 0.04: 1.0}
    rows = [{"rate": r, "step": 9, "converged": c} for r, c in shares.items()]
    assert widest(Records({}, rows)) == 0.02
