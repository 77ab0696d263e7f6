"""Codes and levels with permutations of AVX-512 and AVX2, and without: the same ones."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from hvd_adaptive.kernels.numba import decoder, eden_decoder, lanes, permute, random
from hvd_adaptive.kernels.numba import tables as cpu
from hvd_adaptive.kernels.packing import BLOCK, packing_of
from hvd_adaptive.kernels.reference import tables as reference
from hvd_adaptive.kernels.reference.codes import pack_codes
from hvd_adaptive.kernels.tables import kernel_table


def forget() -> None:
    for prepared in (cpu._prepared, cpu._levels, decoder.decoder_of):
        prepared.cache_clear()


@pytest.fixture
def plain(monkeypatch):
    """Look-ups in memory; any others fail to compile."""

    def refuse(*args):
        raise AssertionError("permutations in code for a processor without them")

    monkeypatch.setattr(permute, "MOST_THRESHOLDS", 0)
    monkeypatch.setattr(permute, "MOST_VALUES", 0)
    monkeypatch.setattr(lanes.Lanes, "look_up", refuse)
    forget()
    yield
    forget()


@pytest.fixture
def entries(request, monkeypatch) -> int:
    """Entries of a register; a processor with AVX-512 also has the permutations of AVX2."""
    if request.param > lanes.ENTRIES:
        pytest.skip(f"this processor looks up {lanes.ENTRIES} entries at once")
    monkeypatch.setattr(lanes, "ENTRIES", request.param)
    return request.param


with_permutations = pytest.mark.parametrize("entries", (8, 16), indirect=True)
with_all = pytest.mark.parametrize("entries", (0, 8, 16), indirect=True)


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


# One for each way to search, all compiled here.
@pytest.mark.parametrize("thresholds", (pytest.param(8, marks=pytest.mark.thorough), 16, 128))
def test_without_permutations(plain, thresholds):
    flat = torch.from_numpy(np.random.default_rng(1).standard_normal(3001).astype(np.float32))
    table = table_of(thresholds)
    assert codes(cpu, flat, 700, table) == codes(reference, flat, 700, table)


@pytest.mark.parametrize("depth", range(1, 8))
def test_the_tree_finds_every_interval(depth):
    size = 1 << depth
    lower = np.sort(np.random.default_rng(depth).random(size)).astype(np.float32)
    for count in (size, size // 2 + 1):
        nodes = permute.tables(lower[:count], lower[:count], lower[:count], depth)
        for r in np.concatenate([lower[1:count], lower[1:count] + 1e-4, [1e-9, 2.0]]):
            node = 1
            for _ in range(depth):
                node = 2 * node + (r > nodes[node])
            assert node - size == np.count_nonzero(lower[1:count] < np.float32(r))


@with_permutations
@pytest.mark.parametrize("depth", (1, 3, 4, 5))
def test_codes_are_those_of_comparisons(depth, entries):
    draw = np.random.default_rng(depth)
    count = (1 << depth) - (depth > 2)  # one interval is unused
    lower = np.sort(draw.random(count)).astype(np.float32)
    lower[0] = 0
    gap = np.diff(lower, append=np.float32(1)).astype(np.float32)
    tree = permute.tables(lower, lower, gap, depth)
    x = draw.standard_normal(1000).astype(np.float32)
    counters = draw.integers(1 << 32, size=x.size, dtype=np.uint32)

    @numba.njit
    def codes_of(x, counters, part, tree):
        at = np.float32(0.4), np.uint32(77), np.uint32(99), np.uint32(2 * count)
        first, literal = np.uint32(count), numba.literally(depth)
        return permute.permuted(x, counters, part, at, tree, first, literal)

    @numba.njit
    def uniforms(counters, u):
        for i in range(u.size):
            u[i] = random.uniform24(np.uint32(counters[i] + np.uint32(77)), np.uint32(99))

    found, u = np.zeros(x.size, np.uint32), np.zeros(x.size, np.float32)
    done = codes_of(x, counters, found, tree)
    assert done == 992
    uniforms(counters, u)
    r = np.abs(x) * np.float32(0.4)
    index = np.count_nonzero(r[:, None] > lower[1:], axis=1)
    above = r > lower[index] + u * gap[index]
    code = count + index + above
    expected = np.where(x < 0, 2 * count - code, code)
    np.testing.assert_array_equal(found[:done], expected[:done])
    assert not found[done:].any()


@with_all
@pytest.mark.parametrize("size", (8, 16, 64))
def test_values_are_those_of_codes(size, entries):
    draw = np.random.default_rng(size)
    codes = draw.integers(size, size=100, dtype=np.uint32)
    values = np.zeros(max(size, 16), np.float32)
    values[:size] = draw.standard_normal(size)
    held = max(size, entries)

    @numba.njit
    def add(codes, values, sums):
        scale, literal = np.float32(1.7), numba.literally(held)
        return permute.add_values(codes, scale, values, sums, literal)

    sums = np.ones(100, np.float32)
    assert add(codes, values, sums) == 96
    expected = np.float32(1) + (values * np.float32(1.7))[codes]
    np.testing.assert_array_equal(sums[:96], expected[:96])
    assert (sums[96:] == 1).all()


@with_all
@pytest.mark.parametrize("bits", range(1, eden_decoder.MOST_BITS + 1))
def test_levels_of_a_block(bits, entries):
    """Of packed codes, by permutations and, for other processors, by selections."""

    @numba.njit
    def taken(words, values, scale, y):
        eden_decoder.take_block(words, values, scale, y, 16, numba.literally(bits))

    draw = np.random.default_rng(bits)
    codes = draw.integers(1 << bits, size=BLOCK)
    values = draw.standard_normal(1 << bits).astype(np.float32)
    words = pack_codes(torch.from_numpy(codes), packing_of(1 << bits)).numpy().view(np.uint32)
    y = np.zeros(BLOCK + 32, np.float32)
    taken(words, np.tile(values, 16 >> bits), np.float32(0.7), y)
    np.testing.assert_array_equal(y[16:-16], (values * np.float32(0.7))[codes])
    assert not y[:16].any() and not y[-16:].any()
