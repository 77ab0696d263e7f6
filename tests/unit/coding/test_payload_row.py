"""Payloads of several ranks: each in its own tensor, or end to end."""

from __future__ import annotations

import pytest
import torch

from hvd_adaptive import QSGD
from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.coding.payload import split

COUNT = 3


@pytest.fixture(scope="module")
def payloads() -> list[torch.Tensor]:
    codec = QSGD(bits=3, bucket_size=64)
    return [codec.encode(torch.randn(100 * (rank + 1)), seed=rank) for rank in range(COUNT)]


@pytest.mark.parametrize("joined", [True, False])
def test_each_is_found(payloads, joined):
    received = [torch.cat(payloads)] if joined else payloads
    found = split(received, COUNT)
    assert [payload.header.coordinates for payload in found] == [100, 200, 300]
    for payload, data in zip(found, payloads, strict=True):
        assert torch.equal(payload.bytes, data)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("place", range(COUNT))
@pytest.mark.parametrize("change", ["cut", "longer", "missing"])
def test_wrong_lengths(payloads, joined, place, change):
    damaged = list(payloads)
    own = damaged[place]
    damaged[place] = {"cut": own[:-8], "longer": torch.cat([own, own[:8]]), "missing": own[:0]}[
        change
    ]
    with pytest.raises(PayloadError):
        split([torch.cat(damaged)] if joined else damaged, COUNT)


def test_one_too_many(payloads):
    with pytest.raises(PayloadError, match="the headers say"):
        split([torch.cat([*payloads, payloads[0]])], COUNT)
