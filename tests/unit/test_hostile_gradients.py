"""What becomes of buckets that are not finite, zero, denormal, huge, constant, or of one outlier.

For every scheme: a bucket with a NaN or Inf comes back as NaN, as a whole; zeros as zeros; all else
finite, unless the bucket's scale overflows float32: then NaN, too. Other buckets never notice.
"""

from __future__ import annotations

import pytest
import torch
from hostile_buckets import (
    BUCKET,
    DENORMAL,
    FINITE,
    HUGE,
    NOT_FINITE,
    SCHEMES,
    WIDE,
    ZEROS,
    make,
    normal,
)
from simulated_steps import take_step

from hvd_adaptive import ECDQ, QSGD, Hierarchical, ScatterReduce, simulate
from hvd_adaptive.coding.payload import read_header

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
KINDS = NOT_FINITE | ZEROS | DENORMAL | HUGE | FINITE
EXCHANGES = {"allgather": "allgather", "scatter_reduce": "scatter_reduce"}
EXCHANGES["nodes of one"] = Hierarchical(ranks_per_node=1)
LOSSY_TWICE = ["alq-3", "qsgd-3", "bingrad", "ecdq-3", "qsgd-3-linf"]
# Sums inside the inverse rotation of the others may exceed float32.
NOT_ROTATED = [label for label in SCHEMES if not label.startswith(("eden", "drive"))]


def decoded(scheme: str, bucket: torch.Tensor) -> torch.Tensor:
    """The bucket between two ordinary ones, which must come back as they do beside another.

    Its zeros are not left out: then other buckets would be cut (unit/codec/test_kept_zeros.py).
    """
    compressor = make(scheme, keep_zeros=False)
    results = []
    for middle in (bucket, normal(1)):
        flat = torch.cat([normal(2), middle, normal(3)])
        results.append(compressor.decode(compressor.encode(flat, seed=5)))
    for neighbour in (slice(0, BUCKET), slice(2 * BUCKET, 3 * BUCKET)):
        assert torch.equal(results[0][neighbour], results[1][neighbour])
    return results[0][BUCKET : 2 * BUCKET]


@every_scheme
def test_non_finite_zero_and_denormal_buckets(scheme):
    """Most schemes take denormal ones for zeros."""
    for name, bucket in NOT_FINITE.items():
        assert decoded(scheme, bucket).isnan().all(), name
    for name, bucket in (ZEROS | DENORMAL).items():
        assert decoded(scheme, bucket).abs().max() <= 2 * bucket.abs().max(), name


@every_scheme
def test_huge_buckets_are_finite_or_nan_as_a_whole(scheme):
    for name, bucket in HUGE.items():
        result = decoded(scheme, bucket)
        if scheme not in NOT_ROTATED:
            assert (result.isnan() | (result.abs() > 0)).all(), name
        elif scheme in WIDE:
            assert result.isfinite().all(), name
            assert (result.double() / bucket.double()).mean() == pytest.approx(1, rel=0.1), name
        else:
            assert result.isnan().all(), name


@every_scheme
def test_all_else_is_finite(scheme):
    """Errors are compared with the scheme's own on an ordinary bucket, coarsely: under an L2 norm a
    constant one is the worst there is, and 1-bit schemes lose all of an outlier but its share."""
    usual = relative_error(scheme, normal(7))
    for name, bucket in FINITE.items():
        assert decoded(scheme, bucket).isfinite().all(), name
        assert relative_error(scheme, bucket) < 4 * usual + 1.0, name


def relative_error(scheme: str, bucket: torch.Tensor) -> float:
    result = decoded(scheme, bucket).double()
    return float((result - bucket).square().sum() / bucket.double().square().sum())


@every_scheme
def test_one_short_bucket_of_one_coordinate(scheme):
    compressor = make(scheme)
    for value in (0.0, 1.0, -3.0, 1e-45, 1e30):
        result = compressor.decode(compressor.encode(torch.tensor([value]), seed=1))
        assert result.isfinite().all() and result.abs().item() <= 4 * abs(value), value
    for value in (float("nan"), float("inf")):
        assert compressor.decode(compressor.encode(torch.tensor([value]), seed=1)).isnan().all()


@pytest.mark.parametrize(
    ("scheme", "exchange"),
    [
        *((scheme, "allgather") for scheme in SCHEMES),
        *((scheme, name) for scheme in LOSSY_TWICE for name in list(EXCHANGES)[1:]),
    ],
)
def test_every_kind_on_one_rank_and_on_all(scheme, exchange):
    """Two buckets of each kind: in the first only the second rank of two has it."""
    everyone = []
    for has in (False, True):
        pairs = [(kind if has else normal(), kind) for kind in KINDS.values()]
        everyone.append([torch.cat([bucket for pair in pairs for bucket in pair])])
    parameter = torch.nn.Parameter(torch.zeros_like(everyone[0][0]))
    ranks = simulate.Ranks([("w", parameter)], make(scheme, exchange=EXCHANGES[exchange]), 2)
    (result,) = take_step(ranks, 0, [parameter], everyone)
    for name, (one, every) in zip(KINDS, result.view(-1, 2, BUCKET), strict=True):
        if name in HUGE and (scheme not in NOT_ROTATED or exchange != "allgather"):
            continue  # sums inside the inverse rotation, or of ranks, may exceed float32
        if name in NOT_FINITE or (name in HUGE and scheme not in WIDE):
            assert one.isnan().all() and every.isnan().all(), name
        elif name == "largest":  # the sum over ranks is beyond float32
            assert one.isfinite().all() and every.isinf().all(), name
        elif name == "constant_1e38":
            assert one.isfinite().all() and not every.isnan().any(), name
        else:
            assert one.isfinite().all() and every.isfinite().all(), name
        if name in ZEROS:
            assert one.any() and not every.any(), name
        if name in DENORMAL:
            assert every.abs().max() < 1e-38, name


COORDINATES = 3 * BUCKET + 100


def payloads_of(scheme, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two ranks', a full-precision section and a zero bucket in each."""
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(2, COORDINATES + 50, generator=generator)
    gradients[:, BUCKET : 2 * BUCKET] = 0
    return [
        scheme.parts.default.payloads.encode(g.to(dtype), COORDINATES, key).bytes
        for key, g in enumerate(gradients)
    ]


@pytest.mark.many
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_old_contents_of_memory_are_overwritten(name, dtype):
    scheme = make(name)
    payloads = payloads_of(scheme, dtype)
    expected = read_header(payloads[0])
    out = torch.full((expected.coordinates,), float("nan"), dtype=dtype)
    scheme.parts.default.payloads.sum_into(
        payloads, expected, 0.5, out[:COORDINATES], out[COORDINATES:]
    )
    bodies = torch.zeros(COORDINATES)
    opened = list(map(scheme.parts.default.payloads.form(expected).open, payloads))
    scheme.parts.default.payloads.add(opened, 0.5, bodies)
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    assert torch.equal(out[:COORDINATES].view(bits), bodies.to(dtype).view(bits))
    full = 0.5 * sum(payload.full for payload in opened)
    assert torch.equal(out[COORDINATES:], full)
    assert torch.equal(scheme.parts.default.payloads.sum_wide(payloads, expected, 0.5), out)


# Numbers of many coordinates near the largest ones of their dtype.
N = 3000


def near(largest: float, kind: str) -> torch.Tensor:
    """float32, within +-largest."""
    u = 2 * torch.rand(N, generator=torch.Generator().manual_seed(0)) - 1
    if kind == "one":
        return torch.zeros(N).index_fill_(0, torch.tensor([7]), largest)
    return largest * (torch.ones(N) if kind == "constant" else u.sign() * (0.9 + 0.1 * u.abs()))


@pytest.mark.many
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_coordinates_near_the_largest_never_become_infinite(scheme, dtype):
    """Float16 stays finite, and so does one such coordinate of a wider dtype. The norms of buckets
    of many may lie beyond float32, and then they are NaN, which no step is made with."""
    codec, is_wide = SCHEMES[scheme](), dtype != torch.float16
    if is_wide and scheme not in NOT_ROTATED:
        return
    for kind in ("one", "constant", "random"):
        flat = near(torch.finfo(dtype).max, kind).to(dtype)
        got = codec.decode(codec.encode(flat, seed=1))
        assert got.isfinite().all() or (is_wide and kind != "one" and got.isnan().all()), kind


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
    for build in (lambda **k: QSGD(bits=6, **k), lambda **k: ECDQ(relative_variance=0.5, **k)):
        codec = build(min_numel=20, bucket_size=256, **keywords)
        parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (N, 5)]
        ranks = simulate.Ranks(zip("wb", parameters, strict=True), codec, 4)
        own = near(largest, "constant").to(dtype), torch.full((5,), largest).to(dtype)
        weights, biases = take_step(ranks, 0, parameters, [[g.clone() for g in own]] * 4)
        assert weights.isfinite().all() and float(weights.float().mean()) > 0.5 * largest
        assert torch.equal(biases, own[1])
        if "warmup_steps" in keywords:
            assert torch.equal(weights, own[0])
