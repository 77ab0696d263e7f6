"""docs/wire_format.md is enough to read payloads: a decoder written from it alone, put to use."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wire_decoder as wire
from scheme_cases import EVERY, PAPER, schemes

from hvd_adaptive import ALQ, ECDQ, EDEN, QCS, QSGD, TernGrad

from oracle.in_force import known_of  # isort: skip

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "wire_format.md").read_text(encoding="utf-8")


def gradient(count: int, seed: int = 0) -> torch.Tensor:
    """Heavy tails, and buckets of zeros."""
    rng = np.random.default_rng(seed)
    flat = torch.from_numpy((rng.standard_normal(count) ** 3).astype(np.float32))
    flat[700:1400] = 0
    return flat


SMALL = {"bucket_size": 300}
SCHEMES = {
    **{f"alq-{b}": lambda b=b: ALQ(bits=b, **SMALL) for b in (2, 3, 5, 8)},
    **{f"alq-{b}-paper": lambda b=b: ALQ(bits=b, **PAPER, **SMALL) for b in (2, 3, 5, 8)},
    **{f"qsgd-{s}": lambda s=s: QSGD(intervals=s, **SMALL) for s in (1, 2, 4, 7, 127)},
    **schemes(
        *("amq-4", "amq-4-symmetric", "nuqsgd-6", "qsgd-3-symmetric", "qsgd-3-elias", "terngrad"),
        *("orq-5", "orq-9-half", "quantile-9", "bingrad-biased", "bingrad", "signsgd", "onebit"),
        *("natural", "sparse-0.05", "sparse-0.3", "sparse-1.0", "ecdq-1.5", "ecdq-variance0.0001"),
        **SMALL,
    ),
    "huffman-2": lambda: fitted(ALQ(bits=2, symmetric=True, coding="huffman", **SMALL)),
    "huffman-8": lambda: fitted(ALQ(bits=8, coding="huffman", **SMALL)),
    "huffman-ternary": lambda: fitted(TernGrad(coding="huffman", **SMALL)),
    "ecdq-fitted": lambda: fitted(ECDQ(bits=2.5, **SMALL)),
}


def fitted(scheme):
    scheme.fit(gradient(6000, seed=1))
    return scheme


def read(
    scheme, flat: torch.Tensor, rtol: float = 0.0
) -> tuple[torch.Tensor, dict[str, Any], np.ndarray]:
    """A payload, its header and values, which are those that the scheme decodes."""
    payload = scheme.encode(flat, seed=3)
    head, values = wire.decode(payload.numpy().tobytes(), known_of(scheme))
    wanted = scheme.decode(payload).double().numpy()
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    np.testing.assert_allclose(values, wanted, rtol=rtol, atol=rtol * largest)
    return payload, head, values


def bucket_of(place: int, flat: torch.Tensor, scheme) -> np.ndarray:
    """Which coordinates share a bucket with that at ``place``: zeros may be in none."""
    inside = torch.ones_like(flat, dtype=torch.bool)
    if scheme.settings.keep_zeros and not scheme.parts.default.has_zero:
        inside = flat != 0
    buckets = (inside.cumsum(0) - 1) // scheme.settings.bucket_size
    return (inside & (buckets == buckets[place])).numpy()


@pytest.mark.many
@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("name", SCHEMES)
def test_payloads_are_read_bit_for_bit(name, keep):
    scheme, flat = SCHEMES[name](), gradient(2321)
    scheme.set(keep_zeros=keep)
    flat[1500] = torch.nan  # its bucket becomes NaN
    payload, head, values = read(scheme, flat)
    np.testing.assert_array_equal(np.isnan(values), bucket_of(1500, flat, scheme))
    assert (values[900:1200] == 0).all() or scheme.name == "linear_quantile"
    assert head["coding"] == {"huffman": 1, "elias": 2}.get(scheme.settings.coding, 0)
    assert head["checksum"] == wire.checksum(payload.numpy().tobytes())
    assert (head["bucket_size"], head["layout"]) == (300, 0)
    assert head["key"] == wire.stream(3, 0, 0, 2**63)


@pytest.mark.many
@pytest.mark.parametrize("name", [name for name in SCHEMES if "huffman" not in name])
@pytest.mark.parametrize("tail", ("quantize", "full"))
def test_lengths(name, tail):
    """Around a bucket's end; no longer than receivers make room for."""
    scheme = SCHEMES[name]()
    scheme.set(tail=tail)
    for count in (0, 1, 2, 299, 300, 301):
        full = count % 300 if tail == "full" else 0
        payload, head, _ = read(scheme, gradient(count))
        assert (head["coordinates"], head["full"]) == (count, full)
        most = scheme.parts.default.payloads.most_length(count - full, full, torch.float32)
        assert payload.numel() % 8 == 0 and payload.numel() <= most


@pytest.mark.parametrize("bucket_size", (1, 2, 31, 511, 512, 513, 10**6, 2**32 - 1))
def test_buckets_of_any_size(bucket_size):
    for make in (ALQ, partial(ECDQ, relative_variance=0.2), TernGrad):
        read(make(bucket_size=bucket_size), gradient(1500))


# Sums of float32 in another order: equal but for rounding. QCS: orders that are powers of two.
SUMMED = [
    (
        QCS,
        {"bucket_size": n, "measurements": k, "quantizer_range": q, "estimator": estimator},
        count,
    )
    for n, k, q in [(512, 200, 0.5), (64, 40, 2), (256, 3, 127)]
    for estimator in ("unbiased", "mmse")
    for count in (0, 1, n - 1, n, n + n // 2, 1424)
] + [
    (EDEN, {"bits": bits, "bucket_size": 256, "seed": 5, "keep_zeros": keep}, count)
    for bits, count in [(0.25, 1180), (0.5, 70), (1, 0), (2, 1424), (4, 1), (5, 1024), (8, 70)]
    for keep in (False, True)
]


@pytest.mark.parametrize(("kind", "keywords", "count"), SUMMED, ids=str)
def test_projected_and_rotated_buckets(kind, keywords, count):
    scheme, flat = kind(**{"keep_zeros": count == 1424} | keywords), gradient(count)
    flat[600:601] = torch.nan
    _, _, values = read(scheme, flat, rtol=1e-5)
    assert np.isnan(values).any() == (count > 600) and (values.any() or count == 0)


@pytest.mark.parametrize(
    "make", [partial(ALQ, bits=2, coding="huffman"), partial(ECDQ, bits=2.0)], ids=["alq", "ecdq"]
)
def test_segments(make):
    """Streams of several segments, the last one short."""
    scheme = fitted(make(bucket_size=8192))
    _, head, _ = read(scheme, gradient(70_000))
    assert head["coding"] == (scheme.settings.coding == "huffman")


@pytest.mark.parametrize("name", ["huffman-2", "huffman-8", "huffman-ternary", "alq-3", "terngrad"])
def test_fingerprints_of_tables(name):
    scheme = SCHEMES[name]()
    table = scheme.parts.default.table
    own = wire.zlib.crc32(table.magnitudes.astype("<f8").tobytes(), int(table.symmetric))
    if scheme.settings.coding == "huffman":
        book = wire.book_of(table.probabilities)
        own = wire.zlib.crc32(book.fingerprint.to_bytes(4, "little"), own)
    _, head, _ = read(scheme, gradient(600))
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
