"""The Triton kernels of bare codes and of random integers against the references, bit for bit."""

from __future__ import annotations

import pytest
import torch
from test_cuda_tables import KEY
from triton_interpreter import DEVICE, moved
from unit_oracles import uniform_integers

from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.reference import codes as reference_codes
from hvd_adaptive.kernels.triton import codes as cuda_codes
from hvd_adaptive.kernels.triton import uniforms as cuda_uniforms


@pytest.mark.parametrize("bucket", [7, 1100, 1024])
def test_random_integers(bucket: int):
    got = cuda_uniforms.uniforms(2200, bucket, KEY, DEVICE).cpu().tolist()
    want = [k for b in range(-(-2200 // bucket)) for k in uniform_integers(KEY, b, bucket)]
    assert got == want[:2200]


@pytest.mark.parametrize("alphabet", [2, 3, 8, 200])
def test_bytes_are_packed_and_unpacked(alphabet: int):
    packing = packing_of(alphabet)
    codes = torch.randint(0, alphabet, (1200,), dtype=torch.uint8)
    words = torch.full((packing.words(1200),), 0x555, dtype=torch.int32, device=DEVICE)
    cuda_codes.pack(*moved(codes), packing, words)
    found = torch.empty(1200, dtype=torch.uint8, device=DEVICE)
    cuda_codes.unpack(words, packing, found)
    assert torch.equal(found.cpu(), codes)
    wanted = torch.empty(packing.words(1200), dtype=torch.int32)
    reference_codes.pack(codes, packing, wanted)
    assert torch.equal(words.cpu(), wanted)
