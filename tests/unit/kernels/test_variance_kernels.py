"""Both backends add the variance of rounding in the same order."""

from __future__ import annotations

import pytest
import torch

from hvd_adaptive.kernels import module
from hvd_adaptive.kernels.numba.warm import each_table

TABLES = list(each_table())[::5]


@pytest.mark.many
@pytest.mark.parametrize("size", [1, 7, 512, 8192])
@pytest.mark.parametrize("number", range(len(TABLES)))
def test_bits_are_the_same(number, size):
    generator = torch.Generator().manual_seed(number)
    flat = torch.randn(10_000, generator=generator) ** 3
    flat[:1000] = 0
    flat[-1] = torch.nan
    fast, slow = module("numba", "tables"), module("reference", "tables")
    norms = fast.bucket_norms(flat, size, "l2")
    found = fast.variances(flat, norms, size, TABLES[number])
    wanted = slow.variances(flat, norms, size, TABLES[number])
    assert torch.equal(found.view(torch.int64)[:-1], wanted.view(torch.int64)[:-1])
    assert found[-1].isnan() and wanted[-1].isnan()
