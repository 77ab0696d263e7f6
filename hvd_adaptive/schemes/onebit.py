"""OneBitSGD: a sign and the mean of each side (Seide et al. 2014)."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from hvd_adaptive import kernels
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.kernels import cpu_onebit, reference_onebit
from hvd_adaptive.settings import Settings


class OneBitSGD(GradientCompressor):
    """1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014, section 3.2).

    A bit tells on which side of zero a coordinate lies (zero counts as positive); it is rebuilt as
    the mean of its side over the bucket, where the paper takes a column of a weight matrix: the two
    values of least squared error for this threshold. What is left is the variance within the sides,
    Σ v_i² - n₋ m₋² - n₊ m₊², never more than the gradient's own square. The sum over a bucket stays
    what it was. Nothing is random, and the result is biased.

    error_feedback: weight of the residual that is carried to the next step. 1.0 is the paper's, and
    what makes one bit enough; None to do without.
    shared: see settings.Settings.

    Body: two float32 for each bucket (mean of the negative, mean of the other coordinates), then
    the bits' 32-bit words (coding/fixed.py). A bucket with NaN or Inf becomes NaN.
    """

    name = "onebit"

    def __init__(self, *, error_feedback: float | None = 1.0, **shared: Any) -> None:
        shared = shared | {"error_feedback": error_feedback}
        super().__init__(Settings.from_keywords("OneBitSGD", shared))

    @property
    def alphabet(self) -> int:
        return 2

    def codec_settings(self) -> dict[str, Any]:
        return {}

    def body_bytes(self, coordinates: int) -> int:
        return 8 * self._buckets(coordinates) + 4 * reference_onebit.SIDES.words(coordinates)

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> None:
        bucket = self._bucket(flat.numel())
        if self.settings.clip is not None:
            flat = kernels.for_device(flat.device).clipped(flat, bucket, self.settings.clip)
        _kernels(flat.device).encode(flat, *self._split(body, flat.numel()), bucket)

    def decode_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        pairs = [self._split(body, out.numel()) for body in bodies]
        _kernels(out.device).decode_add(pairs, self._bucket(out.numel()), factor, out)

    def _buckets(self, coordinates: int) -> int:
        return -(-coordinates // self.settings.bucket_size)

    def _bucket(self, coordinates: int) -> int:
        """The bucket size, cut to the coordinates there are."""
        return max(1, min(self.settings.bucket_size, coordinates))

    def _split(self, body: torch.Tensor, coordinates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Means, (buckets, 2), and words."""
        at = 8 * self._buckets(coordinates)
        return body[:at].view(torch.float32).view(-1, 2), body[at:].view(torch.int32)


def _kernels(device: torch.device) -> ModuleType:
    return cpu_onebit if device.type == "cpu" else reference_onebit
