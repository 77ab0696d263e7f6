"""Streams too long for the 32 bits of their segments' ends travel uncoded, and nothing wraps."""

from __future__ import annotations

import pytest
import torch

from hvd_adaptive import ALQ, ECDQ
from hvd_adaptive.coding import coder
from hvd_adaptive.kernels import dithered

N = 3 * coder.SEGMENT


@pytest.mark.parametrize("scheme", ["alq", "ecdq"])
def test_the_last_end(scheme, monkeypatch):
    flat = torch.randn(N, generator=torch.Generator().manual_seed(1))
    make = {"alq": lambda: ALQ(bits=3, coding="huffman"), "ecdq": lambda: ECDQ(bits=2.0)}[scheme]
    codec = make()
    codec.fit(flat)
    coded = codec.encode(flat, seed=1)
    for module in (coder, dithered):
        monkeypatch.setattr(module, "LAST_END", coded.numel() // 2)
    uncoded = codec.encode(flat, seed=1)
    assert uncoded.numel() > coded.numel(), "as fixed width, or as integers"
    assert torch.equal(codec.decode(uncoded), codec.decode(coded))
