"""docs/wire_format.md is enough to read payloads: a decoder written from it alone, put to use."""

from __future__ import annotations

import ast
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import wire_decoder as wire
from scheme_cases import EVERY, PAPER, scheme, schemes

from hvd_adaptive import (
    ALQ,
    ECDQ,
    EDEN,
    QCS,
    QSGD,
    BinGrad,
    TernGrad,
)

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "wire_format.md").read_text(encoding="utf-8")


def gradient(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Heavy tails, and buckets of zeros and of a NaN."""
    rng = np.random.default_rng(seed)
    flat = torch.from_numpy((rng.standard_normal(count) ** 3).astype(np.float32))
    flat[700:1400] = 0
    return flat.to(dtype)


def known_to(scheme) -> wire.Known:
    """What a receiver knows without the payload."""
    codec = scheme.parts.default
    found = {"level_dtype": getattr(codec, "level_dtype", "float32")}
    for name in ("measurements", "quantizer_range", "estimator", "density"):
        if hasattr(codec, name):
            found[name] = getattr(codec, name)
    if hasattr(codec, "table"):
        found |= {"levels": codec.levels.numpy(), "probabilities": codec.table.probabilities}
    if isinstance(scheme, BinGrad):
        found["numbers"] = {"biased": 2, "partially_biased": 1}[codec.variant]
    if isinstance(scheme, ECDQ):
        found["probabilities"] = codec.code.probabilities
    if isinstance(scheme, EDEN):
        found |= {"levels": codec.levels, "share": min(codec.bits, 1.0)}
    return wire.Known(**found)


SMALL = {"bucket_size": 300}
SCHEMES = {
    **{f"alq-{b}": lambda b=b: ALQ(bits=b, **SMALL) for b in (2, 3, 5, 8)},
    **{f"alq-{b}-paper": lambda b=b: ALQ(bits=b, **PAPER, **SMALL) for b in (2, 3, 5, 8)},
    "amq": scheme("amq-4", **SMALL),
    "amq-symmetric": scheme("amq-4-symmetric", **SMALL),
    "nuqsgd": scheme("nuqsgd-6", **SMALL),
    **{f"qsgd-{s}": lambda s=s: QSGD(intervals=s, **SMALL) for s in (1, 2, 4, 7, 127)},
    "qsgd-symmetric": scheme("qsgd-3-symmetric", **SMALL),
    "terngrad": scheme("terngrad", **SMALL),
    "orq": scheme("orq-5", **SMALL),
    "orq-float16": scheme("orq-9-half", **SMALL),
    "linear": scheme("quantile-9", **SMALL),
    "bingrad-biased": scheme("bingrad-biased", **SMALL),
    "bingrad": scheme("bingrad", **SMALL),
    "signsgd": scheme("signsgd", **SMALL),
    "onebit": scheme("onebit", **SMALL),
    "natural": scheme("natural", **SMALL),
    **{f"sparse-{d}": scheme(f"sparse-{d}", **SMALL) for d in (0.05, 0.3, 1.0)},
    "huffman-2": lambda: fitted(ALQ(bits=2, symmetric=True, coding="huffman", **SMALL)),
    "huffman-8": lambda: fitted(ALQ(bits=8, coding="huffman", **SMALL)),
    "huffman-ternary": lambda: fitted(TernGrad(coding="huffman", **SMALL)),
    "elias": scheme("qsgd-3-elias", **SMALL),
    "ecdq": scheme("ecdq-1.5", **SMALL),
    "ecdq-fine": scheme("ecdq-variance0.0001", **SMALL),
    "ecdq-fitted": lambda: fitted(ECDQ(bits=2.5, **SMALL)),
}


def fitted(scheme):
    scheme.fit(gradient(6000, seed=1))
    return scheme


def read(payload: torch.Tensor, scheme) -> tuple[dict, np.ndarray]:
    return wire.decode(payload.numpy().tobytes(), known_to(scheme))


def bucket_of(place: int, flat: torch.Tensor, scheme) -> np.ndarray:
    """Which coordinates share a bucket with that at ``place``: zeros may be in none."""
    inside = torch.ones_like(flat, dtype=torch.bool)
    if scheme.settings.keep_zeros and not scheme.parts.default.has_zero:
        inside = flat != 0
    buckets = (inside.cumsum(0) - 1) // scheme.settings.bucket_size
    return (inside & (buckets == buckets[place])).numpy()


def largest(values: np.ndarray) -> float:
    return np.abs(values[np.isfinite(values)]).max(initial=0)


@pytest.mark.many
@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("name", SCHEMES)
def test_payloads_are_read_bit_for_bit(name, keep):
    scheme, flat = SCHEMES[name](), gradient(2321)
    scheme.set(keep_zeros=keep)
    flat[1500] = torch.nan  # its bucket becomes NaN
    payload = scheme.encode(flat, seed=3)
    head, values = read(payload, scheme)
    np.testing.assert_array_equal(values, scheme.decode(payload).double().numpy())
    np.testing.assert_array_equal(np.isnan(values), bucket_of(1500, flat, scheme))
    assert (values[900:1200] == 0).all() or scheme.name == "linear_quantile"
    assert head["coding"] == {"huffman": 1, "elias": 2}.get(scheme.settings.coding, 0)
    assert head["checksum"] == wire.checksum(payload.numpy().tobytes())


@pytest.mark.many
@pytest.mark.parametrize("name", [name for name in SCHEMES if "huffman" not in name])
@pytest.mark.parametrize("tail", ("quantize", "full"))
def test_lengths(name, tail):
    """Around a bucket's end; no longer than receivers make room for."""
    scheme = SCHEMES[name]()
    scheme.set(tail=tail)
    for count in (0, 1, 2, 299, 300, 301):
        flat, full = gradient(count), count % 300 if tail == "full" else 0
        payload = scheme.encode(flat, seed=1)
        head, values = read(payload, scheme)
        assert (head["coordinates"], head["full"]) == (count, full)
        np.testing.assert_array_equal(values, scheme.decode(payload).double().numpy())
        most = scheme.parts.default.payloads.most_length(count - full, full, torch.float32)
        assert payload.numel() % 8 == 0 and payload.numel() <= most


@pytest.mark.parametrize("bucket_size", (1, 2, 31, 511, 512, 513, 10**6, 2**32 - 1))
def test_buckets_of_any_size(bucket_size):
    for make in (ALQ, partial(ECDQ, relative_variance=0.2), TernGrad):
        scheme = make(bucket_size=bucket_size)
        payload = scheme.encode(gradient(1500), seed=1)
        _, values = read(payload, scheme)
        np.testing.assert_array_equal(values, scheme.decode(payload).double().numpy())


@pytest.mark.parametrize("estimator", ["unbiased", "mmse"])
@pytest.mark.parametrize("n, k, q", [(512, 200, 0.5), (64, 40, 2), (256, 3, 127)])
def test_compressive_sampling(n, k, q, estimator):
    """Sums of float32 in another order: equal but for rounding. Orders that are powers of two."""
    scheme = QCS(bucket_size=n, measurements=k, quantizer_range=q, estimator=estimator)
    for count in (0, 1, n - 1, n, n + n // 2, 1424):
        scheme.set(keep_zeros=count == 1424)
        payload = scheme.encode(gradient(count), seed=3)
        _, values = read(payload, scheme)
        expected = scheme.decode(payload).double().numpy()
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5 * largest(expected))
        assert largest(expected) > 0 or count == 0


@pytest.mark.parametrize(
    "bits, count", [(0.25, 1100), (0.5, 70), (1, 0), (2, 1424), (4, 1), (5, 1024), (8, 70)]
)
@pytest.mark.parametrize("keep", (False, True))
def test_rotated_buckets(bits, count, keep):
    """Sums of float32 in another order: equal but for their rounding."""
    scheme = EDEN(bits=bits, bucket_size=256, seed=5, keep_zeros=keep)
    flat = gradient(count)
    flat[600:601] = torch.nan
    payload = scheme.encode(flat, seed=3)
    _, values = read(payload, scheme)
    expected = scheme.decode(payload).double().numpy()
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5 * largest(values))
    assert np.isnan(values).any() == (count > 600)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_full_precision_tails(dtype):
    scheme, flat = ALQ(bits=3, tail="full", bucket_size=64), gradient(200, dtype=dtype)
    payload = scheme.encode(flat, seed=0)
    head, values = read(payload, scheme)
    assert (head["coordinates"], head["full"]) == (200, 8)
    np.testing.assert_array_equal(values[192:], flat[192:].double().numpy())
    cast = torch.from_numpy(values[:192]).to(dtype)
    assert torch.equal(cast, scheme.decode(payload)[:192])


def test_segments():
    """Streams of several segments, the last one short."""
    scheme = fitted(ALQ(bits=2, coding="huffman", bucket_size=8192))
    payload = scheme.encode(gradient(70_000), seed=0)
    head, values = read(payload, scheme)
    assert head["coding"] == 1
    np.testing.assert_array_equal(values, scheme.decode(payload).double().numpy())


@pytest.mark.parametrize("name", ["huffman-2", "huffman-8", "huffman-ternary", "alq-3", "terngrad"])
def test_fingerprints_of_tables(name):
    scheme = SCHEMES[name]()
    table = scheme.parts.default.table
    own = wire.zlib.crc32(table.magnitudes.astype("<f8").tobytes(), int(table.symmetric))
    if scheme.settings.coding == "huffman":
        book = wire.book_of(table.probabilities)
        own = wire.zlib.crc32(book.fingerprint.to_bytes(4, "little"), own)
    head, _ = read(scheme.encode(gradient(600), seed=0), scheme)
    assert head["table_fingerprint"] == own
    assert head["table_version"] == scheme.parts.default.table_version


def test_every_scheme_is_on_the_page_and_read():
    names = {make().parts.default.name for make in schemes(*EVERY).values()}
    listed = re.search(r"filled with zeros: `([\w ]+)`", PAGE)[1].split()
    assert set(listed) == names == set(wire.BODIES)


def test_the_table_of_packings_is_right():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if line.startswith(("| A |", "| D codes |", "| in bits |"))
    ]
    for alphabets, digits, bits in list(zip(*rows, strict=True))[1:]:
        for alphabet in map(int, alphabets.split(", ")):
            assert wire.packing(alphabet) == (int(digits), int(bits))


def test_the_decoder_stands_alone():
    tree = ast.parse((ROOT / "tests/wire_decoder.py").read_text(encoding="utf-8"))
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= {"numpy", *sys.stdlib_module_names}
