"""Sample compressively and quantise (QCS) in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_adaptive.kernels import hadamard
from hvd_adaptive.kernels.constants import SMALLEST_NORM
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.qcs import DITHER_OFFSET, NEGATIVE_FROM, Run, streams
from hvd_adaptive.kernels.reference.codes import pack_codes, unpack_codes
from hvd_adaptive.kernels.reference.tables import bucket_norms
from hvd_adaptive.kernels.reference.uniforms import uniforms


def encode(
    flat: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    runs: Sequence[Run],
    alphabet: int,
    key: int,
) -> None:
    """Project, quantise and pack ``flat`` (float32, (n,)), which the runs cover in order.

    alphabet: 2 Q + 1. Fill ``scales`` (float32, one per bucket: ς = ‖v‖∞/Q; NaN if v is not finite,
    0 if ς is below the normal range) and ``words`` (int32). If a sum exceeds float32's range, its
    bucket becomes NaN.
    """
    codes = [flat.new_zeros(0, dtype=torch.int64)]
    for run in runs:
        own = slice(run.first, run.first + run.buckets)
        scales[own], quantized = quantize(flat[run.start : run.stop], run, alphabet, key)
        codes.append(quantized.reshape(-1))
    words.copy_(pack_codes(torch.cat(codes), packing_of(alphabet)))


def quantize(
    x: torch.Tensor, run: Run, alphabet: int, key: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales (buckets,) and codes (int64, (buckets, rows)) of a run's coordinates.

    1. w = H (r ⊙ g) (Eq. 2 without its 1/√k)        2. step = ‖w‖∞ / Q, ς = step / √k
    3. code = floor(w / step + u + Q + 1/2) (Eq. 4), from 0 to 2 Q; for Q = 1/2 this is Eq. 5.
    """
    signs, dithers = streams(key, run)
    filled = x.new_zeros(run.buckets * run.order)
    filled[: x.numel()] = x
    w = hadamard.transform(_flipped(filled.view(-1, run.order), signs), run.rows).contiguous()
    step = bucket_norms(w.reshape(-1), run.rows, "linf") * (2 / (alphabet - 1))
    scales = step * run.rows**-0.5
    scales = torch.where(scales < SMALLEST_NORM, torch.zeros_like(scales), scales)
    scales = torch.where(torch.isfinite(scales), scales, torch.full_like(scales, torch.nan))
    usable = (scales > 0).unsqueeze(1)
    inverse = torch.where(usable, 1.0 / step.unsqueeze(1), 0.0)
    t = (w * inverse + _dither(w, dithers)) + alphabet / 2
    codes = torch.where(usable, t, 0.0).to(torch.int64).clamp(0, alphabet - 1)
    return scales, torch.where(usable, codes, 0)


def decode_add(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]],
    keys: Sequence[int],
    runs: Sequence[Run],
    alphabet: int,
    factor: float,
    out: torch.Tensor,
) -> None:
    """Set out (float32, (n,)) to factor * (out + the payloads' values, added in order). A payload
    is its (scales float32, words int32). Buckets of scale 0 add nothing.
    """
    for (scales, words), key in zip(payloads, keys, strict=True):
        codes = unpack_codes(words, sum(run.codes for run in runs), packing_of(alphabet))
        for run in runs:
            own, codes = codes[: run.codes].view(-1, run.rows), codes[run.codes :]
            of_run = scales[run.first : run.first + run.buckets].unsqueeze(1)
            signs, dithers = streams(key, run)
            q = own.to(torch.float32) - (alphabet - 1) / 2  # v̂/ς = q - u (Eqs 6, 8)
            values = _flipped(hadamard.transpose(q - _dither(q, dithers), run.order), signs)
            values = values * (of_run * (run.weight * run.rows**-0.5))
            target = out[run.start : run.stop]
            kept = (of_run == 0).expand_as(values).reshape(-1)[: target.numel()]
            total = target + values.reshape(-1)[: target.numel()]
            target.copy_(torch.where(kept, target, total))
    if factor != 1.0:
        out *= factor


def _flipped(x: torch.Tensor, stream: int) -> torch.Tensor:
    """Multiply each row of x by its bucket's signs."""
    h = uniforms(x.numel(), x.shape[1], stream, x.device).view(x.shape)
    return torch.where(h >= NEGATIVE_FROM, -x, x)


def _dither(like: torch.Tensor, stream: int) -> torch.Tensor:
    """Draw u ~ U(-1/2, 1/2) for each row of the buckets' measurements."""
    h = uniforms(like.numel(), like.shape[1], stream, like.device).view(like.shape)
    return h * 2.0**-24 - DITHER_OFFSET
