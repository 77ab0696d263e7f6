"""The Triton kernels of level tables against the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import (
    KINDS,
    denormal,
    encoded,
    enormous,
    heavy,
    ordinary,
    same_bits,
    table_of,
    vector,
    with_nan,
    zeros,
)
from triton_interpreter import DEVICE, moved
from unit_oracles import word_count

from hvd_adaptive.kernels.reference import tables as reference
from hvd_adaptive.kernels.tables import kernel_table
from hvd_adaptive.kernels.triton import tables as cuda
from hvd_adaptive.levels import uniform_magnitudes

KEY = (1 << 63) + 77
# (coordinates, bucket size): buckets of one coordinate, shorter than a block of 512 and not, whole
# blocks, whole tiles (norm and codes in one launch), longer than the tensor; ends everywhere.
PLACES = (
    (3, 1),
    (700, 7),
    (530, 32),
    (1300, 100),
    (2600, 512),
    (3100, 700),
    (2100, 1024),
    (1, 9),
    (512, 512),
    (900, 5000),
)


def hostile(bucket: int, kinds=KINDS) -> torch.Tensor:
    """A bucket of each kind, and a partial one."""
    return torch.cat([vector(kind, bucket) for kind in kinds] + [vector(ordinary, 5)])


def check(flat, bucket, norm, table, clip=None) -> None:
    with np.errstate(all="ignore"):
        want = encoded(reference, flat, bucket, norm, table, KEY, clip)
        got = encoded(cuda, flat.to(DEVICE), bucket, norm, table, KEY, clip)
    assert all(map(same_bits, want, got))


RULES = (
    *((bits, "uneven") for bits in range(2, 9)),
    *((bits, kind) for bits in (6, 8) for kind in ("uniform", "exponential")),
)
# Each rule and width, and each place of buckets. From 4 bits on uneven tables are searched.
ENCODED = (
    *((*rule, "linf", PLACES[(3 * rule[0] + len(rule[1])) % len(PLACES)]) for rule in RULES),
    *((3, "uneven", "l2", place) for place in PLACES),
)


@pytest.mark.many
@pytest.mark.parametrize(("bits", "kind", "norm", "place"), ENCODED)
def test_encode_by_fixed_width(bits: int, kind: str, norm: str, place: tuple[int, int]):
    check(vector(heavy, place[0]), place[1], norm, table_of(bits, True, kind))


def radix_table(alphabet: int):
    return kernel_table(uniform_magnitudes((alphabet + 1) // 2, False), False)


@pytest.mark.parametrize(
    ("alphabet", "n", "bucket"), [(3, 2800, 100), (5, 3300, 1600), (7, 300, 7)]
)
def test_encode_by_radix(alphabet: int, n: int, bucket: int):
    check(vector(heavy, n), bucket, "linf", radix_table(alphabet))


@pytest.mark.parametrize(
    ("norm", "bucket", "clip"),
    [("l2", 128, None), ("linf", 128, None), ("linf", 96, 1.5), ("l2", 1024, 2.5)],
)
def test_hostile_buckets(norm: str, bucket: int, clip: float | None):
    """NaN, Inf, zeros, denormal and enormous numbers, in two launches and in one."""
    kinds = KINDS if bucket < 1024 else (with_nan, zeros, denormal, enormous)
    check(hostile(bucket, kinds), bucket, norm, table_of(3, True), clip)


@pytest.mark.many
@pytest.mark.parametrize(
    ("bits", "place"), list(zip((2, 3, 3, 4, 3, 5, 6, 7, 8, 3), PLACES, strict=True))
)
def test_decode_for_each_width_and_place_of_buckets(bits: int, place: tuple[int, int]):
    decode(*place, table_of(bits, True), ranks=2 if bits > 3 else 3)


@pytest.mark.parametrize(("alphabet", "n", "bucket"), [(3, 2800, 100), (5, 2000, 1800)])
def test_decode_by_radix(alphabet: int, n: int, bucket: int):
    decode(n, bucket, radix_table(alphabet))


def decode(n: int, bucket: int, table, ranks: int = 3) -> None:
    """Payloads of any words; three take two launches, since their distances differ."""
    generator = torch.Generator().manual_seed(n)
    count = word_count(n, table.alphabet)
    payloads = []
    for rank in range(ranks):
        scales = torch.rand(-(-n // bucket), generator=generator)
        scales[rank::5] = float("nan") if rank == 1 else 0.0
        words = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator)
        payloads.append((scales, words.to(torch.int32)))
    before = torch.linspace(-1, 1, n)
    want, got = before.clone(), before.to(DEVICE)
    reference.decode_add(payloads, bucket, table, 1 / 3, want)
    cuda.decode_add([tuple(moved(*p)) for p in payloads], bucket, table, 1 / 3, got)
    assert same_bits(want, got.cpu())


@pytest.mark.parametrize("ranks", [1, 5])
def test_payloads_of_one_buffer_take_one_launch(ranks: int, monkeypatch: pytest.MonkeyPatch):
    """They are views at equal distances; without ``add`` what ``out`` held does not matter."""
    from hvd_adaptive.kernels.triton import decoder as cuda_decode

    n, bucket, table = 800, 100, table_of(3, True)
    at, size = -(-n // bucket), -(-n // bucket) + word_count(n, 8)
    gathered = torch.randint(-(2**31), 2**31 - 1, (ranks, size + 2)).to(torch.int32)
    gathered[:, :at] = torch.rand(ranks, at).view(torch.int32)
    launches, launch = [], cuda_decode.launch
    monkeypatch.setattr(
        cuda_decode, "launch", lambda *args, **kwargs: (launches.append(1), launch(*args, **kwargs))
    )
    results = []
    for module, buffer in ((reference, gathered), (cuda, gathered.to(DEVICE))):
        rows = [(row[:at].view(torch.float32), row[at:size]) for row in buffer]
        out = torch.full((n,), float("nan"), device=buffer.device)
        module.decode_add(rows, bucket, table, 0.25, out, add=False)
        results.append(out.cpu())
    assert same_bits(*results)
    assert len(launches) == 1


def test_short_payloads_are_refused():
    scales, words = moved(torch.ones(1), torch.zeros(10, dtype=torch.int32))
    with pytest.raises(ValueError, match="1 scales and 10 words is too short"):
        cuda.decode_add([(scales, words)], 100, table_of(3, True), 1.0, scales.new_zeros(200))


def test_nothing_to_do():
    check(torch.empty(0), 8192, "l2", table_of(3, True))
    decode(0, 8192, table_of(3, True))


@pytest.mark.parametrize(("bucket", "of_kind"), [(1, 3), (33, 33), (300, 100)])
def test_norms_and_clipping(bucket: int, of_kind: int):
    flat = hostile(of_kind)
    (there,) = moved(flat)
    with np.errstate(all="ignore"):
        for norm in ("l2", "linf"):
            want = reference.bucket_norms(flat, bucket, norm)
            assert same_bits(want, cuda.bucket_norms(there, bucket, norm).cpu())
        want = reference.clipped(flat, bucket, 1.5)
        assert same_bits(want, cuda.clipped(there, bucket, 1.5).cpu())
