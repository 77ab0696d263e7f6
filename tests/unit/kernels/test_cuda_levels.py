"""The Triton kernels that find buckets' own levels against the reference, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kernel_cases import constant, heavy, one_outlier, ordinary, same_bits, vector, with_nan, zeros
from test_bucket_kernels import SOLVERS
from triton_interpreter import moved

from hvd_adaptive.kernels.reference import levels as reference_levels
from hvd_adaptive.kernels.triton import launch as cuda_launch
from hvd_adaptive.kernels.triton import levels as cuda_levels

SHAPES = itertools.cycle([(60, None), (130, 1.5)])
NAMES = [name for name in SOLVERS if name != "orq-17-descent"]


@pytest.mark.parametrize(
    ("name", "bucket", "clip"), [(n, *s) for n, s in zip(NAMES, SHAPES, strict=False)]
)
def test_levels(name: str, bucket: int, clip: float | None):
    """A bucket of each kind and a partial one."""
    kinds = (ordinary, heavy, zeros, with_nan, constant, one_outlier)
    flat = torch.cat([vector(kind, bucket) for kind in kinds] + [vector(ordinary, bucket // 3)])
    flat[:5] = -0.0
    with np.errstate(all="ignore"):
        want = SOLVERS[name](reference_levels, flat, bucket, clip)
        got = SOLVERS[name](cuda_levels, *moved(flat), bucket, clip)
    assert same_bits(want, got.cpu())


@pytest.mark.parametrize(("levels", "bucket", "sweeps"), [(33, 300, 1), (17, 10, 3)])
def test_many_levels(levels: int, bucket: int, sweeps: int):
    """More than a warp has lanes, and more than a bucket has coordinates."""
    kinds = (ordinary, constant) if bucket > levels else (ordinary, heavy, zeros, with_nan)
    flat = torch.cat([vector(kind, bucket) for kind in kinds])[: -bucket // 3]
    want = reference_levels.orq_levels(flat, bucket, levels, None, sweeps)
    with np.errstate(all="ignore"):
        got = cuda_levels.orq_levels(*moved(flat), bucket, levels, None, sweeps)
    assert same_bits(want, got.cpu())


def test_buckets_of_one_coordinate():
    flat = torch.tensor([1.5, -2.0, 0.0, float("inf"), 3e-39])
    for solve in map(SOLVERS.get, NAMES):
        with np.errstate(all="ignore"):
            want = solve(reference_levels, flat, 1, None)
            got = solve(cuda_levels, *moved(flat), 1, None)
        assert same_bits(want, got.cpu())


def test_more_buckets_than_a_gpu_starts_programs():
    with pytest.raises(ValueError, match=r"2147483648 programs for 3 coordinates: .* bucket_size"):
        cuda_launch.launch(cuda_levels._mean_kernel, 2**31, torch.zeros(3))
