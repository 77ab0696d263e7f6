"""Checksums of payloads by the Triton kernels: plain Python's numbers, one launch or many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton_interpreter as on
from unit_oracles import word_checksum

from hvd_adaptive.kernels.reference import checksum as reference_checksum
from hvd_adaptive.kernels.triton import checksum as cuda_checksum


def payload(words: int, seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(0, 2**32, 24 + words, dtype=np.uint32)
    return torch.from_numpy(values.view(np.uint8).copy()).to(on.DEVICE)


def wanted(data: torch.Tensor, seed: int) -> int:
    return word_checksum(np.frombuffer(data.cpu().numpy()[96:], "<u4").tolist(), seed)


@pytest.mark.parametrize("apart", ("end to end", "with gaps", "own tensors", "of any lengths"))
def test_of_several_payloads(apart, monkeypatch):
    longer = 2 if apart == "of any lengths" else 0
    payloads = [payload(4098 + longer * rank, rank) for rank in range(4)]
    if apart in ("end to end", "of any lengths"):
        sizes = [data.numel() for data in payloads]
        payloads = list(torch.cat(payloads).split(sizes))
    elif apart == "with gaps":
        gap = torch.zeros(8, dtype=torch.uint8, device=on.DEVICE)
        whole = torch.cat([part for data in payloads for part in (data, gap)])
        size = payloads[0].numel()
        payloads = [whole[k * (size + 8) :][:size] for k in range(4)]
    seeds = [3, 2**31 + 5, 2**32 - 1, 0]
    launches, launch = [], cuda_checksum.launch

    def counted(kernel, *args, **keywords):
        launches.append(kernel)
        launch(kernel, *args, **keywords)

    monkeypatch.setattr(cuda_checksum, "launch", counted)
    wants = [wanted(data, seed) for data, seed in zip(payloads, seeds, strict=True)]
    for kernels in (cuda_checksum, reference_checksum):
        found = kernels.checksums(payloads, seeds)
        assert [int(value) & 0xFFFFFFFF for value in found] == wants
    blocks = launches.count(cuda_checksum._add_blocks)
    assert blocks == 1 if apart in ("end to end", "with gaps") else 1 <= blocks <= 4
