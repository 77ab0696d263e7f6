"""QSGD, NUQSGD and AMQ: their tables, unbiased rounding, payload lengths, errors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scheme_cases import PAPER, schemes
from unit_oracles import neighbours

from hvd_adaptive import ALQ, AMQ, NUQSGD, QSGD, TernGrad

BUCKET = 500
SCHEMES = schemes(
    "qsgd-3",
    "qsgd-8-linf",
    "qsgd-4-linf-symmetric",
    "qsgd-s1-linf",
    "terngrad-unclipped",
    "nuqsgd-3",
    "nuqsgd-8",
    "nuqsgd-5-p0.8-symmetric",
    "amq-3",
    "amq-3-paper",
    "amq-4-symmetric",
    "amq-6-n",
    bucket_size=BUCKET,
) | {"qsgd-s4": partial(QSGD, intervals=4, bucket_size=BUCKET)}


def gradient(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(n).astype(np.float32))


def fitted(name: str):
    scheme = SCHEMES[name]()
    if isinstance(scheme, AMQ):
        scheme.fit(gradient(100 * BUCKET, seed=9))
    return scheme


def test_tables_as_published():
    """Those of QSGD and zero-based NUQSGD are in tests/oracle/test_levels.py."""
    powers = np.array([0.1**3, 0.1**2, 0.1, 1])
    symmetric = NUQSGD(bits=3, multiplier=0.1, symmetric=True).levels
    np.testing.assert_allclose(symmetric, np.concatenate([-powers[::-1], powers]))
    np.testing.assert_allclose(AMQ(bits=2).levels, [-1, 0, 1])
    first = AMQ(bits=3).levels[4:]  # before a fit the multiplier is the one of worst_case.py
    np.testing.assert_allclose(AMQ(bits=3).levels, [*-first.flip(0), 0, *first])
    np.testing.assert_allclose(first, [first[1] ** 2, first[1], 1])


@pytest.mark.many
@pytest.mark.parametrize("name", SCHEMES)
def test_unbiased_with_the_variance_of_equation_one(name):
    """Mean and squared error over many encodings, both within 5 standard errors."""
    scheme, flat, repeats = fitted(name), gradient(2 * BUCKET + 100, seed=3), 600
    exact = flat.double().numpy()
    decoded = np.array(
        [scheme.decode(scheme.encode(flat, seed=s)).double().numpy() for s in range(repeats)]
    )
    order = np.inf if scheme.parts.default.norm == "linf" else 2
    parts = np.split(exact, [BUCKET, 2 * BUCKET])
    scale = np.repeat([np.linalg.norm(part, order) for part in parts], [BUCKET, BUCKET, 100])
    positive = scheme.levels.numpy()[scheme.levels.numpy() > 0]
    zero_based = bool((scheme.levels == 0).any())
    magnitudes = np.concatenate([[0.0], positive]) if zero_based else positive
    r = np.abs(exact) / scale
    lower, upper = neighbours(r, magnitudes, not zero_based)
    below, above = (r - lower) * scale, (upper - r) * scale
    variance = below * above
    # One sum over all coordinates, random signs: a bias anywhere would show.
    signs = np.random.default_rng(1).choice([-1.0, 1.0], exact.size)
    error = ((decoded - exact) @ signs).mean()
    assert abs(error) < 5 * np.sqrt(variance.sum() / repeats) + 1e-6 * scale.sum()
    spread = variance * (above - below) ** 2
    squared = np.square(decoded - exact).sum(axis=1).mean()
    assert abs(squared - variance.sum()) < 5 * np.sqrt(spread.sum() / repeats) + 1e-5 * squared


@pytest.mark.parametrize("construct", [TernGrad, lambda **k: ALQ(bits=3, clip=2.5, **k)])
def test_clipping_is_equation_49_and_unbiased_for_the_clipped_gradient(construct):
    """Mean over encodings within 5 standard errors of sign(v) min(abs(v), 2.5 sigma)."""
    scheme, repeats = construct(bucket_size=BUCKET), 2000
    flat = gradient(2 * BUCKET, seed=4)
    flat[7], flat[BUCKET + 3] = 30.0, -50.0
    parts = flat.double().numpy().reshape(2, BUCKET)
    limit = 2.5 * np.sqrt((parts**2).mean(axis=1, keepdims=True))
    clipped = np.clip(parts, -limit, limit).ravel()
    assert (clipped != parts.ravel()).any()
    decoded = np.array(
        [scheme.decode(scheme.encode(flat, seed=s)).double().numpy() for s in range(repeats)]
    )
    # Sums over coordinates with random signs: a bias anywhere would show.
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (flat.numel(), 20))
    sums = (decoded - clipped) @ signs
    assert np.all(np.abs(sums.mean(axis=0)) < 5 * sums.std(axis=0) / np.sqrt(repeats) + 1e-3)
    if isinstance(scheme, TernGrad):
        assert np.unique(np.abs(decoded)).size <= 3  # 0 and the two buckets' limits


def test_terngrad_is_ternary_and_takes_eight_fifths_of_a_bit():
    flat = gradient(320 * BUCKET)
    for scheme in (TernGrad(bucket_size=BUCKET), TernGrad(bucket_size=BUCKET, clip=None)):
        assert scheme.levels.tolist() == [-1, 0, 1] and scheme.parts.default.norm == "linf"
        size = scheme.encode(flat).numel() - 96 - 4 * 320
        assert size * 8 == 1.6 * flat.numel()


@pytest.mark.parametrize("construct", (TernGrad, ALQ, QSGD))
def test_wrong_clip(construct):
    for clip in (0, -1.0, float("nan"), float("inf"), "2", True):
        with pytest.raises(ValueError, match=r"clip=.*must be a number above 0, or None"):
            construct(clip=clip)


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: QSGD(bits=1), "bits=1: must be an integer from 2 to 8"),
        (lambda: QSGD(intervals=0), "intervals=0: must be an integer from 1 to 127"),
        (lambda: QSGD(bits=3, intervals=3), "intervals=3: cannot be given together"),
        (lambda: QSGD(norm="l1"), "norm='l1'"),
        (lambda: NUQSGD(multiplier=1.0), "multiplier=1.0: must be a number"),
        (lambda: NUQSGD(multiplier=float("nan")), "multiplier=nan"),
        (lambda: NUQSGD(bits=8, multiplier=0.3), "multiplier=0.3"),
        (lambda: AMQ(bits=9), "bits=9"),
        (lambda: AMQ(statistics="none"), "statistics='none'"),
    ],
)
def test_wrong_keywords(construct, message):
    with pytest.raises(ValueError, match=message):
        construct()


@pytest.mark.parametrize(("form", "most"), [({}, 0.48), (PAPER, 0.4)], ids=["default", "paper"])
def test_amq_adapts_and_its_state_survives(form, most):
    scheme = AMQ(bits=3, bucket_size=BUCKET, **form)
    before = scheme.levels[-2]
    scheme.fit(gradient(50 * BUCKET))
    assert before != scheme.levels[-2]
    assert scheme.levels[-2] < most and scheme.parts.default.table_version == 1
    other = AMQ(bits=3, bucket_size=BUCKET, **form)
    other.load_state_dict(scheme.state_dict())
    assert torch.equal(other.levels, scheme.levels) and other.levels[-2] == scheme.levels[-2]
