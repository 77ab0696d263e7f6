"""ECDQ next to the largest float32: that one where half a step leads beyond it."""

from __future__ import annotations

import pytest
import torch

from hvd_adaptive import ECDQ

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("bits", (2.0, 8.0))
@pytest.mark.parametrize("sign", (1, -1))
def test_the_huge_coordinate_stays_finite(bits, sign):
    scheme = ECDQ(bits=bits, bucket_size=64)
    flat = torch.linspace(-1e30, 1e30, 128)
    flat[5] = sign * LARGEST
    # A bucket's root mean square is an eighth of its one huge value here.
    decoded = torch.stack([scheme.decode(scheme.encode(flat, seed=seed)) for seed in range(30)])
    huge, others = sign * decoded[:, 5], decoded[:, torch.arange(128) != 5]
    assert others.isfinite().all() and not decoded.isnan().any()
    assert others.abs().max() < LARGEST / 2 and huge.min() > LARGEST / 2
    assert huge.isfinite().all() and 0 < (huge == LARGEST).sum() < 30
