"""Sample compressively and quantise (QCS) in Triton.

Signatures and integers are the same as in reference/qcs.py. These kernels compute transforms of
powers of two up to ``LARGEST``, a tile of whole buckets in each program. hadamard.transform
computes the others, with random numbers from these kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels import hadamard
from hvd_adaptive.kernels.constants import SMALLEST_NORM
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.qcs import DITHER_OFFSET, NEGATIVE_FROM, Run, streams
from hvd_adaptive.kernels.triton.butterflies import LARGEST, butterflies, tile_of
from hvd_adaptive.kernels.triton.codes import pack, unpack
from hvd_adaptive.kernels.triton.launch import kernel, launch, signed
from hvd_adaptive.kernels.triton.places import for_each, own_integer, own_place
from hvd_adaptive.kernels.triton.random import COUNTER, bucket_key, integer24
from hvd_adaptive.kernels.triton.scan import bucket_norms
from hvd_adaptive.kernels.triton.uniforms import uniforms

_OFFSET, _NEGATIVE_FROM = tl.constexpr(DITHER_OFFSET), tl.constexpr(int(NEGATIVE_FROM))


def encode(
    flat: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    runs: Sequence[Run],
    alphabet: int,
    key: int,
) -> None:
    """See reference.qcs.encode."""
    codes = torch.empty(sum(run.codes for run in runs), dtype=torch.uint8, device=flat.device)
    at = 0
    for run in runs:
        own = codes[at : at + run.codes]
        scales[run.first : run.first + run.buckets] = _quantize(
            flat[run.start : run.stop], run, alphabet, key, own
        )
        at += run.codes
    pack(codes, packing_of(alphabet), words)


def decode_add(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]],
    keys: Sequence[int],
    runs: Sequence[Run],
    alphabet: int,
    factor: float,
    out: torch.Tensor,
) -> None:
    """See reference.qcs.decode_add."""
    count, buckets = sum(run.codes for run in runs), sum(run.buckets for run in runs)
    for (scales, words), key in zip(payloads, keys, strict=True):
        if scales.numel() < buckets or words.numel() < packing_of(alphabet).words(count):
            raise ValueError(
                f"payload of {scales.numel()} scales and {words.numel()} words is too short"
            )
        codes, at = torch.empty(count, dtype=torch.uint8, device=out.device), 0
        unpack(words, packing_of(alphabet), codes)
        for run in runs:
            of_run = scales[run.first : run.first + run.buckets]
            add = _add_transposed if _tiled(run) else _add_by_torch
            add(codes[at : at + run.codes], of_run, run, alphabet, key, out[run.start : run.stop])
            at += run.codes
    if factor != 1.0:
        out *= factor


def _tile(run: Run) -> dict[str, int]:
    """Return the constants of the kernels that transform."""
    each, warps = tile_of(run.order)
    return {
        "EACH": each,
        "ORDER": run.order,
        "SIZE": hadamard.kept(run.order, run.rows),
        "num_warps": warps,
    }


def _tiled(run: Run) -> bool:
    return hadamard.base_order(run.order) == 1 and run.order <= LARGEST


def _quantize(
    x: torch.Tensor, run: Run, alphabet: int, key: int, codes: torch.Tensor
) -> torch.Tensor:
    """Return scales of a run's buckets; fill their codes: see reference.qcs.quantize."""
    signs, dithers = streams(key, run)
    w = (_projected if _tiled(run) else _projected_by_torch)(x, run, signs)
    steps = bucket_norms(w, run.rows, "linf") * (2 / (alphabet - 1))
    scales = steps * run.rows**-0.5
    scales = torch.where(scales < SMALLEST_NORM, torch.zeros_like(scales), scales)
    scales = torch.where(torch.isfinite(scales), scales, torch.full_like(scales, torch.nan))
    for_each(
        _codes_kernel, w, run.codes, run.rows, dithers, w, steps, scales, codes, ALPHABET=alphabet
    )
    return scales


def _projected(x: torch.Tensor, run: Run, signs: int) -> torch.Tensor:
    """Return H (r ⊙ g), float32 (buckets * rows,)."""
    w = torch.empty(run.codes, dtype=torch.float32, device=x.device)
    tile = _tile(run)
    launch(
        _project_kernel,
        -(-run.buckets // tile["EACH"]),
        x,
        x,
        w,
        x.numel(),
        run.buckets,
        run.rows,
        signed(signs),
        **tile,
    )
    return w


def _projected_by_torch(x: torch.Tensor, run: Run, signs: int) -> torch.Tensor:
    filled = x.new_zeros(run.buckets * run.order)
    filled[: x.numel()] = x
    flipped = _flipped(filled.view(-1, run.order), signs)
    return hadamard.transform(flipped, run.rows).reshape(-1).contiguous()


def _add_transposed(
    codes: torch.Tensor, scales: torch.Tensor, run: Run, alphabet: int, key: int, out: torch.Tensor
) -> None:
    weights = scales * (run.weight * run.rows**-0.5)
    tile = _tile(run)
    launch(
        _transpose_kernel,
        -(-run.buckets // tile["EACH"]),
        out,
        codes,
        scales,
        weights,
        out,
        out.numel(),
        run.buckets,
        run.rows,
        *map(signed, streams(key, run)),
        ALPHABET=alphabet,
        **tile,
    )


def _add_by_torch(
    codes: torch.Tensor, scales: torch.Tensor, run: Run, alphabet: int, key: int, out: torch.Tensor
) -> None:
    signs, dithers = streams(key, run)
    q = codes.view(-1, run.rows).to(torch.float32) - (alphabet - 1) / 2
    u = uniforms(q.numel(), run.rows, dithers, q.device).view(q.shape) * 2.0**-24 - DITHER_OFFSET
    of_run = scales.unsqueeze(1)
    values = _flipped(hadamard.transpose(q - u, run.order), signs)
    values = values * (of_run * (run.weight * run.rows**-0.5))
    kept = (of_run == 0).expand_as(values).reshape(-1)[: out.numel()]
    total = out + values.reshape(-1)[: out.numel()]
    out.copy_(torch.where(kept, out, total))


def _flipped(x: torch.Tensor, stream: int) -> torch.Tensor:
    h = uniforms(x.numel(), x.shape[1], stream, x.device).view(x.shape)
    return torch.where(h >= NEGATIVE_FROM, -x, x)


@triton.jit
def _signed(x, stream, bucket, place):
    """Return x with the signs of places (int32) in buckets (int64)."""
    low, high = bucket_key(stream, bucket)
    h = integer24(place.to(tl.uint32) * COUNTER + low, high)
    return tl.where(h >= _NEGATIVE_FROM, x * -1.0, x)


@triton.jit
def _folded(x, EACH: tl.constexpr, ORDER: tl.constexpr, SIZE: tl.constexpr):
    """Add the halves of EACH runs of ORDER numbers until they are SIZE long."""
    if ORDER > SIZE:
        HALF: tl.constexpr = ORDER // 2
        x = tl.reshape(tl.sum(tl.reshape(x, (EACH, 2, HALF)), axis=1), (EACH * HALF,))
        x = _folded(x, EACH, HALF, SIZE)
    return x


@kernel
def _project_kernel(
    x,
    w,
    n: tl.int64,
    buckets: tl.int64,
    rows: tl.int32,
    signs: tl.int64,
    EACH: tl.constexpr,
    ORDER: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Project EACH buckets per program (signs, folds, butterflies); store the first ``rows``."""
    first = tl.program_id(0).to(tl.int64) * EACH
    place = tl.arange(0, EACH * ORDER)
    i = first * ORDER + place
    v = tl.load(x + i, mask=i < n, other=0.0)
    v = _signed(v, signs, first + place // ORDER, place % ORDER)
    v = butterflies(_folded(v, EACH, ORDER, SIZE), EACH * SIZE, SIZE)
    at = tl.arange(0, EACH * SIZE)
    bucket, row = first + at // SIZE, at % SIZE
    tl.store(w + bucket * rows + row, v, mask=(bucket < buckets) & (row < rows))


@kernel
def _codes_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    w,
    steps,
    scales,
    codes,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    ALPHABET: tl.constexpr,
):
    i, there, bucket, place = own_place(n, bucket_size, magic, TILE, BUCKETS)
    u = own_integer(stream, bucket, place).to(tl.float32) * 2.0**-24 - _OFFSET
    usable = tl.load(scales + bucket, mask=there, other=0.0) > 0
    step = tl.load(steps + bucket, mask=there, other=1.0)
    inverse = tl.div_rn(tl.full((TILE,), 1.0, tl.float32), tl.where(usable, step, 1.0))
    t = (tl.load(w + i, mask=there, other=0.0) * inverse + u) + ALPHABET / 2
    code = tl.where(usable, t, 0.0).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 0), ALPHABET - 1)
    tl.store(codes + i, code.to(tl.uint8), mask=there)


@kernel
def _transpose_kernel(
    codes,
    scales,
    weights,
    out,
    n: tl.int64,
    buckets: tl.int64,
    rows: tl.int32,
    signs: tl.int64,
    dithers: tl.int64,
    EACH: tl.constexpr,
    ORDER: tl.constexpr,
    SIZE: tl.constexpr,
    ALPHABET: tl.constexpr,
):
    """Transpose EACH buckets in each program: dither, butterflies, then signs and scales for each
    of the ORDER / SIZE repetitions.
    """
    first = tl.program_id(0).to(tl.int64) * EACH
    at = tl.arange(0, EACH * SIZE)
    bucket, row = first + at // SIZE, at % SIZE
    there = (bucket < buckets) & (row < rows)
    low, high = bucket_key(dithers, bucket)
    u = integer24(row.to(tl.uint32) * COUNTER + low, high).to(tl.float32) * 2.0**-24 - _OFFSET
    q = tl.load(codes + bucket * rows + row, mask=there, other=0).to(tl.float32)
    y = tl.where(there, (q - (ALPHABET - 1) / 2) - u, 0.0)
    y = butterflies(y, EACH * SIZE, SIZE)
    zero = tl.load(scales + bucket, mask=bucket < buckets, other=0.0) == 0
    weight = tl.load(weights + bucket, mask=bucket < buckets, other=0.0)
    for part in range(ORDER // SIZE):
        place = row + part * SIZE
        i = bucket * ORDER + place
        before = tl.load(out + i, mask=i < n, other=0.0)
        value = _signed(y, signs, bucket, place) * weight
        tl.store(out + i, tl.where(zero, before, before + value), mask=i < n)
