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

from hvd_adaptive.coding.payload import read_header

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


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
def test_non_finite_buckets_are_nan_as_a_whole(scheme):
    for name, bucket in NOT_FINITE.items():
        assert decoded(scheme, bucket).isnan().all(), name


@every_scheme
def test_zeros_are_zeros(scheme):
    for name, bucket in ZEROS.items():
        assert not decoded(scheme, bucket).any(), name


@every_scheme
def test_denormal_buckets_are_nearly_zero(scheme):
    """Most schemes take them for zeros."""
    for name, bucket in DENORMAL.items():
        assert decoded(scheme, bucket).abs().max() <= 2 * bucket.abs().max(), name


@every_scheme
def test_huge_buckets_are_finite_or_nan_as_a_whole(scheme):
    for name, bucket in HUGE.items():
        result = decoded(scheme, bucket)
        if scheme.startswith(("eden", "drive")):
            # Sums inside the inverse rotation may exceed float32.
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
