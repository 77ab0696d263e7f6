"""The Triton kernels of QCS and of ECDQ's quantiser against the references, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import heavy, ordinary, same_bits, vector
from test_cuda_tables import KEY, hostile
from triton_interpreter import DEVICE, moved
from unit_oracles import uniform_integers

from hvd_adaptive.kernels import hadamard
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.qcs import Run
from hvd_adaptive.kernels.reference import codes as reference_codes
from hvd_adaptive.kernels.reference import ecdq as reference_ecdq
from hvd_adaptive.kernels.reference import qcs as reference_qcs
from hvd_adaptive.kernels.triton import codes as cuda_codes
from hvd_adaptive.kernels.triton import ecdq as cuda_ecdq
from hvd_adaptive.kernels.triton import qcs as cuda_qcs
from hvd_adaptive.kernels.triton import uniforms as cuda_uniforms


def runs_of(n: int, order: int, rows: int, weight: float = 1.0) -> list[Run]:
    """Whole buckets, then a partial one."""
    count, rest = divmod(n, order)
    runs = [Run(0, count * order, 0, order, rows, weight)] if count else []
    if rest:
        short = hadamard.smallest_order(rest)
        runs.append(Run(count * order, n, count, short, -(-rows * short // order), weight))
    return runs


@pytest.mark.parametrize(
    ("order", "rows", "alphabet", "n"),
    [
        (64, 64, 3, 700),
        (64, 5, 2, 650),
        (1, 1, 5, 9),
        (8192, 3000, 9, 8192 + 130),
        (96, 50, 4, 500),
        (512, 512, 255, 512),
    ],
)
def test_qcs(order: int, rows: int, alphabet: int, n: int):
    flat = vector(heavy, n)
    if n == 700:
        flat[3], flat[64:128], flat[200:206] = float("nan"), 0.0, 3e38
    runs = runs_of(n, order, rows, 0.7)
    found = []
    for module, x in ((reference_qcs, flat), (cuda_qcs, *moved(flat))):
        scales = x.new_full((sum(run.buckets for run in runs),), -1.0)
        count = packing_of(alphabet).words(sum(run.codes for run in runs))
        words = torch.full((count,), 0x555, dtype=torch.int32, device=x.device)
        with np.errstate(all="ignore"):
            module.encode(x, scales, words, runs, alphabet, KEY)
            out = torch.linspace(-1, 1, n).to(x.device)
            pairs = [(scales, words), (scales, words)]
            module.decode_add(pairs, [KEY, KEY + 1], runs, alphabet, 0.3, out)
        found.append([part.cpu() for part in (scales, words, out)])
    want, got = found
    assert same_bits(want[0], got[0])
    assert torch.equal(want[1], got[1])
    assert same_bits(want[2], got[2])


@pytest.mark.parametrize("bucket", [100, 1500, 2048])
def test_ecdq_quantiser(bucket: int):
    """Short buckets, long ones, whole tiles."""
    flat = hostile(bucket) if bucket == 100 else vector(ordinary, 5000)
    (there,) = moved(flat)
    for delta in (1.0, 1e-6):
        with np.errstate(all="ignore"):
            want = reference_ecdq.bucket_steps(flat, bucket, delta)
            got = cuda_ecdq.bucket_steps(there, bucket, delta)
            assert same_bits(want, got.cpu())
            q = reference_ecdq.quantize(flat, want, bucket, KEY)
            assert torch.equal(q, cuda_ecdq.quantize(there, got, bucket, KEY).cpu())
        sums = torch.linspace(-1, 1, flat.numel()), torch.linspace(-1, 1, flat.numel()).to(DEVICE)
        reference_ecdq.add(q, want, bucket, KEY, sums[0])
        cuda_ecdq.add(*moved(q), got, bucket, KEY, sums[1])
        assert same_bits(sums[0], sums[1].cpu())


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


def test_short_qcs_payloads_are_refused():
    scales, words = moved(torch.ones(1), torch.zeros(10, dtype=torch.int32))
    with pytest.raises(ValueError, match="1 scales and 10 words is too short"):
        cuda_qcs.decode_add([(scales, words)], [1], runs_of(128, 64, 64), 3, 1.0, scales)
