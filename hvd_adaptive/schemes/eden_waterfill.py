"""Define WaterfillCodec, EDEN's with widths of buckets: bits where they reduce the error most."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.coding.payload import Encoded
from hvd_adaptive.coding.sendable import Sendable
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.exchange.staged_codec import StagedCodec
from hvd_adaptive.kernels.eden import (
    Buckets,
    Levels,
    Sections,
    Widths,
    shared_streams,
    widths_of,
    with_widths,
)
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.levels.lloyd_max import distortion, normal_levels
from hvd_adaptive.levels.waterfill import sample
from hvd_adaptive.schemes.eden_bodies import KEY_BYTES, by_rotation, own_stream, signed
from hvd_adaptive.schemes.threshold import Threshold
from hvd_adaptive.settings import Settings
from hvd_adaptive.streams import Inside, Use

# Up to so many bits on average, buckets have at most 4 bits: more are worth little, and buckets of
# more bits need a third rotation.
FEW_BITS, FEW_WIDTHS, MOST_WIDTH = 2.0, 4, 8
# Buckets of a smaller root mean square are sent as zeros: S, about as large, would not be normal.
_SMALLEST_ROOT, _SMALLEST_SCALE = 2.0**-120, 2.0**-124
# ``sends``: whether this thread encodes a payload of a training step.
_this_thread = threading.local()


class WaterfillCodec(StagedCodec):
    """Codec of ``EDEN(allocation="waterfill")``.

    Each bucket has 0 to 8 bits a coordinate, or 0 to 4 if ``bits`` is at most 2
    (levels/waterfill.py). Its width is in the lowest bits of its scale (kernels/eden.py), so that
    nothing else is sent. Codes follow the scales, those of one width together. All buckets are
    rotated as often as those of the greatest width, so that payloads can be added before the shared
    rotations are undone.

    Args:
        settings: Shared settings.
        bits: Bits per coordinate, on average over the buckets of all steps (threshold.py).

    Attributes:
        threshold: Divides bits among the buckets of a step.
    """

    name = "eden_waterfill"
    slow_in_torch = "eden"

    def __init__(self, settings: Settings, bits: float) -> None:
        super().__init__(settings)
        self.bits = bits
        most = FEW_WIDTHS if bits <= FEW_BITS else MOST_WIDTH
        of_widths = {width: normal_levels(width) for width in range(1, most + 1)}
        self._widths = Widths({width: Levels.of(levels) for width, levels in of_widths.items()})
        lost = np.array([distortion(levels) for levels in of_widths.values()])
        self.threshold = Threshold(bits, lost / (1 - lost))
        self._workers: dict[int, WaterfillCodec] = {}
        self._fingerprint = zlib.crc32(self.levels.astype("<f4").tobytes())
        self._shared = stream_key(settings.seed, 0, 0, Use.ROTATION)

    @property
    def alphabet(self) -> int:
        return 1 << self._widths.most

    @property
    def table_fingerprint(self) -> int:
        return self._fingerprint

    @property
    def levels(self) -> np.ndarray:
        """Return the levels of 1, 2, ... bits, one after another, each ascending: float32."""
        return np.concatenate([levels.values for levels in self._widths.levels.values()])

    def codec_settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "allocation": "waterfill"}

    def second_codec(self, bits: int) -> StagedCodec:
        own = self.settings
        settings = Settings(bucket_size=own.bucket_size, seed=own.seed, checksum=own.checksum)
        return WaterfillCodec(settings, float(bits))

    def body_bytes(self, coordinates: int) -> int:
        # Any widths are possible; sections of less than whole blocks are filled up to 16 words.
        buckets, most = self._all(coordinates), self._widths.most
        padding = most * 64 * (buckets.count > 0)
        return self.least_body_bytes(coordinates) + 4 * -(-buckets.codes * most // 32) + padding

    def least_body_bytes(self, coordinates: int) -> int:
        return KEY_BYTES + 4 * self._all(coordinates).count

    def encode_payload(
        self,
        flat: torch.Tensor,
        quantized: int,
        key: int,
        layout: int = 0,
        values: torch.Tensor | None = None,
        memory: Sendable | None = None,
    ) -> Encoded:
        _this_thread.sends = True
        try:
            return super().encode_payload(flat, quantized, key, layout, values, memory)
        finally:
            _this_thread.sends = False

    def of_worker(self, number: int) -> WaterfillCodec:
        if number == 0:
            return self
        if number not in self._workers:
            self._workers[number] = WaterfillCodec(self.settings, self.bits)
        return self._workers[number]

    def end_step(self) -> None:
        super().end_step()
        self.threshold.end_step()

    def forget_step(self) -> None:
        super().forget_step()
        self.threshold.forget_step()

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> int:
        body[:KEY_BYTES].view(torch.int64).fill_(signed(self._shared))
        flat, buckets = self._clipped(flat), self._all(flat.numel())
        energies, lengths, scales = self._energies(flat, buckets)
        sends = getattr(_this_thread, "sends", False)
        allot = self.threshold.allot_next if sends else self.threshold.allot
        widths, chances = allot(energies, lengths)
        few = chances < 1
        uniform = (stream_key(key, Inside.SAMPLED) >> 11) * 2.0**-53
        widths[few] *= sample(chances[few], uniform)
        at = self.least_body_bytes(flat.numel())
        encode = _kernels(flat.device).encode_widths
        streams = [*self._shared_streams(self._shared), own_stream(key)]
        while True:
            sections = Sections.of(widths, buckets, self._widths.most)
            numbers, end = sections.numbers, at + 4 * sum(sections.words)
            words = body[at:end].view(torch.int32)
            found = torch.empty(numbers.size, dtype=torch.float32, device=flat.device)
            encode(flat, sections, found, words, buckets.size, self._widths, streams)
            own = _weighted(found.cpu().numpy(), chances[numbers])
            if (own > 0).all():
                break
            # These buckets are sent without codes: the others' sections are shorter.
            without = ~(own > 0)
            scales[numbers[without]], widths[numbers[without]] = own[without], 0
        scales[numbers] = with_widths(own, widths[numbers])
        body[KEY_BYTES:at].view(torch.float32).copy_(torch.from_numpy(scales))
        return end

    def _energies(
        self, flat: torch.Tensor, buckets: Buckets
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return energies, coordinates, and scales of buckets without codes (0, or NaN)."""
        found = kernels.for_device(flat.device).bucket_norms(flat, buckets.size, "l2")
        norms = found.cpu().numpy()
        scales = np.where(np.isnan(norms), norms, np.float32(0))
        lengths = np.minimum(np.arange(buckets.count) * -buckets.size + buckets.codes, buckets.size)
        roots = np.nan_to_num(norms.astype(np.float64)) / np.sqrt(lengths)
        return np.where(roots < _SMALLEST_ROOT, 0.0, roots**2 * lengths), lengths, scales

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        ops, buckets = _kernels(out.device), self._all(out.numel())
        for shared, pairs in by_rotation(bodies, keys):
            sums = torch.zeros(buckets.codes, dtype=torch.float32, device=out.device)
            used = np.zeros(buckets.count, dtype=bool)
            for body, key in pairs:
                used |= self._add(body, own_stream(key), buckets, sums)
            ops.add_sums(sums, used, buckets.size, self._shared_streams(shared), out)
        if factor != 1.0:
            out *= factor

    def _add(
        self, body: torch.Tensor, own: int, buckets: Buckets, sums: torch.Tensor
    ) -> np.ndarray:
        """Add a body in the rotated domain; return which buckets are not zero.

        Raises:
            PayloadError: The body has another length, or a width that is never sent.
        """
        at = KEY_BYTES + 4 * buckets.count
        scales = body[KEY_BYTES:at].view(torch.float32).cpu().numpy()
        widths, most = widths_of(scales), self._widths.most
        if widths.max(initial=0) > most:
            raise PayloadError(f"a bucket has {widths.max()} bits, more than {most}")
        sections = Sections.of(widths, buckets, most)
        end = at + 4 * sum(sections.words)
        if not end <= body.numel() < end + 8:
            raise PayloadError(
                f"a body of {body.numel()} bytes has scales of buckets that take {end}"
            )
        for number in np.flatnonzero(~np.isfinite(scales)):
            sums[number * buckets.size :][: buckets.size] = torch.nan
        own_scales = torch.from_numpy(scales[sections.numbers]).to(sums.device)
        words = body[at:end].view(torch.int32)
        add = _kernels(sums.device).add_widths
        add(own_scales, words, sections, buckets.size, self._widths, own, sums)
        return scales != 0

    def _shared_streams(self, rotation: int) -> list[int]:
        return shared_streams(rotation, self._widths.most)

    # State ----------------------------------------------------------------------------------------

    def adopt_tables(self, old: WaterfillCodec, keep: bool) -> None:
        super().adopt_tables(old, keep)
        if isinstance(old, WaterfillCodec):
            self.threshold.adopt(old.threshold)

    def tables_state(self) -> dict[str, Any]:
        return super().tables_state() | {"threshold": self.threshold.state_dict()}

    def check_tables(self, state: Mapping[str, Any]) -> None:
        self.threshold.check_state(state.get("threshold", {}))
        super().check_tables(state)

    def take_tables(self, state: Mapping[str, Any]) -> None:
        self.threshold.check_state(state.get("threshold", {}))
        super().take_tables(state)
        self.threshold.take_state(state.get("threshold", {}))

    def _all(self, coordinates: int) -> Buckets:
        return Buckets(coordinates, self.settings.bucket_size)


def _weighted(scales: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Return float32 scales over chances: NaN if they overflow, 0 if they are too small."""
    with np.errstate(over="ignore"):
        found = (scales.astype(np.float64) / chances).astype(np.float32)
    found[~np.isfinite(found)] = np.nan
    found[found < _SMALLEST_SCALE] = 0
    return found


def _kernels(device: torch.device) -> ModuleType:
    return kernels.for_device(device, "eden")
