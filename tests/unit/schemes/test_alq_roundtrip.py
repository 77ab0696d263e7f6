"""ALQ.encode and decode: sizes, dtypes, tails, seeds, lengths, inputs of all kinds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from scheme_cases import PAPER

from hvd_adaptive import ALQ, instances

BUCKET = 100
SIZES = (0, 1, BUCKET - 1, BUCKET, BUCKET + 1, 511, 512, 513, 7 * BUCKET + 3)
# Half a unit of each dtype relative to 1, plus float32's own rounding.
PRECISION = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 1e-6, torch.float64: 1e-6}


def gradient(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng([seed, n]).standard_normal(n)
    return torch.from_numpy(values).to(dtype)


def check_neighbours(flat, decoded, compressor: ALQ, bucket: int, quantized: int) -> None:
    """Quantised values lie at one of the levels around them times the bucket's norm; float64."""
    levels = compressor.levels.numpy()
    symmetric, norm = 0.0 not in levels, compressor.parts.default.norm
    magnitudes = levels[levels > 0] if symmetric else levels[levels >= 0]
    for begin in range(0, quantized, bucket):
        part = slice(begin, min(begin + bucket, quantized))
        x, got = flat[part].double().numpy(), decoded[part].double().numpy()
        scale = np.linalg.norm(x, np.inf if norm == "linf" else 2)
        lower, upper = oracle.neighbours(np.abs(x) / scale, magnitudes, symmetric)
        signed = got / scale * np.where(x < 0, -1, 1)
        tolerance = PRECISION[decoded.dtype] * np.maximum(np.abs(signed), 1e-3) + 1e-6
        near = np.minimum(np.abs(signed - lower), np.abs(signed - upper)) <= tolerance
        assert np.all(near | (np.abs(x) >= scale * (1 - 1e-6))), begin


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("tail", ("quantize", "full"))
@pytest.mark.parametrize("form", ({}, PAPER), ids=["default", "paper"])
def test_sizes_and_dtypes(dtype, tail, form):
    for n, bits in itertools.product(SIZES, (2, 3, 5, 8)):
        compressor = ALQ(bits=bits, bucket_size=BUCKET, tail=tail, **form)
        levels = 2**bits - (not form)
        flat = gradient(n, dtype)
        payload = compressor.encode(flat, seed=1)
        assert payload.dtype == torch.uint8 and payload.dim() == 1
        itemsize = torch.empty(0, dtype=dtype).element_size()
        assert payload.numel() == oracle.payload_length(n, levels, BUCKET, tail, itemsize)
        decoded = compressor.decode(payload)
        assert decoded.dtype == dtype and decoded.shape == (n,)
        quantized = n - n % BUCKET if tail == "full" else n
        assert torch.equal(decoded[quantized:], flat[quantized:]), "the tail is exact"
        check_neighbours(flat, decoded, compressor, BUCKET, quantized)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", (True, False))
def test_a_million_and_three(bits, symmetric):
    n = 10**6 + 3
    compressor = ALQ(bits=bits, symmetric=symmetric)
    flat = gradient(n)
    payload = compressor.encode(flat, seed=1)
    assert payload.numel() == oracle.payload_length(n, len(compressor.levels), 8192)
    decoded = compressor.decode(payload)
    check_neighbours(flat, decoded, compressor, 8192, n)


@pytest.mark.parametrize("bucket", (1, 2, 31, 511, 512, 513, 10**6, 2**32 - 1))
def test_bucket_sizes(bucket):
    compressor = ALQ(bits=4, bucket_size=bucket)
    flat = gradient(1500)
    payload = compressor.encode(flat, seed=1)
    assert payload.numel() == oracle.payload_length(1500, 15, bucket)
    check_neighbours(flat, compressor.decode(payload), compressor, bucket, 1500)


def test_the_example_of_the_default_at_three_bits():
    """8192 coordinates: 96 + one scale (4, padded to 8) + codes. 11 of them take 31 bits: in each
    of 16 lanes 47 times 31 bits, 46 words."""
    assert ALQ().encode(gradient(8192)).numel() == 96 + 16 * 46 * 4 + 8
    assert ALQ(symmetric=True).encode(gradient(8192)).numel() == 96 + 8192 * 3 // 8 + 8


def test_same_seed_same_payload_and_other_seeds_differ():
    compressor, flat = ALQ(bits=3), gradient(5000)
    assert torch.equal(compressor.encode(flat, seed=3), compressor.encode(flat, seed=3))
    assert torch.equal(compressor.encode(flat, seed=3), ALQ(bits=3).encode(flat, seed=3))
    bodies = [compressor.encode(flat, seed=s)[96:] for s in (0, 1, 2, 2**32, 2**63, 2**64 - 1)]
    for a, b in itertools.combinations(bodies, 2):
        assert (a != b).double().mean() > 0.2


def test_no_seed_gives_fresh_numbers_that_repeat_with_the_process():
    flat = gradient(5000)
    one, two, other = ALQ(bits=3), ALQ(bits=3), ALQ(bits=3, seed=1)
    first, second = one.encode(flat), one.encode(flat)
    for fresh in (second, two.encode(flat), other.encode(flat)):
        assert (first[96:] != fresh[96:]).double().mean() > 0.2
    instances.start_over()
    again = ALQ(bits=3)
    assert torch.equal(first, again.encode(flat)) and torch.equal(second, again.encode(flat))
    fixed = [one.encode(flat, seed=0)[96:], one.encode(flat, seed=1)[96:]]
    assert all((first[96:] != f).any() for f in fixed[1:])


def test_inputs_are_neither_changed_nor_kept():
    compressor, flat = ALQ(bits=3, bucket_size=BUCKET), gradient(1234)
    before = flat.clone()
    payload = compressor.encode(flat, seed=0)
    copy = payload.clone()
    decoded = compressor.decode(payload)
    assert torch.equal(flat, before) and torch.equal(payload, copy)
    flat.zero_()
    payload.zero_()
    assert torch.equal(decoded, compressor.decode(copy))


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("tail", ("quantize", "full"))
def test_non_contiguous_and_differentiable_inputs(dtype, tail):
    compressor = ALQ(bits=3, bucket_size=BUCKET, tail=tail)
    whole = gradient(2 * 777, dtype)
    want = compressor.encode(whole[::2].clone(), seed=0)
    assert torch.equal(compressor.encode(whole[::2], seed=0), want)
    column = whole.view(777, 2)[:, 0]
    assert torch.equal(compressor.encode(column, seed=0), want)
    tracked = whole[::2].clone().requires_grad_()
    assert torch.equal(compressor.encode(tracked * 1, seed=0), want)
    assert torch.equal(compressor.encode(tracked, seed=0), want)
    assert torch.equal(
        compressor.encode(whole[1:][1::2], seed=0), compressor.encode(whole[2::2], seed=0)
    )
    assert not compressor.decode(want).requires_grad
    expanded = torch.ones(1, dtype=dtype).expand(300)
    assert compressor.decode(compressor.encode(expanded, seed=0)).shape == (300,)


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_a_non_finite_coordinate_makes_its_bucket_nan_and_no_other(dtype, bad):
    for tail in ("quantize", "full"):
        compressor = ALQ(bits=3, bucket_size=BUCKET, tail=tail)
        flat = gradient(5 * BUCKET + 50, dtype)
        clean = compressor.decode(compressor.encode(flat, seed=0))
        flat[2 * BUCKET + 17] = bad
        decoded = compressor.decode(compressor.encode(flat, seed=0))
        spoiled = torch.zeros(flat.numel(), dtype=torch.bool)
        spoiled[2 * BUCKET : 3 * BUCKET] = True
        assert decoded[spoiled].isnan().all()
        assert torch.equal(decoded[~spoiled], clean[~spoiled])


@pytest.mark.parametrize("symmetric", (True, False))
def test_zero_buckets_decode_to_exact_positive_zeros(symmetric):
    compressor = ALQ(bits=3, bucket_size=BUCKET, symmetric=symmetric)
    flat = gradient(3 * BUCKET)
    flat[BUCKET : 2 * BUCKET] = 0
    decoded = compressor.decode(compressor.encode(flat, seed=0))[BUCKET : 2 * BUCKET]
    assert torch.equal(decoded, torch.zeros(BUCKET)) and not decoded.signbit().any()


def test_the_full_tail_carries_anything():
    """NaN, infinities and denormals beyond the last full bucket arrive as they were."""
    for dtype in PRECISION:
        compressor = ALQ(bits=3, bucket_size=BUCKET, tail="full")
        flat = gradient(BUCKET + 7, dtype)
        flat[-5:] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-40, -0.0]).to(dtype)
        tail = compressor.decode(compressor.encode(flat, seed=0))[BUCKET:]
        assert torch.equal(tail.nan_to_num(7.0), flat[BUCKET:].nan_to_num(7.0))
        assert torch.equal(tail.isnan(), flat[BUCKET:].isnan())


def test_global_generators_are_untouched():
    torch.manual_seed(1)
    np.random.seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    compressor, flat = ALQ(bits=3, bucket_size=BUCKET), gradient(5000)
    compressor.decode(compressor.encode(flat))
    compressor.fit(flat)
    compressor.decode(compressor.encode(flat, seed=4))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
