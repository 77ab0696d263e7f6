"""ALQ.encode and decode: seeds, lengths, inputs of all kinds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hvd_adaptive import ALQ, instances

BUCKET = 100


def gradient(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng([seed, n]).standard_normal(n)
    return torch.from_numpy(values).to(dtype)


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


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
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
