"""Payloads: every truncation is refused, end to end; streams too long for the 32 bits of their
segments' ends. test_wire_format.py has every field of headers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_adaptive import ALQ, ECDQ, QSGD, PayloadError
from hvd_adaptive.coding import coders
from hvd_adaptive.coding.payload import payloads_in
from hvd_adaptive.kernels import dithered

COMPRESSOR = ALQ(bits=3, bucket_size=64, tail="full")


def payload_of() -> bytes:
    return COMPRESSOR.encode(torch.linspace(-1, 1, 150), seed=5).numpy().tobytes()


def test_every_truncation_is_refused():
    payload = payload_of()
    for length in range(len(payload)):
        told = f"{length} of {len(payload)} bytes" if length >= 96 else "shorter than its header"
        with pytest.raises(PayloadError, match=told):
            COMPRESSOR.decode(oracle.received(payload[:length]))
    for extra in (1, 4, 8, 1000):
        with pytest.raises(PayloadError):
            COMPRESSOR.decode(oracle.received(payload + bytes(extra)))


@settings(max_examples=100)
@given(st.binary(max_size=400))
@example(b"")
@example(b"HVDA")
@example(b"HVDA" + bytes(92))
@example(b"HVDA\x01\x00" + bytes(500))
def test_foreign_bytes_are_refused(data):
    with pytest.raises(PayloadError):
        COMPRESSOR.decode(oracle.received(data))


def test_magic_and_format_have_their_own_messages():
    with pytest.raises(PayloadError, match="foreign data"):
        COMPRESSOR.decode(oracle.forged(payload_of(), magic=b"PNG\n"))
    with pytest.raises(PayloadError, match="format version 2"):
        COMPRESSOR.decode(oracle.forged(payload_of(), format=2))


def test_things_that_are_no_payload():
    tensors = (torch.zeros(200), torch.zeros(200).int())
    for thing in (None, b"HVDA", [1, 2], np.zeros(200, np.uint8), *tensors):
        with pytest.raises(PayloadError, match="uint8 tensor"):
            COMPRESSOR.decode(thing)


@pytest.mark.parametrize("make", [lambda: ALQ(coding="huffman"), lambda: ECDQ(bits=2.0)])
def test_streams_beyond_the_last_end_travel_uncoded(make, monkeypatch):
    """And nothing wraps."""
    flat = torch.randn(3 * coders.SEGMENT, generator=torch.Generator().manual_seed(1))
    codec = make()
    codec.fit(flat)
    coded = codec.encode(flat, seed=1)
    for module in (coders, dithered):
        monkeypatch.setattr(module, "LAST_END", coded.numel() // 2)
    uncoded = codec.encode(flat, seed=1)
    assert uncoded.numel() > coded.numel(), "as fixed width, or as integers"
    assert torch.equal(codec.decode(uncoded), codec.decode(coded))


COUNT = 3


@pytest.fixture(scope="module")
def payloads() -> list[torch.Tensor]:
    codec = QSGD(bits=3, bucket_size=64)
    return [codec.encode(torch.randn(100 * (rank + 1)), seed=rank) for rank in range(COUNT)]


@pytest.mark.parametrize("joined", [True, False])
def test_each_is_found(payloads, joined):
    received = [torch.cat(payloads)] if joined else payloads
    found = list(payloads_in(received, range(COUNT)))
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
        list(payloads_in([torch.cat(damaged)] if joined else damaged, range(COUNT)))
    with pytest.raises(PayloadError, match="the headers say"):
        list(payloads_in([torch.cat([*payloads, own])], range(COUNT)))
