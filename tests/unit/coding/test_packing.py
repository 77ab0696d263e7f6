"""Packing against bit-by-bit implementations of the docstrings of kernels/packing.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.kernels.numba import tables as cpu
from hvd_adaptive.kernels.packing import Packing, packing_of
from hvd_adaptive.kernels.reference import codes as reference_codes
from hvd_adaptive.kernels.reference import tables as reference
from hvd_adaptive.kernels.tables import kernel_table

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 129, 447, 449, 511, 512, 513, 575, 577, 1025, 1600)


def codes_of(seed: int, n: int, bits: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << bits, n).tolist()


def words_of(codes: list[int], bits: int) -> torch.Tensor:
    return torch.from_numpy(np.array(oracle.pack(codes, bits), np.uint32).view(np.int32))


def check(codes: list[int], bits: int) -> None:
    want = words_of(codes, bits)
    packing = Packing(1 << bits, 1, bits)
    packed = reference_codes.pack_codes(torch.tensor(codes, dtype=torch.int64), packing)
    assert torch.equal(packed, want)
    assert packing.words(len(codes)) == want.numel()
    assert reference_codes.unpack_codes(want, len(codes), packing).tolist() == codes


@given(st.integers(1, 8), st.integers(0, 2000), st.integers(0, 2**32 - 1))
def test_words_and_roundtrip_of_any_length(bits, n, seed):
    check(codes_of(seed, n, bits), bits)


@pytest.mark.parametrize("bits", range(1, 9))
def test_words_and_roundtrip_at_block_and_row_boundaries(bits):
    for n in LENGTHS:
        check(codes_of(n, n, bits), bits)
        check([(1 << bits) - 1] * n, bits)


def test_every_level_count_wastes_at_most_three_percent():
    """Tables have an even number of levels, a power of two, or an odd one."""
    for alphabet in [2**b for b in range(1, 9)] + list(range(3, 256, 2)):
        packing = packing_of(alphabet)
        room = 1.035 if alphabet in (109, 111, 129, 131, 217) else 1.03
        assert np.log2(alphabet) <= packing.bits_per_code <= room * np.log2(alphabet)


@given(st.sampled_from(list(oracle.UNITS)), st.integers(0, 3000), st.integers(0, 2**32 - 1))
def test_radix_words_and_roundtrip(alphabet, n, seed):
    codes = np.random.default_rng(seed).integers(0, alphabet, n).tolist()
    packing = packing_of(alphabet)
    want = torch.from_numpy(np.array(oracle.pack_radix(codes, alphabet), np.uint32).view(np.int32))
    packed = reference_codes.pack_codes(torch.tensor(codes, dtype=torch.int64), packing)
    assert torch.equal(packed, want) and packing.words(n) == want.numel()
    assert reference_codes.unpack_codes(want, n, packing).tolist() == codes


@pytest.mark.parametrize(("bits", "uniform"), ((4, True), (5, False), (6, True), (8, False)))
def test_codes_beyond_the_last_are_read_inside_the_table(bits, uniform):
    """Only a forger can have written them; both kernels read the same."""
    half = (1 << (bits - 1)) - 1
    magnitudes = np.arange(half + 1) / half
    table = kernel_table(magnitudes if uniform else magnitudes**2, symmetric=False)
    words = torch.full((Packing(1 << bits, 1, bits).words(600),), -1, dtype=torch.int32)
    outs = [torch.zeros(600), torch.zeros(600)]
    for module, out in zip((cpu, reference), outs, strict=True):
        module.decode_add([(torch.ones(1), words)], 600, table, 1.0, out)
    assert torch.equal(*outs) and outs[0].isfinite().all()


@pytest.mark.parametrize("alphabet", (0, 1, 257))
def test_alphabets_out_of_range(alphabet):
    with pytest.raises(ValueError, match=f"alphabet={alphabet}: must be an integer from 2 to 256"):
        packing_of(alphabet)


def test_numba_refuses_payloads_that_are_too_short():
    bits = 3
    table = kernel_table(np.linspace(0, 1, (1 << (bits - 1)) + 1)[1:], symmetric=True)
    words = torch.zeros(Packing(1 << bits, 1, bits).words(1000), dtype=torch.int32)
    for scales, codes in ((torch.ones(9), words), (torch.ones(10), words[:-1])):
        with pytest.raises(ValueError, match="too short"):
            cpu.decode_add([(scales, codes)], 100, table, 1.0, torch.zeros(1000))
