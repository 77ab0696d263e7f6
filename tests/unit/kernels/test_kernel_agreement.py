"""The Numba kernels against the reference, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import (
    KINDS,
    encoded,
    heavy,
    one_outlier,
    ordinary,
    same_bits,
    table_of,
    vector,
)

from hvd_adaptive.kernels import module
from hvd_adaptive.kernels.numba import tables as cpu
from hvd_adaptive.kernels.numba.warm import each_table
from hvd_adaptive.kernels.reference import tables as reference

BUCKETS = (1, 7, 33, 129, 512, 1000, 8192)
TABLES = list(itertools.product(range(2, 9), (True, False)))


def compare(flat: torch.Tensor, bucket: int, norm: str, table, key: int, clip=None) -> None:
    made = [encoded(m, flat, bucket, norm, table, key, clip) for m in (reference, cpu)]
    assert all(map(same_bits, *made))
    sums = [torch.linspace(-1, 1, flat.numel()) for _ in made]
    for kernels, out in zip((reference, cpu), sums, strict=True):
        kernels.decode_add([made[0]] * 3, bucket, table, 1 / 3, out)
    assert same_bits(*sums)


@pytest.mark.many
@pytest.mark.parametrize(("bits", "symmetric"), TABLES)
@pytest.mark.parametrize("shape", ("uneven", "uniform", "exponential"))
def test_same_codes_and_sums_for_all_sizes(bits, symmetric, shape):
    kinds = itertools.cycle((ordinary, heavy, one_outlier))
    table = table_of(bits, symmetric, shape)
    norms = itertools.cycle(("l2", "linf", "linf"))
    for bucket in BUCKETS:
        for n in sorted({0, 1, bucket - 1, bucket, bucket + 1, 63, 64, 65, 511, 512, 513}):
            compare(vector(next(kinds), n), bucket, next(norms), table, key=n * 2654435761)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_same_codes_and_sums_for_all_kinds_of_vectors(kind):
    for (bits, symmetric), norm in itertools.product(TABLES, ("l2", "linf")):
        bucket = BUCKETS[(bits + symmetric) % len(BUCKETS)]
        table = table_of(bits, symmetric, ("crowded", "uniform", "exponential")[bits % 3])
        compare(vector(kind, 3 * min(bucket, 400) + 1), bucket, norm, table, key=2**64 - bits)


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("clip", (0.5, 2.5))
def test_same_codes_and_sums_after_clipping(kind, clip):
    flat = vector(kind, 1300)
    for (bits, symmetric), norm in itertools.product(TABLES[1:4], ("l2", "linf")):
        compare(flat, 512, norm, table_of(bits, symmetric), key=bits, clip=clip)
    want, got = (m.clipped(flat, 512, clip) for m in (reference, cpu))
    assert same_bits(want, got)


def test_same_codes_and_sums_of_a_long_vector():
    compare(vector(heavy, 10**5 + 3), 8192, "l2", table_of(6, True), key=12345)


COMPILED = list(each_table())[::5]


@pytest.mark.many
@pytest.mark.parametrize("size", [1, 7, 512, 8192])
@pytest.mark.parametrize("number", range(len(COMPILED)))
def test_same_errors_of_rounding(number, size):
    """Which both add in the same order."""
    generator = torch.Generator().manual_seed(number)
    flat = torch.randn(10_000, generator=generator) ** 3
    flat[:1000] = 0
    flat[-1] = torch.nan
    fast, slow = module("numba", "tables"), module("reference", "tables")
    for norm in ("l2", "linf"):
        found = fast.errors(flat, size, norm, COMPILED[number])
        wanted = slow.errors(flat, size, norm, COMPILED[number])
        assert torch.equal(found.view(torch.int64)[:-1], wanted.view(torch.int64)[:-1])
        assert found[-1].isnan().all() and wanted[-1].isnan().all()
