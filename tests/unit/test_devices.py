"""Tensors on devices that nothing supports are refused in one sentence, before anything is sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvd_adaptive import ALQ, EDEN, QSGD, LocalSGD
from hvd_adaptive.base.device import check_supported
from hvd_adaptive.ddp import CompressionState

THERE = torch.ones(3000, device="meta")
DOORS = {
    "encode": lambda: QSGD(bits=4).encode(THERE),
    "rotated": lambda: EDEN(bits=2).encode(THERE),
    "decode": lambda: QSGD(bits=4).decode(THERE.to(torch.uint8)),
    "fit": lambda: ALQ(bits=4).fit([torch.ones(3000), THERE]),
    "local": lambda: LocalSGD(torch.optim.SGD([nn.Parameter(THERE)], lr=0.1), every=2),
    "ddp": lambda: CompressionState(
        QSGD(bits=4), nn.Linear(2, 2, device="meta").named_parameters()
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_names_the_device(door):
    with pytest.raises(ValueError, match="tensors on meta: must be on the CPU or a GPU of CUDA"):
        DOORS[door]()


@pytest.mark.parametrize("kind", ["xpu", "hpu", "mps", "privateuseone"])
def test_accelerators(kind):
    with pytest.raises(ValueError, match=f"tensors on {kind}: must be on the CPU or a GPU"):
        check_supported(torch.device(kind))
