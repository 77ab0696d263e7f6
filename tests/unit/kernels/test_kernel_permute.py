"""The encoder with and without AVX-512 permutations: the same codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_adaptive.kernels.numba import permute as cpu_permute
from hvd_adaptive.kernels.numba import tables as cpu
from hvd_adaptive.kernels.reference import tables as reference
from hvd_adaptive.kernels.tables import kernel_table


@pytest.fixture
def plain(monkeypatch):
    """A processor without AVX-512; any use of its instructions fails to compile."""

    def refuse(*args):
        raise AssertionError("permutations in code for a processor without them")

    monkeypatch.setattr(cpu, "PERMUTES", False)
    monkeypatch.setattr(cpu_permute.TableLanes, "look_up", refuse)
    cpu._prepared.cache_clear()
    yield
    cpu._prepared.cache_clear()


def codes(module, flat: torch.Tensor, bucket: int, table) -> tuple[list, list]:
    scales = torch.empty(-(-flat.numel() // bucket))
    words = torch.empty(table.packing.words(flat.numel()), dtype=torch.int32)
    module.encode(flat, scales, words, bucket, "linf", table, 77)
    return scales.tolist(), words.tolist()


def table_of(thresholds: int, symmetric: bool = True):
    """Levels over many octaves, some of them close together."""
    generator = np.random.default_rng(thresholds)
    magnitudes = np.sort(generator.random(thresholds + (not symmetric))) ** 3 + 1e-6
    magnitudes[0] *= symmetric
    magnitudes[-1] = 1
    return kernel_table(magnitudes, symmetric)


@pytest.mark.parametrize(
    "thresholds", (8, 16, 128)
)  # one for each way to search, all compiled here
def test_without_permutations(plain, thresholds):
    flat = torch.from_numpy(np.random.default_rng(1).standard_normal(3001).astype(np.float32))
    table = table_of(thresholds)
    assert codes(cpu, flat, 700, table) == codes(reference, flat, 700, table)


@pytest.mark.skipif(not cpu_permute.AVAILABLE, reason="no AVX-512 here")
@pytest.mark.parametrize("thresholds", (5, 8, 15, 16, 31, 32, 64, 100, 127, 128))
@pytest.mark.parametrize("bucket", (1, 15, 16, 17, 100, 8192))
def test_with_permutations(thresholds, bucket):
    """Buckets that are no multiples of 16 leave coordinates to another loop."""
    flat = torch.from_numpy(np.random.default_rng(1).standard_normal(1500).astype(np.float32))
    flat[::7] *= 1e-4
    flat[5], flat[6] = 0.0, -0.0
    table = table_of(thresholds, symmetric=thresholds & (thresholds - 1) == 0)
    assert table.thresholds == thresholds and cpu.PERMUTES
    assert codes(cpu, flat, bucket, table) == codes(reference, flat, bucket, table)


@pytest.mark.parametrize("depth", range(1, 8))
def test_the_tree_finds_every_interval(depth):
    size = 1 << depth
    lower = np.sort(np.random.default_rng(depth).random(size)).astype(np.float32)
    for count in (size, size // 2 + 1):
        nodes = cpu_permute.tables(lower[:count], lower[:count], lower[:count], depth)
        for r in np.concatenate([lower[1:count], lower[1:count] + 1e-4, [1e-9, 2.0]]):
            node = 1
            for _ in range(depth):
                node = 2 * node + (r > nodes[node])
            assert node - size == np.count_nonzero(lower[1:count] < np.float32(r))
