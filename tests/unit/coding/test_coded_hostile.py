"""Coded payloads with a right checksum and a wrong stream: PayloadError, nothing out of bounds."""

from __future__ import annotations

import os
import signal

import fuzz
import numpy as np
import pytest
import torch
import unit_oracles as oracle

from hvd_adaptive import ALQ, PayloadError, TernGrad
from hvd_adaptive.coding import coders

N, BUCKET, SEGMENT = 2500, 500, 600
MADE = {
    "alq": lambda: ALQ(bits=3, symmetric=True, bucket_size=BUCKET, coding="huffman"),
    "terngrad": lambda: TernGrad(clip=None, bucket_size=BUCKET, coding="huffman"),
    "terngrad elias": lambda: TernGrad(bucket_size=BUCKET, clip=None, coding="elias"),
}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(coders, "SEGMENT", SEGMENT)


@pytest.fixture(params=MADE)
def case(request):
    """Compressor, payload, where its offsets begin, how many there are."""
    compressor = MADE[request.param]()
    flat = torch.randn(N, generator=torch.Generator().manual_seed(0)) ** 3
    compressor.fit(flat)
    payload = compressor.encode(flat, seed=0).numpy().tobytes()
    assert oracle.read_field(payload, "coding") in (1, 2)
    segments = -(-N // compressor.parts.default.coder.segment)
    assert segments > 2
    return compressor, payload, 96 + 4 * (N // BUCKET), segments


def decode(compressor, data: bytes) -> torch.Tensor:
    return compressor.decode(oracle.received(data))


def with_ends(payload: bytes, at: int, ends: list[int]) -> bytes:
    data = bytearray(payload)
    data[at : at + 4 * len(ends)] = np.array(ends, np.int64).astype("<u4").tobytes()
    return oracle.forge(bytes(data))


def ends_of(payload: bytes, at: int, count: int) -> list[int]:
    return np.frombuffer(payload, "<u4", count, at).tolist()


def test_offsets_that_cannot_be(case):
    compressor, payload, at, count = case
    ends = ends_of(payload, at, count)
    assert with_ends(payload, at, ends) == payload
    assert decode(compressor, payload).numel() == N
    first, last = ends[:-1], ends[1:]
    lies = [[0] * count, [2**32 - 1] * count, ends[::-1]]
    lies += [[*first, end] for end in (ends[-2], ends[-1] + 8, ends[-1] - 8, 2**31, 2**32 - 1)]
    lies += [[end, *last] for end in (0, 1, ends[0] - 1, ends[0] + 1, ends[1], 2**31)]
    for lie in lies:
        with pytest.raises(PayloadError):
            decode(compressor, with_ends(payload, at, lie))


def test_every_changed_padding_bit_is_refused(case):
    """Behind each segment's last code, and behind the stream."""
    compressor, payload, at, count = case
    first, refused = at + 4 * count, 0
    for end in ends_of(payload, at, count):
        for bit in range(8):
            data = bytearray(payload)
            # Huffman fills bytes from their lowest bit, Elias from the highest.
            place = 7 - bit if compressor.settings.coding == "huffman" else bit
            data[first + end - 1] ^= 1 << place
            try:
                decode(compressor, oracle.forge(bytes(data)))
                break  # a bit of a code
            except PayloadError:
                refused += 1
    for place in range(first + end, len(payload)):
        data = bytearray(payload)
        data[place] = 1
        with pytest.raises(PayloadError, match=r"not 0|offsets"):
            decode(compressor, oracle.forge(bytes(data)))
    assert refused > 0


def test_bodies_of_another_coding(case):
    compressor, payload, _, _ = case
    with pytest.raises(PayloadError):
        decode(compressor, oracle.forge(payload, coding=0))
    size = 96 + -(-compressor.parts.default.body_bytes(N) // 8) * 8
    fixed = payload[:96] + bytes(size - 96)
    fixed = oracle.forge(fixed, coding=0, length=size)
    assert decode(compressor, fixed).numel() == N
    coding = oracle.read_field(payload, "coding")
    with pytest.raises(PayloadError, match="would have"):
        decode(compressor, oracle.forge(fixed, coding=coding))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_guarded_page_is_guarded():
    """The fuzzer would notice a read behind a payload."""
    tensor = fuzz.GuardedPage(100).holding(bytes(64))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        np.lib.stride_tricks.as_strided(tensor.numpy(), (72,), (1,)).sum()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_mutated_payloads():
    """``python benchmarks/fuzz.py`` does this a million times."""
    outcomes = fuzz.fuzz(3000, seed=1)
    for label in fuzz.CASES:
        assert outcomes[f"{label}: refused"] > 20 and outcomes[f"{label}: decoded"] > 0, label
