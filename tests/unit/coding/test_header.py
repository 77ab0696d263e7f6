"""Payloads' headers: every field at its place, every truncation refused; payloads end to end;
streams that are too long for the 32 bits of their segments' ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_adaptive import ALQ, ECDQ, QSGD, PayloadError
from hvd_adaptive.coding import coder
from hvd_adaptive.coding.payload import payloads_in
from hvd_adaptive.kernels import dithered
from hvd_adaptive.kernels.random import stream_key

DTYPE_CODES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float64: 4}
COMPRESSOR = ALQ(bits=3, bucket_size=64, tail="full")


def payload_of(
    n: int = 150, dtype: torch.dtype = torch.float32, compressor: ALQ = COMPRESSOR
) -> bytes:
    flat = torch.linspace(-1, 1, n, dtype=torch.float64).to(dtype)
    return compressor.encode(flat, seed=5).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPE_CODES)
@pytest.mark.parametrize("n", (0, 65, 150))
def test_every_field_at_its_offset(dtype, n):
    payload = payload_of(n, dtype)
    field = {name: oracle.read_field(payload, name) for name in oracle.FIELDS}
    assert field.pop("magic") == b"HVDA"
    assert field.pop("scheme") == b"alq" + bytes(13)
    assert field.pop("checksum") == oracle.checksum(payload)
    field.pop("settings"), field.pop("table_fingerprint")  # any 32 bits
    assert field == {
        "format": 1,
        "dtype": DTYPE_CODES[dtype],
        "coding": 0,
        "alphabet": 7,
        "coordinates": n,
        "full": n % 64,
        "bucket_size": 64,
        "table_version": 0,
        "key": oracle.stream_key(5, 0, 0, 2**63),
        "layout": 0,
        "length": len(payload),
        "zeros": 0,
    }
    assert oracle.read_field(payload, "key") == stream_key(5, 0, 0, 2**63)


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
    flat = torch.randn(3 * coder.SEGMENT, generator=torch.Generator().manual_seed(1))
    codec = make()
    codec.fit(flat)
    coded = codec.encode(flat, seed=1)
    for module in (coder, dithered):
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
