"""ECDQ's payloads, arguments, updates and state."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import unit_oracles
from kernel_cases import heavy, ordinary, vector

from hvd_adaptive import ECDQ, PayloadError
from hvd_adaptive.codec.dithered_code import DitheredCode
from hvd_adaptive.kernels import dithered

BUCKET = 500


def test_integers_that_the_books_do_not_expect_travel_as_they_are():
    """Coordinates far beyond the fitted law: 2 bytes each at most, 4 in buckets that are large."""
    for size, width in ((8192, 2), (100_000, 4)):
        scheme = ECDQ(relative_variance=2e-6, bucket_size=size)
        scheme.fit(torch.cat([torch.ones(1), torch.zeros(size - 1)]))
        flat = vector(ordinary, size)
        payload = scheme.encode(flat, seed=1)
        most = scheme.parts.default.payloads.length(size, 0, torch.float32)
        assert payload.numel() <= most == -(-(96 + 8 + width * size) // 8) * 8
        assert payload.numel() == most or width == 4
        error = (scheme.decode(payload) - flat).square().sum() / flat.square().sum()
        assert float(error) == pytest.approx(2e-6, rel=0.1)


def test_threads_make_the_same_bytes_and_sums():
    flat, scheme = vector(heavy, 300_000), ECDQ(bits=2.0)
    payload = scheme.encode(flat, seed=1)
    decoded = scheme.decode(payload)
    for threads in (2, 9):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(scheme.encode(flat, seed=1), payload)
            assert torch.equal(scheme.decode(payload), decoded)
        finally:
            torch.set_num_threads(1)


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("bits", (2.0, 8.0))
@pytest.mark.parametrize("sign", (1, -1))
def test_a_coordinate_next_to_the_largest_float32_stays_finite(bits, sign):
    """That one where half a step leads beyond it."""
    scheme = ECDQ(bits=bits, bucket_size=64)
    flat = torch.linspace(-1e30, 1e30, 128)
    flat[5] = sign * LARGEST
    # A bucket's root mean square is an eighth of its one huge value here.
    decoded = torch.stack([scheme.decode(scheme.encode(flat, seed=seed)) for seed in range(30)])
    huge, others = sign * decoded[:, 5], decoded[:, torch.arange(128) != 5]
    assert others.isfinite().all() and not decoded.isnan().any()
    assert others.abs().max() < LARGEST / 2 and huge.min() > LARGEST / 2
    assert huge.isfinite().all() and 0 < (huge == LARGEST).sum() < 30


# Hostile payloads ---------------------------------------------------------------------------------

N = 3 * BUCKET + 100
SCHEME = ECDQ(bits=2.0, bucket_size=BUCKET)
HEAD = 96 + 4 + 4 * 4  # header, kind, steps


def good() -> bytes:
    return SCHEME.encode(vector(heavy, N), seed=0).numpy().tobytes()


def changed(at: int, kind: str, value: float) -> torch.Tensor:
    data = bytearray(good())
    struct.pack_into("<" + kind, data, at, value)
    return unit_oracles.forged(bytes(data))


def test_wrong_kinds_and_steps():
    assert unit_oracles.forge(good()) == good()
    for kind in (1, 2, 3, 4, 2**32 - 1):
        with pytest.raises(PayloadError):
            SCHEME.decode(changed(96, "I", kind))
    for step in (-1.0, -1e-30, np.inf, -np.inf):
        with pytest.raises(PayloadError, match="steps"):
            SCHEME.decode(changed(100, "f", step))
    for step in (0.0, np.nan):  # a bucket that claims to be empty leaves symbols over
        with pytest.raises(PayloadError, match="segment 0"):
            SCHEME.decode(changed(100, "f", step))


@pytest.mark.parametrize("which", (0, 4))
def test_ends_that_lie(which):
    (end,) = struct.unpack_from("<I", good(), HEAD + which)
    for change in (-4096, -9, -1, 1, 9, 4096, 2**31, 2**32 - 1):
        with pytest.raises(PayloadError):
            SCHEME.decode(changed(HEAD + which, "I", (end + change) % 2**32))


# Updates and state --------------------------------------------------------------------------------


def test_ranks_agree_after_an_update():
    """Rank 0 fits what both have sampled; both have the same code, and read each other."""
    ranks = [ECDQ(bits=1.5, bucket_size=BUCKET) for _ in range(2)]
    codecs = [rank.parts.default for rank in ranks]
    flats = [vector(heavy, 20 * BUCKET, seed) for seed in range(2)]
    for round_ in range(2):
        own = [c.collect(f.split(BUCKET)) for c, f in zip(codecs, flats, strict=True)]
        update = codecs[0].refit(own)
        assert all(c.apply_update(update, round_) for c in codecs)
        sent = [c.payloads.encode(f, f.numel(), 3) for c, f in zip(codecs, flats, strict=True)]
        payload = sent[0].bytes
        assert torch.equal(ranks[1].decode(payload), ranks[0].decode(payload))
        assert all(c.table_version == round_ + 1 for c in codecs)
        if round_ == 0:  # nothing has been sent: it is the fit of all buckets
            alone = ECDQ(bits=1.5, bucket_size=BUCKET)
            alone.fit(flats)
            assert alone.parts.default.code.fingerprint == codecs[1].code.fingerprint
        for codec, own_payload in zip(codecs, sent, strict=True):
            codec.count(own_payload)
    with pytest.raises(PayloadError, match="table"):
        alone.decode(payload)


def test_a_fixed_variance_stays():
    scheme = ECDQ(relative_variance=0.1, bucket_size=BUCKET)
    codec, flat = scheme.parts.default, vector(heavy, 40 * BUCKET)
    before, first = codec.alphabet, scheme.encode(flat).numel()
    scheme.fit(flat)
    assert codec.relative_variance == pytest.approx(0.1) and codec.alphabet != before
    assert scheme.encode(flat).numel() < first


@pytest.mark.parametrize("bits", (0.8, 2.0))
def test_averages_have_a_step_of_their_own(bits):
    """The second stage adds less than the variance of an average over four ranks, also where
    gradients are heavy-tailed and the same on all ranks, the worst case."""
    scheme, flat = ECDQ(bits=bits), vector(heavy, 8192)
    second = scheme.parts.default.second_stage(4).codec
    decoded = [scheme.decode(scheme.encode(flat, seed=s)) for s in range(4)]
    average = torch.stack(decoded).mean(dim=0)
    first = scheme.parts.default.relative_variance * float(flat.double().square().sum()) / 4
    error = second.payloads.roundtrip(average, 9).double() - average
    assert float(error.square().sum()) < first
    assert scheme.parts.default.second_stage(4).bits <= bits + 3


def test_state_of_others_is_refused():
    scheme = ECDQ(bits=2.0, bucket_size=BUCKET)
    scheme.fit(vector(heavy, 5000))
    state = scheme.state_dict()
    code = state["code"]
    broken = {"delta": code * 100, "probabilities": code[:-1], "negative": -code + 2 * code[0]}
    broken["infinite"] = torch.cat([code[:-1], torch.tensor([torch.inf])])
    for numbers in broken.values():
        with pytest.raises(ValueError):
            scheme.load_state_dict(state | {"code": numbers})
    rates = ([torch.nan] * 4, [1.0] * 5, [1, 0, 1, 1], [1, 1, -1, 1])
    for entry, wrong in {"rate": rates, "sent": ([torch.inf, 1], [1.0], [1, -1])}.items():
        for numbers in wrong:
            with pytest.raises(ValueError, match=entry):
                scheme.load_state_dict(state | {entry: torch.tensor(numbers)})
    kept = DitheredCode.from_numbers(code.numpy())
    assert scheme.parts.default.code.fingerprint == kept.fingerprint
    with pytest.raises(ValueError, match="relative_variance"):
        ECDQ(relative_variance=0.1).load_state_dict(state)


def test_buffers_of_other_lengths_are_refused():
    with pytest.raises(PayloadError, match="too short"):
        body, code = torch.zeros(7, dtype=torch.uint8), SCHEME.parts.default.code
        dithered.add_bodies([body], 10, code, [0], 2, torch.zeros(100))
