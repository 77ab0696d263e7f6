"""Packing against bit-by-bit implementations of the docstrings of kernels/fixed.py and radix.py."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.kernels.fixed import packed_words
from hvd_adaptive.kernels.numba import tables as cpu
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.reference import pack as reference_pack
from hvd_adaptive.kernels.reference import tables as reference
from hvd_adaptive.kernels.tables import kernel_table

EVERY = "HVD_ADAPTIVE_EVERY_CASE" in os.environ
LENGTHS = (
    0,
    1,
    15,
    16,
    17,
    63,
    64,
    65,
    127,
    128,
    129,
    447,
    448,
    449,
    511,
    512,
    513,
    575,
    577,
    1023,
    1024,
    1025,
    1600,
)


def codes_of(seed: int, n: int, bits: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << bits, n).tolist()


def words_of(codes: list[int], bits: int) -> torch.Tensor:
    return torch.from_numpy(np.array(oracle.pack(codes, bits), np.uint32).view(np.int32))


def check(codes: list[int], bits: int) -> None:
    want = words_of(codes, bits)
    packed = reference_pack.pack(torch.tensor(codes, dtype=torch.int64), bits)
    assert torch.equal(packed, want)
    assert packed_words(len(codes), bits) == want.numel()
    assert reference_pack.unpack(want, len(codes), bits).tolist() == codes


@given(st.integers(1, 8), st.integers(0, 2000), st.integers(0, 2**32 - 1))
def test_words_and_roundtrip_of_any_length(bits, n, seed):
    check(codes_of(seed, n, bits), bits)


@pytest.mark.parametrize("bits", range(1, 9))
def test_words_and_roundtrip_at_block_and_row_boundaries(bits):
    for n in LENGTHS:
        check(codes_of(n, n, bits), bits)
        check([(1 << bits) - 1] * n, bits)


@settings(max_examples=40)
@given(st.integers(2, 8), st.integers(0, 2000), st.integers(0, 2**32 - 1))
def test_numba_reads_what_python_packed(bits, n, seed):
    """decode_add with scale 1 looks every code up in the table."""
    codes = codes_of(seed, n, bits)
    count = 1 << (bits - 1)
    table = kernel_table(np.arange(1, count + 1) / count, symmetric=True)
    ladder = np.arange(1, count + 1, dtype=np.float64) / count
    values = np.concatenate([-ladder[::-1], ladder])
    out = torch.zeros(n)
    cpu.decode_add([(torch.ones(-(-n // 100)), words_of(codes, bits))], 100, table, 1.0, out)
    assert out.tolist() == [float(np.float32(values[c])) for c in codes]


@pytest.mark.parametrize("bits", range(2, 9))
def test_numba_packs_what_python_packs(bits):
    """Codes chosen by coordinates at the ends of a two-level table do not depend on chance."""
    for n in LENGTHS[1:]:
        signs = np.random.default_rng(n).choice([-1.0, 1.0], n).astype(np.float32)
        count = 1 << (bits - 1)
        table = kernel_table(np.arange(1, count + 1) / count, symmetric=True)
        words = torch.full((packed_words(n, bits),), -1, dtype=torch.int32)
        cpu.encode(torch.from_numpy(signs), torch.empty(1), words, n, "linf", table, 5)
        want = [2 * count - 1 if s > 0 else 0 for s in signs]
        assert torch.equal(words, words_of(want, bits)), (bits, n)


@pytest.mark.parametrize("alphabet", oracle.UNITS)
def test_radix_units_are_as_documented_and_waste_little(alphabet):
    packing = packing_of(alphabet)
    assert (packing.digits, packing.width) == oracle.UNITS[alphabet]
    assert alphabet**packing.digits <= 2**packing.width
    waste = packing.bits_per_code / np.log2(alphabet) - 1
    assert waste < (0.035 if alphabet == 129 else 0.03)


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
    packed = reference_pack.pack_codes(torch.tensor(codes, dtype=torch.int64), packing)
    assert torch.equal(packed, want) and packing.words(n) == want.numel()
    assert reference_pack.unpack_codes(want, n, packing).tolist() == codes


@settings(max_examples=40)
@given(
    st.sampled_from([3, 7, 9, *([129] if EVERY else [])]),
    st.integers(1, 3000),
    st.integers(0, 2**32 - 1),
)
def test_numba_reads_and_writes_radix_words(alphabet, n, seed):
    """Coordinates at the levels of a table keep their level, whatever the random numbers. (Tables
    of 9 and 129 levels are not compiled at set-up; `make ranks` runs those of 129, too.)"""
    codes = np.random.default_rng(seed).integers(0, alphabet, n)
    codes[0] = alphabet - 1
    half = alphabet // 2
    table = kernel_table(np.sqrt(np.arange(half + 1) / half), symmetric=False)
    words = torch.from_numpy(
        np.array(oracle.pack_radix(codes.tolist(), alphabet), np.uint32).view(np.int32)
    )
    out = torch.zeros(n)
    cpu.decode_add([(torch.ones(1), words)], n, table, 1.0, out)
    ascending = np.arange(-half, half + 1)
    levels = np.sign(ascending) * np.sqrt(np.abs(ascending) / half)
    assert out.tolist() == levels.astype(np.float32)[codes].tolist()
    got = torch.full_like(words, -1)
    cpu.encode(out, torch.empty(1), got, n, "linf", table, seed)
    assert torch.equal(got, words)


@pytest.mark.parametrize("uniform", (True, False))
@pytest.mark.parametrize("bits", (4, 5, 6, 8))
def test_codes_beyond_the_last_are_read_inside_the_table(bits, uniform):
    """Only a forger can have written them; both kernels read the same."""
    half = (1 << (bits - 1)) - 1
    magnitudes = np.arange(half + 1) / half
    table = kernel_table(magnitudes if uniform else magnitudes**2, symmetric=False)
    words = torch.full((packed_words(600, bits),), -1, dtype=torch.int32)
    outs = [torch.zeros(600), torch.zeros(600)]
    for module, out in zip((cpu, reference), outs, strict=True):
        module.decode_add([(torch.ones(1), words)], 600, table, 1.0, out)
    assert torch.equal(*outs) and outs[0].isfinite().all()


@pytest.mark.parametrize("alphabet", (0, 1, 257))
def test_alphabets_out_of_range(alphabet):
    with pytest.raises(ValueError, match=f"alphabet={alphabet}: must be an integer from 2 to 256"):
        packing_of(alphabet)


@given(st.integers(0, 10**12), st.integers(1, 8))
def test_packed_words_of_whole_blocks_and_a_rest(n, bits):
    """Blocks of 512 take exactly 16 * bits words; a rest at most one word a lane too many."""
    blocks, rest = divmod(n, 512)
    tail = packed_words(n, bits) - 16 * bits * blocks
    lane_bits = -(-rest // 64) * 4 * bits
    assert tail == 16 * -(-lane_bits // 32)


@pytest.mark.parametrize("bits", range(2, 9))
def test_numba_refuses_payloads_that_are_too_short(bits):
    table = kernel_table(np.linspace(0, 1, (1 << (bits - 1)) + 1)[1:], symmetric=True)
    words = torch.zeros(packed_words(1000, bits), dtype=torch.int32)
    for scales, codes in ((torch.ones(9), words), (torch.ones(10), words[:-1])):
        with pytest.raises(ValueError, match="too short"):
            cpu.decode_add([(scales, codes)], 100, table, 1.0, torch.zeros(1000))
