"""Levels and cuts of per-bucket tables: Numba against the reference, bit for bit."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from kernel_cases import KINDS, heavy, one_outlier, ordinary, placed, same_bits, vector

from hvd_adaptive.kernels import module
from hvd_adaptive.kernels.numba import bucket as cpu_bucket
from hvd_adaptive.kernels.numba import levels as cpu_levels
from hvd_adaptive.kernels.numba.levels import LEAST_RADIX
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.reference import levels as reference_levels

SOLVERS = {
    "orq-3": lambda module, *at: module.orq_levels(*at[:2], 3, at[2], 0),
    "orq-9": lambda module, *at: module.orq_levels(*at[:2], 9, at[2], 0),
    "orq-17-descent": lambda module, *at: module.orq_levels(*at[:2], 17, at[2], 30),
    "quantile-6": lambda module, *at: module.quantile_levels(*at[:2], 6, at[2]),
    "mean": lambda module, *at: module.mean_magnitudes(*at),
    "symmetric": lambda module, *at: module.symmetric_levels(*at),
    "means": lambda module, *at: module.conditional_means(*at, False),
    "means-iterated": lambda module, *at: module.conditional_means(*at, True),
}
SIZES = (0, 1, 2, 31, 32, 33, 127, 129, LEAST_RADIX - 1, LEAST_RADIX, 1000)


def levels_of(flat: torch.Tensor, bucket: int, alphabet: int) -> torch.Tensor:
    return reference_levels.quantile_levels(flat, bucket, alphabet, None)


@pytest.mark.parametrize("solver", SOLVERS)
def test_same_levels(solver):
    """For all sizes, then for all kinds of vectors."""
    own = (vector((ordinary, heavy, one_outlier)[i % 3], n) for i, n in enumerate(SIZES))
    cases = [(x, bucket) for x in own for bucket in (1, 128, 400) if len(x) < 10 * bucket]
    cases += [(vector(kind, 2 * bucket + 1), bucket) for kind in KINDS for bucket in (100, 500)]
    for (flat, bucket), clip in zip(cases, itertools.cycle((None, 2.5, None, 0.5))):
        want, got = (SOLVERS[solver](m, flat, bucket, clip) for m in (reference_levels, cpu_levels))
        assert want.is_contiguous() and same_bits(want, got), (len(flat), bucket, clip)


@pytest.mark.parametrize("backend", ("reference", "numba", "triton"))
def test_cuts(backend):
    cuts, values = torch.tensor([0.0, -0.3, torch.nan]), torch.tensor([[0.0, 1.0]]).repeat(3, 1)
    for kind in KINDS:
        flat = vector(kind, 1300)
        want = np.concatenate([flat[:600] >= 0, flat[600:1200] >= np.float32(-0.3), [False] * 100])
        words = torch.full((packing_of(2).words(1300),), -1, dtype=torch.int32)
        own, words, bits, levels, at = placed(backend, flat, words, torch.zeros(1300), values, cuts)
        module(backend, "bucket").cut_codes(own, at, words, 600)
        module(backend, "bucket").decode_add([(levels, words)], 600, 1.0, bits)
        assert np.array_equal(bits.cpu().numpy() != 0, want)


def test_long_vectors():
    flat = vector(heavy, 10**5 + 3)
    for solver in ("orq-9", "symmetric", "means"):
        want, got = (SOLVERS[solver](m, flat, 8192, None) for m in (reference_levels, cpu_levels))
        assert same_bits(want, got)


def test_codes_by_exact_arithmetic():
    """The documented integers and the documented comparison, in fractions."""
    n, bucket, key = 900, 350, 123456789
    flat = vector(ordinary, n)
    levels = levels_of(flat, bucket, 5)
    words = torch.empty(packing_of(5).words(n), dtype=torch.int32)
    cpu_bucket.round_codes(flat, levels, words, bucket, key)
    codes = []
    for b in range(3):
        row = [Fraction(v) for v in levels[b].tolist()]
        part = flat[b * bucket : (b + 1) * bucket].tolist()
        integers = oracle.uniform_integers(key, b, len(part))
        for v, k in zip(map(Fraction, part), integers, strict=True):
            shares = [(v - low) / (high - low) for low, high in itertools.pairwise(row)]
            codes.append(sum(share > Fraction(k | 1, 2**24) for share in shares))
    want = np.array(oracle.pack_radix(codes, 5), np.uint32).view(np.int32)
    assert np.array_equal(words.numpy(), want)
