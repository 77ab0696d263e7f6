"""Packing against the reader that is written from docs/wire_format.md."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import wire_decoder as wire
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.kernels.numba import tables as cpu
from hvd_adaptive.kernels.packing import Packing, packing_of
from hvd_adaptive.kernels.reference import codes as reference_codes
from hvd_adaptive.kernels.reference import tables as reference
from hvd_adaptive.kernels.tables import kernel_table

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 129, 447, 449, 511, 512, 513, 575, 577, 1025, 1600)


def check(codes: list[int], alphabet: int) -> None:
    """A reader of docs/wire_format.md reads the words; what is behind the last code is zeros."""
    packing, own = packing_of(alphabet), torch.tensor(codes, dtype=torch.int64)
    words = reference_codes.pack_codes(own, packing)
    assert packing.words(len(codes)) == words.numel() == wire.words_of(len(codes), alphabet)
    assert wire.unpack(words.numpy().tobytes(), len(codes), alphabet).tolist() == codes
    assert reference_codes.unpack_codes(words, len(codes), packing).tolist() == codes
    row = 64 if packing.digits == 1 else 16 * packing.digits
    filled = torch.cat([own, own.new_zeros(-len(codes) % row)])
    assert torch.equal(reference_codes.pack_codes(filled, packing), words)


@settings(max_examples=300)
@given(st.integers(2, 256), st.integers(0, 3000), st.integers(0, 2**32 - 1))
def test_words_and_roundtrip_of_any_length(alphabet, n, seed):
    check(np.random.default_rng(seed).integers(0, alphabet, n).tolist(), alphabet)


@pytest.mark.parametrize("alphabet", (2, 4, 8, 16, 32, 64, 128, 256, 3, 5, 255))
def test_words_and_roundtrip_at_block_and_row_boundaries(alphabet):
    for n in LENGTHS:
        check([alphabet - 1] * n, alphabet)


def test_every_level_count_wastes_at_most_three_percent():
    """Tables have an even number of levels, a power of two, or an odd one."""
    for alphabet in [2**b for b in range(1, 9)] + list(range(3, 256, 2)):
        packing = packing_of(alphabet)
        room = 1.035 if alphabet in (109, 111, 129, 131, 217) else 1.03
        assert np.log2(alphabet) <= packing.bits_per_code <= room * np.log2(alphabet)


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
