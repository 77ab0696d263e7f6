"""Payloads whose checksum is right and whose header lies: PayloadError, no reads out of bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from scheme_cases import EVERY, scheme

from hvd_adaptive import ALQ, PayloadError

N, BUCKET = 150, 64
COMPRESSOR = ALQ(bits=3, bucket_size=BUCKET)
FULL_TAIL = ALQ(bits=3, bucket_size=BUCKET, tail="full")
HUGE = (2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def payload_of(compressor: ALQ = COMPRESSOR) -> bytes:
    flat = torch.from_numpy(np.random.default_rng(0).standard_normal(N).astype(np.float32))
    return compressor.encode(flat, seed=0).numpy().tobytes()


def decode(data: bytes, compressor: ALQ = COMPRESSOR) -> torch.Tensor:
    return compressor.decode(oracle.received(data))


@pytest.fixture(autouse=True)
def no_wild_allocations(monkeypatch):
    """Nothing larger than a few kilobytes may be asked for on behalf of these small payloads."""

    def guarded(allocate):
        def call(*size, **keywords):
            first = size[0] if size else keywords["size"]
            count = np.prod([int(n) for n in np.atleast_1d(np.array(first, dtype=object))])
            assert count < 100_000, f"{count} elements"
            return allocate(*size, **keywords)

        return call

    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, guarded(getattr(torch, name)))


LIES = [
    *({"coordinates": n} for n in (0, 1, 20, N + 200, *HUGE)),
    *({"coordinates": n, "full": n} for n in (N, *HUGE)),
    *({"full": n} for n in (1, N, N + 1, *HUGE)),
    *({"coordinates": n, "full": n - N} for n in HUGE),
    *({"bucket_size": n} for n in (0, 1, BUCKET - 1, BUCKET + 1, *HUGE)),
    *({"length": n} for n in (0, 1, 95, 96, 100, *HUGE)),
    *({"alphabet": n} for n in (0, 1, 2, 4, 16, 256, 2**32 - 1)),
    *({"dtype": n} for n in (0, 5, 255)),
    *({"coding": n} for n in (1, 2, 255)),
    *({"zeros": n} for n in (1, 2**31)),
    *({"format": n} for n in (0, 2, 65535)),
    *({"scheme": name} for name in (b"", b"qsgd", b"alqq", b"\xff" * 16, b"alq\0\0x", b"ALQ")),
]


@pytest.mark.parametrize("compressor", (COMPRESSOR, FULL_TAIL), ids=("quantize", "full"))
def test_lies_in_the_header(compressor):
    payload = payload_of(compressor)
    assert oracle.forge(payload) == payload, "the forger's checksum is right"
    assert torch.equal(
        decode(oracle.forge(payload, layout=7), compressor), decode(payload, compressor)
    )
    for lie in LIES:
        with pytest.raises(PayloadError):
            decode(oracle.forge(payload, **lie), compressor)
            pytest.fail(str(lie))
    for change in (-64, -16, -8, -4, -1, 1, 4, 8, 64):
        other = payload[:change] if change < 0 else payload + bytes(change)
        with pytest.raises(PayloadError):
            decode(oracle.forge(other, length=len(other)), compressor)


@pytest.mark.parametrize("name", [*EVERY, "alq-3-symmetric-huffman", "qsgd-3-elias"])
def test_lies_about_lengths(name):
    """Of every scheme: refused, or so many numbers as the header says, a bucket more at most."""
    compressor, n = scheme(name)(bucket_size=BUCKET), 5 * BUCKET + 30
    flat = torch.from_numpy(np.random.default_rng(0).standard_normal(n).astype(np.float32) ** 3)
    if hasattr(compressor, "fit"):
        compressor.fit(flat)
    payload = compressor.encode(flat, seed=0).numpy().tobytes()
    counts = (0, 1, n - 50, n + 50, n + BUCKET, *HUGE)
    for field, count in ((field, c) for field in ("coordinates", "full") for c in counts):
        try:
            decoded = decode(oracle.forge(payload, **{field: count}), compressor)
        except PayloadError:
            continue
        assert count <= n + BUCKET and decoded.numel() == (count if field == "coordinates" else n)
    for size in (*range(96, len(payload), 8), len(payload) + 8, len(payload) + 2**16):
        other = oracle.forge(payload[:size].ljust(size, b"\0"), length=size)
        try:  # a stream of gaps may end early
            assert decode(other, compressor).numel() == n and name == "sparse-0.2"
        except PayloadError:
            continue
        assert size <= len(payload) + 8


def test_another_table_version_is_named():
    ours, theirs = ALQ(bits=3, bucket_size=BUCKET), ALQ(bits=3, bucket_size=BUCKET)
    theirs.fit(torch.from_numpy(np.random.default_rng(1).standard_normal(6400).astype(np.float32)))
    with pytest.raises(PayloadError, match="table version 1, this compressor 0"):
        decode(payload_of(theirs), ours)
    with pytest.raises(PayloadError, match="table version 0, this compressor 1"):
        decode(payload_of(ours), theirs)


@pytest.mark.parametrize("offset", (0, 1, 4))
def test_views_of_larger_buffers_are_read_right(offset):
    """Strided and misaligned payloads: decoded as they are, not misread."""
    payload = oracle.received(payload_of())
    buffer = torch.full((payload.numel() * 3 + 16,), 0xAA, dtype=torch.uint8)
    for step in (1, 3):
        view = buffer[offset : offset + step * payload.numel() : step]
        view.copy_(payload)
        assert torch.equal(COMPRESSOR.decode(view), COMPRESSOR.decode(payload))
