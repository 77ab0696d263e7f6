"""OneBitSGD: a sign and the mean of each side (Seide et al. 2014)."""

from __future__ import annotations

from typing import Any

import torch

from hvd_adaptive import kernels
from hvd_adaptive.schemes.bucket_table_scheme import BucketTableScheme
from hvd_adaptive.settings import Settings


class OneBitSGD(BucketTableScheme):
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
    the bits' 32-bit words (kernels/fixed.py). A bucket with NaN or Inf becomes NaN.
    """

    name = "onebit"

    def __init__(self, *, error_feedback: float | None = 1.0, **shared: Any) -> None:
        shared = shared | {"error_feedback": error_feedback}
        settings = Settings.from_keywords("OneBitSGD", shared)
        super().__init__(settings, alphabet=2, numbers=2)

    def codec_settings(self) -> dict[str, Any]:
        return {}

    def quantize_buckets(
        self, flat: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
    ) -> torch.Tensor:
        ops = kernels.for_device(flat.device, "onebit")
        means = flat.new_empty(self._buckets(flat.numel()), 2)
        ops.encode(self._clipped(flat), means, words, bucket_size)
        return means
