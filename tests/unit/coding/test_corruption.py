"""Damage between encode and decode, to payloads of every scheme and coding: with a checksum all of
it is told; without one nothing is read out of bounds, and nothing but PayloadError is raised."""

from __future__ import annotations

import fuzz
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive import ALQ, PayloadError, Tuning
from hvd_adaptive.coding.payload import read_header

SCHEMES = {checksum: fuzz.subjects(3, checksum) for checksum in (True, False)}
ROOM = fuzz.GuardedPage(3 * max(len(data) for _, data in SCHEMES[True].values()))
LABELS = st.sampled_from(list(fuzz.CASES))
place = st.floats(0, 1, exclude_max=True)


def flipped(data: bytes, at: float, to: float) -> bytes:
    """One bit, anywhere."""
    bit, changed = int(at * 8 * len(data)), bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def truncated(data: bytes, at: float, to: float) -> bytes:
    return data[: int(at * len(data))]


def lengthened(data: bytes, at: float, to: float) -> bytes:
    """A slice twice; all of it where both places are 0."""
    low, high = sorted((int(at * len(data)), int(to * len(data))))
    return data[:high] + data[low:] if high > low else data + data


def swapped(data: bytes, at: float, to: float) -> bytes:
    """Two words in each other's place."""
    words = [data[i : i + 4] for i in range(0, len(data), 4)]
    i, j = int(at * len(words)), int(to * len(words))
    words[i], words[j] = words[j], words[i]
    return b"".join(words)


DAMAGE = st.sampled_from((flipped, truncated, lengthened, swapped))


@settings(max_examples=400)
@given(LABELS, DAMAGE, place, place)
def test_all_damage_is_told(label, damage, at, to):
    compressor, payload = SCHEMES[True][label]
    bad = damage(payload, at, to)
    if bad != payload:
        with pytest.raises(PayloadError):
            compressor.decode(ROOM.holding(bad))


@settings(max_examples=400)
@given(LABELS, DAMAGE, place, place)
def test_without_a_checksum_nothing_is_read_out_of_bounds(label, damage, at, to):
    compressor, payload = SCHEMES[False][label]
    bad = ROOM.holding(damage(payload, at, to))
    try:
        decoded = compressor.decode(bad)
    except PayloadError:
        return
    assert decoded.numel() == read_header(bad).coordinates


def test_checksum_off_is_none():
    """The same bytes but for the checksum, which is 0; and a flipped bit is a wrong number."""
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    on, off = (
        ALQ(bits=3, bucket_size=64, tuning=Tuning(checksum=checksum)) for checksum in (True, False)
    )
    with_sum, without = on.encode(flat, seed=1), off.encode(flat, seed=1)
    assert (with_sum != without).nonzero().flatten().tolist() == [12, 13, 14, 15]
    assert read_header(without).checksum == 0
    without[98] ^= 64  # of the first scale
    assert not torch.equal(off.decode(without), on.decode(with_sum))
    with pytest.raises(PayloadError, match="checksum"):
        on.decode(without)
