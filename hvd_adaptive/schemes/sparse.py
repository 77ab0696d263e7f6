"""Implement SparseSGD: unbiased random sparsification (Wangni et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from hvd_adaptive.base.checks import is_real
from hvd_adaptive.codec.adaptive_codec import PlainCodec
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.kernels import sparse
from hvd_adaptive.kernels.sparse import most_words, rice_parameter
from hvd_adaptive.settings import Settings, Shared


class SparseSGD(GradientCompressor):
    """Gradient sparsification (Wangni, Wang, Liu, Zhang, NeurIPS 2018).

    Coordinate g_i is kept with probability p_i, as g_i/p_i, and is 0 otherwise. This is unbiased,
    with variance Σ g_i²/p_i - Σ g_i². Among all probabilities with Σ p_i = ``density`` times the
    bucket size, p_i = min(1, |g_i|/λ) are the best. (Section 3.1 of the paper minimises the density
    for a variance; here the variance is minimised for a density. The solutions are the same family,
    Eq. 4.) λ is found exactly, by the iteration of Algorithm 3 without a limit of rounds. The
    variance is then Σ |g_i| (λ - |g_i|) over the coordinates below λ.

    Large coordinates (|g_i| >= λ) are sent as float32, exactly. All other kept coordinates are ±λ,
    so only their index and sign are sent (section 3.3). Indices are delta-coded with a Rice code
    fitted to the density: about log2(1/density) + 3.5 to 4 bits for a kept coordinate.

    A probability is rounded to a multiple of 2**-24, so the mean is off by at most λ 2**-25.
    Coordinates below 2**-126 count as zeros. A bucket with NaN or Inf, or whose λ overflows
    float32, becomes NaN.

    The length of a payload is random; ``body_bytes`` is its maximum. docs/wire_format.md
    describes the body.

    Args:
        density: Expected share of kept coordinates, at most 1; required. Fewer are kept if fewer
            are nonzero. It must be above 2**-25 / ``bucket_size``; otherwise every probability is
            rounded to 0.
        **shared: See ``hvd_adaptive.settings.Settings``.

    Examples:
        >>> from hvd_adaptive import SparseSGD
        >>> compressor = SparseSGD(density=0.01)
        >>> decoded = compressor.decode(compressor.encode(torch.randn(1_000_000)))
        >>> bool(9_000 < decoded.count_nonzero() < 11_000)
        True
    """

    def __init__(self, *, density: float | None = None, **shared: Unpack[Shared]) -> None:
        settings = Settings.from_keywords(SparseSGD, shared)
        least = 2**-25 / settings.bucket_size
        if density is None or not is_real(density) or not least < density <= 1:
            allowed = f"above 2**-25 / bucket_size = {least:.3g} and at most 1"
            raise ValueError(f"density={density!r}: must be a number {allowed}")
        super().__init__(_Codec(settings, float(density)))


class _Codec(PlainCodec):
    name = "sparse"
    alphabet = 3
    has_zero = True
    encodes_on_host = True
    coding_of_averages = "elias"  # averages of few coordinates are sparse, too

    def __init__(self, settings: Settings, density: float) -> None:
        super().__init__(settings)
        self.density, self._rice = density, rice_parameter(density)

    def codec_settings(self) -> dict[str, Any]:
        return {"density": self.density}

    def body_bytes(self, coordinates: int) -> int:
        whole, rest = divmod(coordinates, self.settings.bucket_size)
        exact = whole * self._most_exact(self.settings.bucket_size) + self._most_exact(rest)
        words = most_words(coordinates, self._rice)
        return self.least_body_bytes(coordinates) + 4 * (exact + words)

    def least_body_bytes(self, coordinates: int) -> int:
        return 8 + 4 * self._buckets(coordinates)

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> int:
        bucket, own = self._bucket(flat.numel()), (self.density, self._rice, key)
        return sparse.encode_body(self._clipped(flat), bucket, *own, body)

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        sparse.add_bodies(bodies, self._bucket(out.numel()), self._rice, out)
        if factor != 1.0:
            out *= factor

    def _most_exact(self, size: int) -> int:
        """Return the most coordinates of a bucket that can reach λ at this density."""
        return min(size, math.floor(self.density * size) + 1)
