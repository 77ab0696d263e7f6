"""Bodies of random sparsification by the Triton kernels: the CPU's byte for byte; what the CPU
refuses they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import (
    denormal,
    heavy,
    one_outlier,
    vector,
    with_infinity,
    with_nan,
    zeros,
)
from triton_interpreter import DEVICE, moved

from hvd_adaptive import SparseSGD
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.kernels.triton import sparse as cuda_sparse_bodies

KEY = (1 << 63) + 5


def body_of(scheme: SparseSGD, flat: torch.Tensor) -> torch.Tensor:
    """By the CPU."""
    body = torch.empty(scheme.codec.body_bytes(flat.numel()), dtype=torch.uint8)
    return body[: scheme.codec.encode_body(flat, body, KEY)]


def check(flat: torch.Tensor, bucket: int, density: float) -> None:
    scheme, n = SparseSGD(density=density, bucket_size=bucket), flat.numel()
    wanted, k = body_of(scheme, flat), scheme.codec._rice
    room = torch.full((scheme.codec.body_bytes(n),), 7, dtype=torch.uint8, device=DEVICE)
    bucket = min(bucket, n)
    with np.errstate(all="ignore"):
        used = cuda_sparse_bodies.encode_body(*moved(flat), bucket, density, k, KEY, room)
    assert torch.equal(room[:used].cpu(), wanted)
    padded = torch.cat([wanted, wanted.new_zeros(-wanted.numel() % 8)])
    sums = torch.linspace(-1, 1, n), torch.linspace(-1, 1, n).to(DEVICE)
    scheme.codec.add_bodies([padded, padded], [KEY, KEY], 1.0, sums[0])
    told = cuda_sparse_bodies.flags_of(moved(padded, padded), bucket, k, sums[1])
    assert told.get().tolist() == [0, 0]
    assert torch.equal(sums[0].isnan(), sums[1].cpu().isnan())
    assert torch.equal(sums[0].nan_to_num(), sums[1].cpu().nan_to_num())


def test_hostile_buckets():
    """Long runs of zeros make gaps that pass tiles."""
    kinds = (heavy, zeros, with_nan, denormal, one_outlier, with_infinity)
    check(
        torch.cat([vector(kind, 60) for kind in kinds] + [torch.zeros(2500), vector(heavy, 70)]),
        60,
        0.05,
    )


@pytest.mark.parametrize(
    ("n", "bucket", "density"), [(1, 1, 0.5), (70, 8192, 1.0), (1500, 1024, 0.1), (40, 3, 1e-4)]
)
def test_sizes_and_densities(n: int, bucket: int, density: float):
    check(vector(heavy, n), bucket, density)


def test_a_threshold_that_rounding_makes_rise_is_the_last():
    """Below 1 lies more than 1, while all of it rounds to 2: it would rise and fall for ever."""
    check(torch.tensor([1.0, 0.5, 0.5, 2.0**-52]), 4, 0.5)


def test_nothing_is_kept():
    check(torch.zeros(50), 16, 0.1)


def spoiled(body: torch.Tensor, head: int, seed: int) -> torch.Tensor:
    """A bit or byte of another value, other words, or another number of exact values."""
    rng = np.random.default_rng(seed)
    bad = torch.cat([body, body.new_zeros(-body.numel() % 8)])
    ways = seed % 4
    if ways == 0:
        bad[int(rng.integers(head, body.numel()))] ^= 1 << int(rng.integers(0, 8))
    elif ways == 1:
        bad[head:] = torch.from_numpy(rng.integers(0, 256, bad.numel() - head, dtype=np.uint8))
    elif ways == 2:
        bad[int(rng.integers(0, 8))] = int(rng.integers(0, 256))
    else:
        bad = bad[: head + int(rng.integers(0, bad.numel() - head)) // 8 * 8].clone()
    return bad


def test_what_the_cpu_refuses_is_refused():
    """And what it reads is read alike."""
    n, bucket = 150, 32
    scheme = SparseSGD(density=0.2, bucket_size=bucket)
    body, head = body_of(scheme, vector(heavy, n)), scheme.codec.least_body_bytes(n)
    bodies = [spoiled(body, head, seed) for seed in range(20)]
    good, total = [], torch.zeros(n)
    for place, bad in enumerate(bodies):
        out = torch.zeros(n)
        try:
            scheme.codec.add_bodies([bad], [KEY], 1.0, out)
        except PayloadError:
            continue
        good.append(place)
        total += out
    there = torch.zeros(n, device=DEVICE)
    flags = (
        cuda_sparse_bodies.flags_of(moved(*bodies), bucket, scheme.codec._rice, there)
        .get()
        .tolist()
    )
    assert [place for place, flag in enumerate(flags) if flag == 0] == good
    assert 0 < len(good) < len(bodies)
    there.zero_()
    cuda_sparse_bodies.flags_of(
        moved(*[bodies[k] for k in good]), bucket, scheme.codec._rice, there
    )
    assert torch.equal(there.cpu().isnan(), total.isnan())
    assert torch.equal(there.cpu().nan_to_num(), total.nan_to_num())
