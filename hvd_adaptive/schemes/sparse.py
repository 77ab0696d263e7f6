"""Implement SparseSGD: unbiased random sparsification (Wangni et al. 2018)."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from hvd_adaptive import kernels
from hvd_adaptive.codec import Verdict
from hvd_adaptive.coding.rice import most_words, rice_parameter
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.device import Later
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.kernels import Lazy, reference_sparse
from hvd_adaptive.settings import Settings

cuda_sparse_bodies = Lazy("cuda_sparse_bodies")


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

    The length of a payload is random; ``body_bytes`` is its maximum. The body holds the number of
    exact values (int64), λ of each bucket (float32), the exact values (float32), and the words of
    coding/rice.py.

    Args:
        density: Expected share of kept coordinates, above 0 and at most 1. Fewer are kept if fewer
            are nonzero.
        **shared: See ``settings.Settings``.

    Raises:
        ValueError: A keyword is wrong.
    """

    name = "sparse"
    needs_triton = True

    def __init__(self, *, density: float, **shared: Any) -> None:
        self.density = _check_density(density)
        super().__init__(Settings.from_keywords("SparseSGD", shared))
        self._rice = rice_parameter(self.density)

    @property
    def alphabet(self) -> int:
        return 3

    def codec_settings(self) -> dict[str, Any]:
        return {"density": self.density}

    def body_bytes(self, coordinates: int) -> int:
        whole, rest = divmod(coordinates, self.settings.bucket_size)
        exact = whole * self._most_exact(self.settings.bucket_size) + self._most_exact(rest)
        words = most_words(coordinates, self._rice)
        return self.least_body_bytes(coordinates) + 4 * (exact + words)

    def least_body_bytes(self, coordinates: int) -> int:
        return 8 + 4 * self._buckets(coordinates)

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> int | Later:
        bucket = self._bucket(flat.numel())
        if flat.is_cuda and flat.numel():
            values = self._clipped(flat)
            return cuda_sparse_bodies.encode(values, bucket, self.density, self._rice, key, body)
        if not flat.numel():
            body.zero_()
            return body.numel()
        encode = _kernels(flat.device).encode
        lambdas, exact, words = encode(self._clipped(flat), bucket, self.density, self._rice, key)
        body[:8].view(torch.int64)[0] = exact.numel()
        at = 8
        for section in (lambdas, exact, words):
            end = at + 4 * section.numel()
            body[at:end].view(section.dtype).copy_(section)
            at = end
        return at

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> Verdict | None:
        bucket, flags = self._bucket(out.numel()), None
        if out.is_cuda:
            flags = cuda_sparse_bodies.add(bodies, bucket, self._rice, out) if out.numel() else None
        else:
            for body in bodies:
                sections = self._split(body, out.numel())
                if not _kernels(out.device).add(sections, bucket, self._rice, out):
                    raise _unreadable(out)
        if factor != 1.0:
            out *= factor
        return None if flags is None else lambda: _check_readable(flags, out)

    def second_codec(self, bits: int) -> GradientCompressor:
        """Return a codec for averages that codes runs of zeros.

        Averages of few coordinates are sparse too.
        """
        from hvd_adaptive.schemes.qsgd import QSGD

        return QSGD(bits=bits, norm="linf", coding="elias", **self._for_averages())

    def _split(self, body: torch.Tensor, coordinates: int) -> reference_sparse.Sections:
        """Return λ, exact values and words of a body; raise PayloadError if it is too short."""
        start = self.least_body_bytes(coordinates)
        count = int(body[:8].view(torch.int64)[0])
        if not 0 <= count <= min(coordinates, (body.numel() - start) // 4):
            raise PayloadError(f"payload says it holds {count} exact values")
        end = start + 4 * count
        lambdas, exact = body[8:start].view(torch.float32), body[start:end].view(torch.float32)
        return lambdas, exact, body[end : end + (body.numel() - end) // 4 * 4].view(torch.int32)

    def _most_exact(self, size: int) -> int:
        """Return the most coordinates of a bucket that can reach λ at this density."""
        return min(size, math.floor(self.density * size) + 1)


def _check_readable(flags: Later, out: torch.Tensor) -> None:
    """Raise PayloadError if one of several bodies could not be read."""
    if flags.get().any():
        raise _unreadable(out)


def _unreadable(out: torch.Tensor) -> PayloadError:
    return PayloadError(f"payload's body does not hold {out.numel()} coordinates")


def _kernels(device: torch.device) -> ModuleType:
    return kernels.for_device(device, "sparse")


def _check_density(value: Any) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 < value <= 1:
        raise ValueError(f"density={value!r}: must be a number above 0 and at most 1")
    return float(value)
