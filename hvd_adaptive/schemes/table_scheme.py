"""Schemes whose buckets share one level table: body of scales and fixed-width codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_adaptive import kernels
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.schemes.level_table import LevelTable
from hvd_adaptive.settings import Settings


class TableScheme(GradientCompressor):
    """Quantise buckets by their norm and one table of levels.

    Body: float32 scale of each bucket, then the codes' 32-bit words (coding/packing.py).
    """

    def __init__(self, settings: Settings, norm: str, table: LevelTable) -> None:
        super().__init__(settings)
        self.norm = norm
        self._table = table

    @property
    def table(self) -> LevelTable:
        """The table in use."""
        return self._table

    @property
    def levels(self) -> torch.Tensor:
        """Ascending signed reconstruction levels in [-1, 1], float64."""
        return self._table.levels

    @property
    def alphabet(self) -> int:
        return self._table.kernel.alphabet

    @property
    def table_version(self) -> int:
        return self._table.version

    @property
    def table_fingerprint(self) -> int:
        return self._table.fingerprint

    def codec_settings(self) -> dict[str, Any]:
        return {"norm": self.norm, "bits": self._table.bits, "symmetric": self._table.symmetric}

    def body_bytes(self, coordinates: int) -> int:
        return 4 * (self._buckets(coordinates) + self._table.kernel.packing.words(coordinates))

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> None:
        scales, words = self._split(body, flat.numel())
        kernels.for_device(flat.device).encode(
            flat, scales, words, self._bucket(flat.numel()), self.norm, self._table.kernel, key,
            self.settings.clip,
        )  # fmt: skip

    def decode_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        pairs = [self._split(body, out.numel()) for body in bodies]
        kernels.for_device(out.device).decode_add(
            pairs, self._bucket(out.numel()), self._table.kernel, factor, out
        )

    def _split(self, body: torch.Tensor, coordinates: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = 4 * self._buckets(coordinates)
        return body[:at].view(torch.float32), body[at:].view(torch.int32)
