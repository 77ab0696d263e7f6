"""Levels of packed codes, looked up by permutations and, for other processors, by selections."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from hvd_adaptive.kernels.numba import eden_decoder, permute
from hvd_adaptive.kernels.packing import BLOCK, packing_of
from hvd_adaptive.kernels.reference.codes import pack_codes


@pytest.mark.parametrize("entries", (0, 8, 16))
@pytest.mark.parametrize("bits", range(1, eden_decoder.MOST_BITS + 1))
def test_levels_of_a_block(bits, entries, monkeypatch):
    if entries > permute.ENTRIES:
        pytest.skip(f"this processor looks up {permute.ENTRIES} entries at once")
    monkeypatch.setattr(permute, "ENTRIES", entries)

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
