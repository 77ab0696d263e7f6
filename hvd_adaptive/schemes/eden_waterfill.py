"""Define WaterfillCodec, EDEN's with widths of buckets: bits where they reduce the error most."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.exchange.staged_codec import StagedCodec
from hvd_adaptive.kernels.eden import Buckets, Levels, shared_streams, widths_of, with_widths
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.levels.lloyd_max import distortion, normal_levels
from hvd_adaptive.levels.waterfill import allocate, sample
from hvd_adaptive.schemes.eden_bodies import KEY_BYTES, by_rotation, own_stream, signed
from hvd_adaptive.settings import Settings
from hvd_adaptive.streams import Inside, Use

MOST_WIDTH = 8
WIDTHS = range(1, MOST_WIDTH + 1)
# Buckets of a smaller root mean square are sent as zeros: S, about as large, would not be normal.
_SMALLEST_ROOT, _SMALLEST_SCALE = 2.0**-120, 2.0**-124


class WaterfillCodec(StagedCodec):
    """Codec of ``EDEN(allocation="waterfill")``.

    Each bucket has 0 to 8 bits a coordinate (levels/waterfill.py). Its width is in the lowest bits
    of its scale (kernels/eden.py), so that nothing else is sent. Codes follow the scales, those of
    one width together. All buckets are rotated three times, whatever their width, so that payloads
    can be added before the shared rotations are undone.

    Args:
        settings: Shared settings.
        bits: Bits per coordinate, on average over the buckets of a body.
    """

    name = "eden_waterfill"
    slow_in_torch = "eden"

    def __init__(self, settings: Settings, bits: float) -> None:
        super().__init__(settings)
        self.bits = bits
        self._levels = {width: Levels.of(normal_levels(width)) for width in WIDTHS}
        lost = np.array([distortion(normal_levels(width)) for width in WIDTHS])
        self._losses = lost / (1 - lost)
        self._fingerprint = zlib.crc32(self.levels.astype("<f4").tobytes())
        self._shared = stream_key(settings.seed, 0, 0, Use.ROTATION)

    @property
    def alphabet(self) -> int:
        return 1 << MOST_WIDTH

    @property
    def table_fingerprint(self) -> int:
        return self._fingerprint

    @property
    def levels(self) -> np.ndarray:
        """Return the levels of 1 to 8 bits, one after another, each ascending: float32."""
        return np.concatenate([levels.values for levels in self._levels.values()])

    def codec_settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "allocation": "waterfill"}

    def second_codec(self, bits: int) -> StagedCodec:
        own = self.settings
        settings = Settings(bucket_size=own.bucket_size, seed=own.seed, checksum=own.checksum)
        return WaterfillCodec(settings, float(bits))

    def body_bytes(self, coordinates: int) -> int:
        # Sampling sends a bucket more than expected at most; sections are filled up to 16 words.
        buckets = self._all(coordinates)
        codes = int(self.bits * buckets.codes) + buckets.size * (buckets.count > 0)
        padding = MOST_WIDTH * 64 * (buckets.count > 0)
        return self.least_body_bytes(coordinates) + 4 * -(-codes // 32) + padding

    def least_body_bytes(self, coordinates: int) -> int:
        return KEY_BYTES + 4 * self._all(coordinates).count

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> int:
        body[:KEY_BYTES].view(torch.int64).fill_(signed(self._shared))
        flat, buckets = self._clipped(flat), self._all(flat.numel())
        begin = at = self.least_body_bytes(flat.numel())
        scales, widths, chances = self._widths(flat, key)
        encode = _kernels(flat.device).encode_some
        streams = [*shared_streams(self._shared, MOST_WIDTH), own_stream(key)]
        for width in WIDTHS:
            numbers = np.flatnonzero(widths == width)
            while numbers.size:
                end = at + 4 * packing_of(1 << width).words(_codes(buckets, numbers))
                words, levels = body[at:end].view(torch.int32), self._levels[width]
                found = torch.empty(numbers.size, dtype=torch.float32, device=flat.device)
                encode(flat, numbers, found, words, buckets.size, levels, streams)
                own = _weighted(found.cpu().numpy(), chances[numbers])
                kept, scales[numbers] = own > 0, own
                if kept.all():
                    scales[numbers] = with_widths(own, width)
                    at = end
                    break
                numbers = numbers[kept]
        body[KEY_BYTES:begin].view(torch.float32).copy_(torch.from_numpy(scales))
        return at

    def _widths(self, flat: torch.Tensor, key: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return scales of buckets without codes (0, or NaN if not finite), widths and chances."""
        buckets = self._all(flat.numel())
        found = kernels.for_device(flat.device).bucket_norms(flat, buckets.size, "l2")
        norms = found.cpu().numpy()
        scales = np.where(np.isnan(norms), norms, np.float32(0))
        lengths = np.minimum(np.arange(buckets.count) * -buckets.size + buckets.codes, buckets.size)
        roots = np.nan_to_num(norms.astype(np.float64)) / np.sqrt(lengths)
        energies = np.where(roots < _SMALLEST_ROOT, 0.0, roots**2 * lengths)
        widths, chances = allocate(energies, lengths, self._losses, self.bits)
        few = chances < 1
        uniform = (stream_key(key, Inside.SAMPLED) >> 11) * 2.0**-53
        widths[few] *= sample(chances[few], uniform)
        return scales, widths, chances

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        ops, buckets = _kernels(out.device), self._all(out.numel())
        for shared, pairs in by_rotation(bodies, keys):
            sums = torch.zeros(buckets.codes, dtype=torch.float32, device=out.device)
            used = np.zeros(buckets.count, dtype=bool)
            for body, key in pairs:
                used |= self._add(body, own_stream(key), buckets, sums)
            ops.add_sums(sums, used, buckets.size, shared_streams(shared, MOST_WIDTH), out)
        if factor != 1.0:
            out *= factor

    def _add(
        self, body: torch.Tensor, own: int, buckets: Buckets, sums: torch.Tensor
    ) -> np.ndarray:
        """Add a body in the rotated domain; return which buckets are not zero."""
        end = KEY_BYTES + 4 * buckets.count
        scales = body[KEY_BYTES:end].view(torch.float32).cpu().numpy()
        for number in np.flatnonzero(~np.isfinite(scales)):
            sums[number * buckets.size :][: buckets.size] = torch.nan
        add = _kernels(sums.device).add_own
        for width, numbers, begin, stop in self._sections(body, scales, buckets):
            words, levels = body[begin:stop].view(torch.int32), self._levels[width]
            own_scales = torch.from_numpy(scales[numbers]).to(sums.device)
            add(own_scales, words, numbers, buckets.size, levels, own, sums)
        return scales != 0

    def _sections(
        self, body: torch.Tensor, scales: np.ndarray, buckets: Buckets
    ) -> Iterator[tuple[int, np.ndarray, int, int]]:
        """Yield width, buckets, begin and end of each section of codes.

        Raises:
            PayloadError: The body has another length; nothing was yielded.
        """
        widths, at, found = widths_of(scales), KEY_BYTES + 4 * buckets.count, []
        for width in WIDTHS:
            numbers = np.flatnonzero(widths == width)
            if numbers.size:
                begin = at
                at += 4 * packing_of(1 << width).words(_codes(buckets, numbers))
                found.append((width, numbers, begin, at))
        if not at <= body.numel() < at + 8:
            raise PayloadError(
                f"a body of {body.numel()} bytes has scales of buckets that take {at}"
            )
        yield from found

    def _all(self, coordinates: int) -> Buckets:
        return Buckets(coordinates, self.settings.bucket_size)


def _codes(buckets: Buckets, numbers: np.ndarray) -> int:
    """Return the rotated coordinates of the buckets ``numbers``, ascending."""
    return numbers.size * buckets.size - max(
        0, (int(numbers[-1]) + 1) * buckets.size - buckets.codes
    )


def _weighted(scales: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Return float32 scales over chances: NaN if they overflow, 0 if they are too small."""
    with np.errstate(over="ignore"):
        found = (scales.astype(np.float64) / chances).astype(np.float32)
    found[~np.isfinite(found)] = np.nan
    found[found < _SMALLEST_SCALE] = 0
    return found


def _kernels(device: torch.device) -> ModuleType:
    return kernels.for_device(device, "eden")
