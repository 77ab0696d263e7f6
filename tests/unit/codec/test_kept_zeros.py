"""Exact zeros in payloads: kept by every scheme, without codes where there is no level for them."""

from __future__ import annotations

import struct

import pytest
import torch
import unit_oracles as oracle
from scheme_cases import CASES, EVERY, has_level_zero, scheme

from hvd_adaptive import ALQ, PayloadError, Tuning
from hvd_adaptive.coding.payload import SIZE, Frame, read_header
from hvd_adaptive.feedback import Residuals
from hvd_adaptive.kernels.numba import zeros as kernels

BUCKET = 128
KINDS = (
    *(*EVERY, "alq-3-paper", "alq-3-symmetric-huffman", "amq-4-symmetric", "bingrad-biased"),
    *("nuqsgd-5-p0.8-symmetric", "qsgd-3-elias", "qsgd-3-symmetric"),
)


def make(name: str, **keywords):
    return scheme(name)(**{"bucket_size": BUCKET, "min_numel": 0, "keep_zeros": True} | keywords)


def gradient(count: int, seed: int = 0, zeros: float = 0.5) -> torch.Tensor:
    """A zero row, a share of scattered zeros of both signs, a row without zeros."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(count, generator=generator)
    scattered = torch.rand(count, generator=generator) < zeros
    scattered[: count // 4] = False
    flat[scattered] = 0.0
    flat[count // 2 : count // 2 + count // 8] = -0.0
    return flat


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_zeros_stay_zeros(name):
    compressor = make(name)
    for count in (1, 5, BUCKET, 1000):
        for zeros in (0.0, 0.3, 1.0):
            flat = gradient(count, zeros=zeros)
            decoded = compressor.decode(compressor.encode(flat, seed=1))
            assert not decoded[flat == 0].any() and decoded.isfinite().all()
    assert compressor.parts.default.has_zero == has_level_zero(name)


@pytest.mark.parametrize("name", KINDS)
def test_the_keyword_changes_schemes_without_a_level_zero_alone(name):
    flat = gradient(1000)
    kept, rounded = (make(name, keep_zeros=keep) for keep in (True, False))
    dense = [compressor.encode(flat[flat != 0], seed=1) for compressor in (kept, rounded)]
    assert torch.equal(*dense) and read_header(dense[0]).zeros == 0
    payloads = [compressor.encode(flat, seed=1) for compressor in (kept, rounded)]
    assert torch.equal(*payloads) == has_level_zero(name)
    assert read_header(payloads[1]).zeros == 0
    if not has_level_zero(name):
        with pytest.raises(PayloadError, match="leaves zeros out"):
            rounded.decode(payloads[0])
        assert torch.equal(kept.decode(payloads[1]), rounded.decode(payloads[1]))


@pytest.mark.many
@pytest.mark.parametrize("name", [name for name in CASES if not has_level_zero(name)])
@pytest.mark.parametrize("tail", ["quantize", "full"])
def test_the_body_is_that_of_the_other_coordinates(name, tail):
    """Same key, same buckets: the payload is one of them and the places of the zeros."""
    compressor, flat = make(name, tail=tail), gradient(1000)
    quantized = 1000 if tail == "quantize" else 1000 // BUCKET * BUCKET
    there = flat[:quantized] != 0
    payload = compressor.encode(flat, seed=1)
    alone = make(name).encode(flat[:quantized][there], seed=1)
    full = flat[quantized:].numpy().tobytes()
    mask, runs = kernels.mark(flat[:quantized])
    section = struct.pack("<QQ", runs.zeros, runs.runs)
    section += kernels.write(mask, runs).numpy().tobytes()
    assert payload.numpy().tobytes()[SIZE:] == alone.numpy().tobytes()[SIZE:] + section + full
    assert read_header(payload).zeros == len(section)
    decoded = compressor.decode(payload)
    assert torch.equal(decoded[:quantized][there], make(name).decode(alone))
    assert torch.equal(decoded[quantized:], flat[quantized:])
    most = compressor.parts.default.payloads.most_length(quantized, 1000 - quantized, torch.float32)
    assert payload.numel() <= most


def test_zeros_are_those_of_float32():
    """A float64 below float32's range is one; the least float16 is none."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        flat = gradient(300).to(dtype)
        flat[:3] = torch.tensor([1e-60, 6e-8, -0.0], dtype=torch.float64).to(dtype)
        decoded = make("eden-4").decode(make("eden-4").encode(flat, seed=1))
        zeros = flat.to(torch.float32) == 0
        assert not decoded[zeros].any() and decoded[~zeros].to(torch.bool).float().mean() > 0.95


@pytest.mark.many
@pytest.mark.parametrize("same", [False, True], ids=["different zeros", "the same zeros"])
@pytest.mark.parametrize("name", EVERY)
def test_a_sum_adds_each_payload_where_it_is_not_zero(name, same):
    """In order, in float32; with the same rotation EDEN adds before it rotates back."""
    codec, frame = make(name).parts.default, Frame(1000, 100, torch.float32, 0)
    flats = [gradient(1000), gradient(1000, 0 if same else 2), gradient(1000, zeros=0.0)]
    if same:
        flats = [flat.where(flats[0] != 0, 0) for flat in flats]
    else:
        flats.insert(1, gradient(1000, 3).where(gradient(1000, 3) != 0, 1.0))
    payloads = [codec.payloads.encode(flat, 900, key).bytes for key, flat in enumerate(flats)]
    found = codec.payloads.sum(payloads, frame, 0.25)
    values = [codec.payloads.sum([payload], frame, 1.0) for payload in payloads]
    total = torch.zeros(1000)
    for value, flat in zip(values, flats, strict=True):
        assert not value[flat == 0].any()
        total += value
    if name in ("eden-2", "drive"):
        torch.testing.assert_close(found, total * 0.25, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(found, total * 0.25)
    assert not found[torch.stack(flats).eq(0).all(dim=0)].any()


@pytest.mark.parametrize("name", ["alq-3-paper", "eden-2", "ecdq-2", "signsgd"])
def test_what_is_there_is_added_to(name):
    """As residuals need it: out becomes factor · (out + values), zeros of the payload included."""
    codec, flat = make(name).parts.default, gradient(1000)
    payload = codec.payloads.encode(flat, 1000, 5)
    out = torch.linspace(-1, 1, 1000)
    codec.payloads.add([payload], -0.5, out)
    wanted = -0.5 * (
        torch.linspace(-1, 1, 1000) + codec.payloads.sum([payload.bytes], payload.header, 1.0)
    )
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(out[flat == 0], -0.5 * torch.linspace(-1, 1, 1000)[flat == 0])


@pytest.mark.parametrize("name", EVERY)
def test_residuals_of_zeros_are_zeros(name):
    """Where neither a gradient nor a residual is, nothing comes to be; a residual is sent later."""
    codec, residuals = make(name).parts.default, Residuals(0.5)
    sent = torch.zeros(1000)
    total = torch.zeros(1000)
    never = gradient(1000) == 0
    for step in range(3):
        flat = gradient(1000, step).where(~never, 0)
        total += flat
        z = residuals.added(0, flat.clone())
        payload = codec.payloads.encode(z, 1000, step)
        sent += codec.payloads.sum([payload.bytes], payload.header, 1.0)
        residuals.commit({0: residuals.after(0, z, codec, [payload])})
    held = residuals._current[0]
    assert not held[never].any() and not sent[never].any()
    scale = float(sent.abs().max() + held.abs().max())
    torch.testing.assert_close(sent + held, total, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "name", ["alq-3-paper", "qsgd-4-linf-symmetric-clip2.0", "eden-2", "ecdq-2", "qcs", "orq-5"]
)
def test_the_error_is_that_of_the_payload(name):
    codec, flat = make(name).parts.default, gradient(1000)
    payload = codec.payloads.encode(flat, 1000, 5)
    decoded = codec.payloads.sum([payload.bytes], payload.header, 1.0)
    torch.testing.assert_close(codec.payloads.roundtrip(flat, 5), decoded, rtol=1e-5, atol=1e-6)
    found = codec.payloads.squared_errors(flat, 5)
    parts = zip((decoded - flat).double().split(BUCKET), flat.double().split(BUCKET), strict=True)
    wanted = [[float(e.square().sum()), float(v.square().sum())] for e, v in parts]
    torch.testing.assert_close(
        found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-4, atol=1e-5
    )


# Wrong descriptions -------------------------------------------------------------------------------


LARGE = (2**63, 2**64 - 1)
WRONG = {0: (0, 1, 1001, *LARGE), 8: (0, 501, *LARGE), 16: (0, 2**64 - 1)}


@pytest.mark.parametrize("name", ["signsgd", "ecdq-2", "eden-2", "alq-3-symmetric-huffman"])
def test_numbers_that_are_wrong(name):
    """With the right checksum: of zeros, of runs, of the first run; a section's length."""
    compressor = make(name)
    good = compressor.encode(gradient(1000), seed=1).numpy().tobytes()
    begin = len(good) - oracle.read_field(good, "zeros")
    for at, value in ((at, value) for at, values in WRONG.items() for value in values):
        data = bytearray(good)
        struct.pack_into("<Q", data, begin + at, value)
        with pytest.raises(PayloadError):
            compressor.decode(oracle.forged(bytes(data)))
    for value in (0, 8, 16, 20, 24, 1000, 2**31, 2**32 - 8):
        with pytest.raises(PayloadError):
            compressor.decode(oracle.forged(good, zeros=value))


# Fits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alq-3-paper", "alq-3-symmetric-huffman", "amq-3-paper"])
def test_a_fit_is_to_the_coordinates_that_are_quantised(name):
    flat = gradient(40 * BUCKET, 4)
    fitted, wanted = make(name), make(name)
    fitted.fit(flat)
    wanted.fit(flat[flat != 0])
    assert fitted.parts.default.table_fingerprint == wanted.parts.default.table_fingerprint
    rounded = make(name, keep_zeros=False)
    rounded.fit(flat)
    assert rounded.parts.default.table_fingerprint != wanted.parts.default.table_fingerprint


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_samples_in_training_are_like_whole_buckets(norm):
    """Half of each sampled bucket is zero. A table that is fitted to the other half, filled up, is
    as good for buckets without zeros as one that is fitted to these, and better than one that is
    fitted to the zeros, too."""
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(200, 1024, generator=generator) ** 3
    sparse = dense * (torch.rand(200, 1024, generator=generator) < 0.5)

    def error(buckets: torch.Tensor, **keywords) -> float:
        keywords = {"keep_zeros": True, "bucket_size": 1024} | keywords
        codec = ALQ(bits=3, norm=norm, symmetric=True, **keywords).parts.default
        codec.apply_update(codec.refit([codec.collect(list(buckets))]), 0)
        return float(codec.payloads.squared_errors(dense.view(-1), 0)[:, 0].sum())

    best = error(dense)
    assert error(sparse) < 1.01 * best
    assert error(sparse, keep_zeros=False) > 1.03 * best


def test_coverage_still_counts_zeros():
    """A fit to samples that are half zero is repeated soon: whole tensors may have had none yet."""
    bucket = gradient(1024)
    for keep in (True, False):
        codec = ALQ(bits=3, symmetric=True, bucket_size=1024, keep_zeros=keep).parts.default
        head = codec.collect([bucket, torch.zeros(1024)])[:5].tolist()
        assert head == [1, 2, 0, int((bucket != 0).sum()), 2048]


@pytest.mark.parametrize(("share", "rows"), [(0.9, True), (0.5, False), (0.25, True)])
def test_a_fit_of_ecdq_meets_its_budget_over_all_coordinates(share, rows):
    """What the zeros save is spent on the others, less what their places take."""
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(8192, 64, generator=generator)
    flat[torch.rand(8192, 1 if rows else 64, generator=generator).expand(-1, 64) > share] = 0
    scheme = make("ecdq-2", bucket_size=8192)
    scheme.fit(flat)
    bits = 8 * scheme.encode(flat.view(-1), seed=1).numel() / flat.numel()
    assert bits == pytest.approx(2, rel=0.03)


# The keyword --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_averages_are_encoded_alike(name):
    keywords = {"bucket_size": 64, "seed": 7, "tuning": Tuning(checksum=False), "keep_zeros": True}
    second = scheme(name)(**keywords).parts.default.second_codec(4)
    assert {keyword: getattr(second.settings, keyword) for keyword in keywords} == keywords
    assert second.has_zero or second.leaves_zeros_out


def test_it_changes_in_training_and_ranks_must_agree_on_it():
    compressor = make("signsgd")
    flat, before = gradient(300), compressor.parts.default.settings_fingerprint
    compressor.set(keep_zeros=False)
    assert compressor.parts.default.settings_fingerprint != before
    assert read_header(compressor.encode(flat, seed=1)).zeros == 0
