"""Define TableCodec, whose buckets share one level table: a body of scales and codes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hvd_adaptive import kernels
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.codec.level_table import LevelTable
from hvd_adaptive.codec.payloads import squares_of
from hvd_adaptive.coding.coders import CODERS, Coder
from hvd_adaptive.settings import Settings


class TableCodec(Codec):
    """Codec that quantises buckets by their norm ("l2" or "linf") and one table of levels.

    The body holds one float32 scale for each bucket, then the codes' 32-bit words
    (kernels/packing.py). If ``coding`` names a coder and its stream (coding/coders.py) is shorter,
    the stream replaces the words.
    """

    codings = ("fixed", *CODERS)
    knows_errors = True

    def __init__(self, name: str, settings: Settings, norm: str, table: LevelTable) -> None:
        self.name, self.norm = name, norm
        self.table, self.has_zero = table, not table.symmetric
        super().__init__(settings)
        self._coder = table, self._coder_of(table)
        self._state: tuple[LevelTable | None, tuple[int, int, int]] = None, (0, 0, 0)

    @property
    def levels(self) -> torch.Tensor:
        """Return the ascending signed reconstruction levels in [-1, 1], float64."""
        return self.table.levels

    @property
    def alphabet(self) -> int:
        return self.table.kernel.alphabet

    @property
    def table_version(self) -> int:
        return self.table.version

    @property
    def table_fingerprint(self) -> int:
        table = self.table.fingerprint
        if self.coder is None or not self.coder.fingerprint:
            return table
        return zlib.crc32(self.coder.fingerprint.to_bytes(4, "little"), table)

    @property
    def table_state(self) -> tuple[int, int, int]:
        if self._state[0] is not self.table:
            self._state = self.table, super().table_state
        return self._state[1]

    @property
    def coder(self) -> Coder | None:
        if self._coder[0] is not self.table:
            self._coder = self.table, self._coder_of(self.table)
        return self._coder[1]

    def _coder_of(self, table: LevelTable) -> Coder | None:
        """Return the coder of ``coding``; None for "fixed", or before a first fit."""
        kind, known = CODERS.get(self.settings.coding), table.probabilities
        if kind is None or (kind.fitted and known is None):
            return None
        return kind(table.kernel.packing, self.settings.bucket_size, known)

    def codec_settings(self) -> dict[str, Any]:
        return {"norm": self.norm, "bits": self.table.bits, "symmetric": self.table.symmetric}

    def body_bytes(self, coordinates: int) -> int:
        return 4 * (self._buckets(coordinates) + self.table.kernel.packing.words(coordinates))

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> None:
        settings, count = self.settings, flat.numel()
        at = 4 * -(-count // settings.bucket_size)
        kernels.for_device(flat.device).encode(
            flat,
            body[:at].view(torch.float32),
            body[at:].view(torch.int32),
            max(1, min(settings.bucket_size, count)),
            self.norm,
            self.table.kernel,
            key,
            settings.clip,
        )

    def decode_bodies(
        self,
        bodies: Sequence[torch.Tensor],
        keys: Sequence[int],
        factor: float,
        out: torch.Tensor,
        add: bool = True,
    ) -> None:
        size, count, pairs = self.settings.bucket_size, out.numel(), []
        at, bucket = 4 * -(-count // size), max(1, min(size, count))
        for body in bodies:
            pairs.append((body[:at].view(torch.float32), body[at:].view(torch.int32)))
        decode = kernels.for_device(out.device).decode_add
        decode(pairs, bucket, self.table.kernel, factor, out, add)

    def expected_errors(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the variance of ALQ Eqs 1, 2, plus the loss by clipping."""
        bucket = max(1, min(self.settings.bucket_size, flat.numel()))
        clipped = flat if self.settings.clip is None else self._clipped(flat)
        ops = kernels.for_device(flat.device)
        found = ops.errors(clipped, bucket, self.norm, self.table.kernel)
        if clipped is not flat:
            found[:, 0] += squares_of(flat - clipped, bucket)
            found[:, 1] = squares_of(flat, bucket)
        return found
