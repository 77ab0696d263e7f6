"""EDEN and DRIVE: error, unbiasedness, averages over ranks, keywords."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_adaptive import DRIVE, EDEN
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.schemes.eden import FRACTIONS

# P(|z| > 5) = 5.7e-7 for one normal number. Tests below look at fewer than 200.
SIGMAS = 5


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def sparse(size: int, *values: float) -> torch.Tensor:
    """A bucket whose nonzero coordinates are spread evenly."""
    out = torch.zeros(size)
    out[:: size // len(values)][: len(values)] = torch.tensor(values)
    return out


BUCKETS = {
    "one-hot": (1.0,),
    "two-hot": (1.0, 0.4),
    "equal two": (1.0, 1.0),
    "three": (1.0, -0.5, 0.25),
    "32-sparse": tuple(1.5 ** -(i % 8) for i in range(32)),
}


def laws(size: int) -> dict[str, torch.Tensor]:
    own = {label: sparse(size, *values) for label, values in BUCKETS.items()}
    return own | {"constant": torch.full((size,), 0.3), "cubes": normal(size) ** 3}


def draws(x: torch.Tensor, bits: float, count: int) -> torch.Tensor:
    """``count`` estimates of one bucket: each is a bucket of its own, with its own signs."""
    codec = EDEN(bits=bits, bucket_size=x.numel()).parts.default
    return codec.payloads.roundtrip(x.repeat(count), key=11).view(count, -1)


@pytest.mark.many
@pytest.mark.parametrize("bits", (*FRACTIONS, *range(1, 9)))
@pytest.mark.parametrize("law", laws(64))
def test_relative_error(law, bits):
    """At most 3 % above D/(1 - D), one bit at most 0.58, whatever the gradient is."""
    x = laws(4096)[law]
    errors = (draws(x, bits, 16 if bits >= 1 else 400) - x).square().sum(dim=1) / x.square().sum()
    expected = EDEN(bits=bits).parts.default.expected_error
    assert errors.mean() <= 1.03 * expected
    assert bits != 1 or errors.mean() <= 0.58


@pytest.mark.many
@pytest.mark.parametrize("law", laws(64))
@pytest.mark.parametrize("bits", (0.125, 0.5, 1, 2, 3))
def test_unbiased(law, bits):
    """The mean error, along each nonzero coordinate and along x, is 0 within 5 standard errors.

    One rotation fails: of (a, b, 0, ...) with |a| > |b|, one bit keeps the first coordinate alone.
    """
    x, count = laws(1024)[law], 1500
    error = draws(x, bits, count) - x
    along = torch.cat([error[:, x != 0][:, :16], (error @ x).unsqueeze(1)], dim=1).double()
    # S makes <estimate, x> = ||x||² but for rounding.
    assert along[:, -1].abs().max() <= 1e-5 * x.square().sum()
    mean, deviation = along.mean(dim=0), along.std(dim=0)
    rounding = 1e-6 * x.norm()
    assert (mean.abs() <= SIGMAS * deviation / math.sqrt(count) + rounding).all()


@pytest.mark.parametrize("bits", (0.25, 1))
@pytest.mark.parametrize("law", ["normal", "two-hot", "constant"])
def test_errors_of_ranks_average_out_for_equal_gradients(law, bits):
    """The average of N payloads has 1/N of the error, with one shared rotation."""
    x = (laws(4096) | {"normal": normal(4096)})[law].repeat(4)[:15_000]
    codec, ranks = EDEN(bits=bits).parts.default, 64
    bodies = [codec._body(x, key=stream_key(0, rank)) for rank in range(ranks)]
    out = torch.empty_like(x)
    keys = [stream_key(0, rank) for rank in range(ranks)]
    codec.decode_bodies(bodies, keys, 1 / ranks, out, add=False)
    error = ((out - x).square().sum() / x.square().sum()).item()
    # Of 15,000 coordinates: the relative deviation of a sum of squares is sqrt(2/15000) = 1.2 %.
    assert error == pytest.approx(codec.expected_error / ranks, rel=0.06)


def test_bodies_of_other_rotations_are_added_too():
    """Compressors with other seeds have other shared rotations; a body names its own."""
    x = normal(3000)
    codecs = [EDEN(bits=8, seed=seed).parts.default for seed in (1, 2, 2, 1)]
    bodies = [codec._body(x, key) for key, codec in enumerate(codecs)]
    assert not torch.equal(bodies[0][:8], bodies[1][:8])
    out = torch.empty_like(x)
    codecs[0].decode_bodies(bodies, range(4), 0.25, out, add=False)
    assert (out - x).square().sum() <= 1e-4 * x.square().sum()


@pytest.mark.many
@pytest.mark.parametrize("bits", (0.125, 0.5, 1, 2, 3))
@pytest.mark.parametrize("law", ("head", "tail", "two-hot"))
@pytest.mark.parametrize("count", (129, 2100, 4000))
def test_partial_buckets_are_unbiased(count, law, bits):
    """The bias is at most 2 % of ||x||, and the error that of whole buckets, wherever energy is.

    The product of two independent means of the error has the mean ||bias||². Means of so many draws
    give it a standard error of 0.00004 ||x||²: a bias of 2.5 % is 5 of them above what passes.
    """
    x = sparse(count, 1.0, 0.4) if law == "two-hot" else normal(count) + 0.5
    if law != "two-hot":
        x[slice(count // 2, None) if law == "head" else slice(count // 2)] *= 0.1
    codec = EDEN(bits=bits).parts.default
    length = -(-count // 64) * 64
    coded = codec._levels.kept(length) / length  # at least ``bits``, since it is rounded up
    expected = (1 + codec.expected_error) * codec._levels.share / coded - 1
    half = max(32, math.ceil(expected / count**0.5 / 0.00004))
    means, squares = torch.zeros(2, count, dtype=torch.float64), 0.0
    for key in range(2 * half):
        error = codec.payloads.roundtrip(x, key) - x
        means[key % 2] += error / half
        squares += error.square().sum().item() / (2 * half)
    assert means[0] @ means[1] <= 0.02**2 * x.square().sum()
    assert squares <= 1.03 * expected * x.square().sum()


def test_scale_is_equivariant():
    """Gradients times a power of two decode to the same times that power."""
    x = normal(300)
    codec = EDEN(bits=3, bucket_size=256).parts.default
    once = codec.payloads.roundtrip(x, key=1)
    for power in (-100, -20, 90):
        assert torch.equal(codec.payloads.roundtrip(x * 2.0**power, key=1), once * 2.0**power)


def test_drive_is_eden_with_one_bit():
    x = normal(500)
    drive, eden = DRIVE(), EDEN(bits=1)
    assert torch.equal(drive.encode(x, seed=4), eden.encode(x, seed=4))
    drive.set(bucket_size=512)
    assert drive.parts.default.bits == 1
    eden = EDEN(bits=1, parameter_bits={"*.bias": 4})
    assert (eden.parts.default.bits, eden.parts["bits=4"].bits) == (1, 4)
