"""The payload checksum: same as plain Python's, depends on every bit and its place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import placed
from unit_oracles import word_checksum

from hvd_adaptive.kernels import module
from hvd_adaptive.kernels.numba import checksum as cpu_checksum
from hvd_adaptive.kernels.reference import checksum as reference_checksum

words = st.lists(st.integers(0, 2**32 - 1), max_size=200)
seeds = st.integers(0, 2**32 - 1)


def tensor(values) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint32).view(np.int32))


def check(values: list[int], seed: int) -> None:
    """Both kernels compute what Python computes."""
    want = word_checksum(values, seed)
    assert cpu_checksum.checksum(tensor(values), seed) == want
    assert reference_checksum.checksum(tensor(values), seed) == want
    assert 0 <= want < 2**32


@given(words, seeds)
def test_any_words(values, seed):
    check(values, seed)


@pytest.mark.parametrize("count", (0, 1, 63, 64, 65, 128, 4095, 4096, 4097, 4161, 10_000))
def test_row_and_block_boundaries(count):
    values = np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)
    check(values.tolist(), 7)


@pytest.mark.parametrize("backend", ("numba", "reference", "triton"))
@pytest.mark.parametrize("seed", (0, 2**32 - 1, None))
def test_seal_writes_header_and_checksum_alone(backend, seed):
    generator = np.random.default_rng(3)
    payload = generator.integers(0, 256, 96 + 8 * 2100, dtype=np.uint8)
    header = generator.integers(0, 256, 96, dtype=np.uint8).tobytes()
    body = payload[96:].tobytes()
    want = word_checksum(np.frombuffer(body, "<u4").tolist(), seed or 0)
    head = header if seed is None else header[:12] + want.to_bytes(4, "little") + header[16:]
    (data,) = placed(backend, torch.from_numpy(payload))
    kernels = module(backend, "checksum")
    kernels.seal(data, header, seed)
    assert data.cpu().numpy().tobytes() == head + body
    assert kernels.checksum(data[96:].view(torch.int32), seed or 0) == want
    found = kernels.checksums([data, data[:96]], [seed or 0, 1])
    assert [int(value) & 0xFFFFFFFF for value in found] == [want, word_checksum([], 1)]


@pytest.mark.parametrize("count", (1, 65, 150))
def test_every_single_bit_flip_is_seen(count):
    for values in (np.zeros(count, np.uint32), np.full(count, 2**32 - 1, np.uint32)):
        before = cpu_checksum.checksum(tensor(values), 0)
        for word, bit in itertools.product(range(count), range(32)):
            values[word] ^= np.uint32(1 << bit)
            assert cpu_checksum.checksum(tensor(values), 0) != before
            values[word] ^= np.uint32(1 << bit)


@pytest.mark.parametrize(("parts", "size"), ((200, 1), (6, 4096)), ids=("words", "blocks"))
def test_every_swap_of_two_different_parts_is_seen(parts, size):
    """Words of one lane and of several, 19,900 pairs, and blocks: none of 32 bits may collide."""
    values = np.random.default_rng(2).integers(0, 2**32, (parts, size), dtype=np.uint32)
    values[-1] = 0
    before = cpu_checksum.checksum(tensor(values.reshape(-1)), 5)
    for i, j in itertools.combinations(range(parts), 2):
        swapped = values.copy()
        swapped[[i, j]] = swapped[[j, i]]
        assert cpu_checksum.checksum(tensor(swapped.reshape(-1)), 5) != before, (i, j)


def test_length_and_seed_count():
    assert len({cpu_checksum.checksum(tensor([0] * n), 0) for n in range(200)}) == 200
    assert len({cpu_checksum.checksum(tensor([1, 2]), seed) for seed in range(1000)}) == 1000
