"""ALQ's and AMQ's fits, levels and statistics: what is used, left out, refused; tables."""

from __future__ import annotations

import functools

import pytest
import torch
from exact_errors import relative_error
from kernel_cases import ordinary, vector
from scheme_cases import PAPER

from hvd_adaptive import ALQ, AMQ, ECDQ, QSGD

BUCKET = 256


gradient = functools.partial(vector, ordinary)
FITS = [
    {"statistics": statistics, "normalized": normalized, "solver": solver}
    for statistics in ("histogram", "normal")
    for normalized in (False, True)
    for solver in ("coordinate_descent", "gradient_descent")
]


@pytest.mark.many
@pytest.mark.parametrize("bits", (2, 3, 6))
@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("norm", ("l2", "linf"))
def test_levels_after_fit(bits, symmetric, norm):
    """Ascending float64 in [-1, 1], symmetric, of the right number; never worse than before."""
    flat = gradient(40 * BUCKET)
    for fit in FITS:
        compressor = ALQ(bits=bits, symmetric=symmetric, norm=norm, bucket_size=BUCKET, **fit)
        before = compressor.levels
        compressor.fit(flat)
        levels = compressor.levels
        assert levels.dtype == torch.float64 and levels.dim() == 1
        assert levels.numel() == (1 << bits) - (0 if symmetric else 1)
        assert bool((levels.diff() > 0).all()) and levels[0] == -1 and levels[-1] == 1
        assert torch.equal(levels, -levels.flip(0))
        assert compressor.report()["table_version"] == 1
        was, now = (relative_error(flat.numpy(), t, BUCKET, norm) for t in (before, levels))
        assert now <= was * 1.02, (fit, was, now)


def test_a_tensor_and_a_list_of_its_parts_give_the_same_table():
    flat = gradient(10 * BUCKET + 17)
    whole, parts, shaped, doubled = (ALQ(bits=3, bucket_size=BUCKET) for _ in range(4))
    whole.fit(flat)
    parts.fit([flat[:100].clone(), flat[100:1000].view(30, 30), flat[1000:]])
    shaped.fit((flat.view(1, -1, 1),))
    doubled.fit(flat.double())
    for other in (parts, shaped, doubled):
        assert torch.equal(whole.levels, other.levels)


def test_the_partial_bucket_is_fitted_to_unless_it_travels_in_full_precision():
    flat = gradient(4 * BUCKET)
    tail = torch.full((BUCKET - 1,), 1e6)
    one, two, full = (
        ALQ(bits=3, norm="l2", bucket_size=BUCKET, tail=tail)
        for tail in ("quantize", "quantize", "full")
    )
    one.fit(flat)
    two.fit([flat, tail])
    full.fit([flat, tail])
    assert torch.equal(one.levels, full.levels) and not torch.equal(one.levels, two.levels)
    # All but a millionth of the squared norm lies at one place, to which a level goes.
    nearest = (two.levels - (BUCKET - 1) ** -0.5).abs().min()
    assert nearest < 0.01 * (BUCKET - 1) ** -0.5
    short = ALQ(bits=3, bucket_size=BUCKET, tail="full")
    short.fit(flat[:50])
    assert short.report()["table_version"] == 1


@pytest.mark.parametrize("statistics", ("histogram", "normal"))
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), 0.0, 1e38))
def test_non_finite_zero_and_overflowing_buckets_are_ignored(bad, statistics):
    flat = gradient(10 * BUCKET)
    spoiled = torch.full((BUCKET,), bad)
    norm = "l2" if bad == 1e38 else "linf"  # the sum of its squares overflows
    one, two = (ALQ(bits=3, norm=norm, bucket_size=BUCKET, statistics=statistics) for _ in range(2))
    one.fit(flat)
    two.fit([flat[: 5 * BUCKET], spoiled, flat[5 * BUCKET :], spoiled])
    torch.testing.assert_close(one.levels, two.levels, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "compressor",
    [ALQ(bits=3, bucket_size=BUCKET), QSGD(coding="huffman"), ECDQ(bits=2)],
    ids=["alq", "qsgd", "ecdq"],
)
def test_nothing_to_fit_is_a_value_error_and_keeps_the_table(compressor):
    codec = compressor.parts.default
    before = codec.table_fingerprint
    zeros, infinite = torch.zeros(BUCKET), torch.full((BUCKET,), float("inf"))
    for nothing in (
        zeros,
        infinite * 0,
        torch.empty(0),
        [],
        torch.zeros(3),
        [zeros, infinite],
        "0",
    ):
        with pytest.raises(ValueError, match="gradients"):
            compressor.fit(nothing)
        assert (codec.table_fingerprint, codec.table_version) == (before, 0)


def test_levels_are_a_copy():
    compressor = ALQ(bits=3)
    before = compressor.levels.clone()
    compressor.levels.zero_()
    assert torch.equal(compressor.levels, before)


def test_weights_are_the_squared_norms_unless_normalized():
    """A bucket 1,000 times larger decides alone; with normalized=True it does not."""
    wide, peaked = gradient(20 * BUCKET), gradient(20 * BUCKET, 1) ** 7
    alone, mixed, normalized = (
        ALQ(bits=3, norm="l2", bucket_size=BUCKET, normalized=n) for n in (False, False, True)
    )
    alone.fit(wide)
    unit = peaked / peaked.norm() * wide.norm()
    mixed.fit([wide * 1000, unit])
    normalized.fit([wide * 1000, unit])
    torch.testing.assert_close(mixed.levels, alone.levels, rtol=1e-2, atol=1e-4)
    assert not torch.allclose(normalized.levels, alone.levels, rtol=1e-2, atol=1e-4)


def test_fit_does_not_change_or_track_the_gradients():
    flat = gradient(4 * BUCKET).requires_grad_()
    before = flat.detach().clone()
    compressor = ALQ(bits=3, bucket_size=BUCKET)
    compressor.fit(flat * 1)
    assert torch.equal(flat.detach(), before) and not compressor.levels.requires_grad


@pytest.mark.parametrize(("form", "most"), [({}, 0.48), (PAPER, 0.4)], ids=["default", "paper"])
def test_amq_adapts(form, most):
    scheme = AMQ(bits=3, bucket_size=500, **form)
    before = scheme.levels[-2]
    scheme.fit(gradient(50 * 500))
    assert before != scheme.levels[-2] < most and scheme.parts.default.table_version == 1
