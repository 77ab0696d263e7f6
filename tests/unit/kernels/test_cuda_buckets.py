"""The Triton kernels of ORQ and of random integers against the references, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import heavy, same_bits, vector
from test_cuda_tables import KEY
from triton_interpreter import DEVICE, moved
from unit_oracles import uniform_integers, word_count

from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.reference import bucket as reference_bucket
from hvd_adaptive.kernels.triton import bucket as cuda_bucket
from hvd_adaptive.kernels.triton import uniforms as cuda_uniforms


def levels_of(flat: torch.Tensor, bucket: int, alphabet: int) -> torch.Tensor:
    """Evenly spaced between the bucket's extremes; some rows of zeros, NaN, and tiny numbers."""
    rows = [torch.linspace(float(b.min()), float(b.max()), alphabet) for b in flat.split(bucket)]
    levels = torch.stack(rows)
    levels[1::5], levels[2::5] = 0.0, float("nan")
    levels[3::5] *= 1e-38
    return levels


def words_of(n: int, alphabet: int, device: torch.device) -> torch.Tensor:
    return torch.full((word_count(n, alphabet),), 0x555, dtype=torch.int32, device=device)


@pytest.mark.many
@pytest.mark.parametrize(
    ("alphabet", "n", "bucket"),
    [(2, 700, 60), (3, 400, 100), (5, 1000, 600), (4, 1100, 512), (16, 600, 512), (31, 60, 40)],
)
def test_rounding_and_decoding(alphabet: int, n: int, bucket: int):
    flat = vector(heavy, n)
    levels = levels_of(flat, bucket, alphabet)
    flat[0], flat[1], flat[2] = float("inf"), -float("inf"), float("nan")
    there = moved(flat, levels)
    want, got = words_of(n, alphabet, flat.device), words_of(n, alphabet, DEVICE)
    reference_bucket.round_codes(flat, levels, want, bucket, KEY)
    with np.errstate(all="ignore"):
        cuda_bucket.round_codes(*there, got, bucket, KEY)
    assert torch.equal(want, got.cpu())

    sums = flat.clone(), there[0].clone()
    reference_bucket.decode_add([(levels, want), (-levels, want)] * 2, bucket, 0.3, sums[0])
    cuda_bucket.decode_add([(there[1], got), (-there[1], got)] * 2, bucket, 0.3, sums[1])
    assert same_bits(sums[0], sums[1].cpu())


def test_codes_that_no_encoder_makes_are_nan():
    """Six levels take three bits or share a unit; seven of eight codes are known."""
    alphabet = next(a for a in range(5, 256) if packing_of(a).digits == 1 and a & (a - 1))
    words = torch.full((packing_of(alphabet).words(512),), -1, dtype=torch.int32)
    levels, out = torch.zeros(1, alphabet), torch.zeros(512)
    (on,) = moved(out)
    reference_bucket.decode_add([(levels, words)], 512, 1.0, out)
    cuda_bucket.decode_add([tuple(moved(levels, words))], 512, 1.0, on)
    assert out.isnan().all()
    assert on.isnan().all()


def test_short_payloads_are_refused():
    levels, words = moved(torch.ones(1, 2), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="1 buckets and 4 words is too short"):
        cuda_bucket.decode_add([(levels, words)], 100, 1.0, torch.zeros(200, device=DEVICE))


@pytest.mark.parametrize("bucket", [7, 1100, 1024])
def test_random_integers(bucket: int):
    got = cuda_uniforms.uniforms(2200, bucket, KEY, DEVICE).cpu().tolist()
    want = [k for b in range(-(-2200 // bucket)) for k in uniform_integers(KEY, b, bucket)]
    assert got == want[:2200]
