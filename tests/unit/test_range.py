"""Finite gradients near the largest numbers of their dtype decode to finite ones."""

from __future__ import annotations

import pytest
import torch
from hostile_buckets import SCHEMES
from simulated_steps import take_step

from hvd_adaptive import ECDQ, QSGD, Hierarchical, ScatterReduce, simulate

N = 3000
# Sums inside the inverse rotation of the others may exceed float32.
NOT_ROTATED = [label for label in SCHEMES if not label.startswith(("eden", "drive"))]


def near(largest: float, kind: str) -> torch.Tensor:
    """float32, within +-largest."""
    u = 2 * torch.rand(N, generator=torch.Generator().manual_seed(0)) - 1
    if kind == "one":
        return torch.zeros(N).index_fill_(0, torch.tensor([7]), largest)
    return largest * (torch.ones(N) if kind == "constant" else u.sign() * (0.9 + 0.1 * u.abs()))


@pytest.mark.many
@pytest.mark.parametrize("kind", ("constant", "random", "one"))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_float16_stays_finite(scheme, kind):
    flat = near(65504.0, kind).to(torch.float16)
    codec = SCHEMES[scheme]()
    for seed in range(3):
        assert codec.decode(codec.encode(flat, seed=seed)).isfinite().all()


@pytest.mark.many
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("scheme", NOT_ROTATED)
def test_wide_dtypes_never_become_infinite(scheme, dtype):
    """One such coordinate decodes to a finite one. The norms of buckets of many may lie beyond
    float32, and then they are NaN, which no step is made with."""
    largest, codec = torch.finfo(dtype).max, SCHEMES[scheme]()
    one = codec.decode(codec.encode(near(largest, "one").to(dtype), seed=1))
    assert one.isfinite().all()
    for kind in ("constant", "random"):
        flat = near(largest, kind).to(dtype)
        decoded = codec.decode(codec.encode(flat, seed=1))
        assert not decoded.isinf().any()
        assert decoded.isfinite().all() or decoded.isnan().all()


def test_clamping_brings_values_nearer_and_leaves_the_others():
    """Against the payload's values in float32: none changes but those outside of float16."""
    flat = near(60000.0, "random").to(torch.float16)
    codec = ECDQ(relative_variance=2)
    payload = codec.encode(flat, seed=1)
    got = codec.decode(payload)
    as_float32 = codec.decode(codec.encode(flat.float(), seed=1))
    outside = as_float32.abs() > 65504
    assert outside.sum() > N // 4
    assert torch.equal(got[~outside], as_float32[~outside].to(torch.float16))
    assert torch.equal(got[outside], (as_float32[outside].sign() * 65504).to(torch.float16))
    exact = flat.double()
    assert ((got.double() - exact).abs() <= (as_float32.double() - exact).abs() + 16).all()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize(
    "keywords",
    (
        {},
        {"exchange": ScatterReduce(second_stage_bits=4)},
        {"exchange": ScatterReduce(second_stage_bits=32)},
        {"exchange": Hierarchical(ranks_per_node=2, second_stage_bits=4)},
        {"warmup_steps": 1},
    ),
    ids=repr,
)
def test_averages_over_ranks_stay_finite(keywords, dtype):
    """Four ranks near the largest number: their sum is far outside, the average is not."""
    largest = 65504.0 if dtype == torch.float16 else 1e38 / 64
    for make in (lambda **k: QSGD(bits=6, **k), lambda **k: ECDQ(relative_variance=0.5, **k)):
        codec = make(min_numel=20, bucket_size=256, **keywords)
        parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (N, 5)]
        ranks = simulate.Ranks(zip("wb", parameters, strict=True), codec, 4)
        own = near(largest, "constant").to(dtype), torch.full((5,), largest).to(dtype)
        weights, biases = take_step(ranks, 0, parameters, [[g.clone() for g in own]] * 4)
        assert weights.isfinite().all() and float(weights.float().mean()) > 0.5 * largest
        assert torch.equal(biases, own[1])
        if "warmup_steps" in keywords:
            assert torch.equal(weights, own[0])
