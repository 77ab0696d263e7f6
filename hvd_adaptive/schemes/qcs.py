"""Implement QCS: quantized compressive sampling (Abdi and Fekri 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from typing_extensions import Unpack

from hvd_adaptive import kernels
from hvd_adaptive.base.checks import check_choice, check_integer, is_real
from hvd_adaptive.codec.adaptive_codec import PlainCodec
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.kernels import hadamard
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.qcs import Run
from hvd_adaptive.settings import Settings, Shared

LEAST_GAIN = 4
SCALE_BITS = 32
# Allowed ranges Q, for codes of up to 8 bits; 1/2 is the paper's 1-bit quantiser.
RANGES = (0.5, *range(1, 128))


def variance_bound(order: int, measurements: int, quantizer_range: float) -> float:
    """Return γ of Eq. 10: E‖ĝ - g‖² <= γ‖g‖² for the unbiased estimator, any g and any Q.

    The exact error is n/k - 1 (the loss of projecting, for any rows of H) plus n E[ς²]/(12 ‖g‖²)
    (the noise of the dither). E‖v‖∞² <= 3 log(k)/(k - 1) ‖g‖² gives Eq. 10. At k = 1 the paper
    prints n - 1 and omits the dither; n/(12 Q²) is added here, since E v² = ‖g‖².

    Args:
        order: n, coordinates of a partition.
        measurements: k, 1 to n.
        quantizer_range: Q, including 1/2.
    """
    n, k, q = order, measurements, quantizer_range
    largest = 1 / 12 if k == 1 else math.log(k) / (4 * (k - 1))
    return n / k - 1 + n / q**2 * largest


def best_projection(order: int, gain: float) -> tuple[int, float]:
    """Return (k, Q) with the least γ whose compression gain is at least ``gain``.

    γ falls as k grows, so only the largest k that the gain allows is tried for each Q.
    """
    bits = 32 * order / gain * (1 + 1e-12) - SCALE_BITS
    affordable = [(min(order, int(bits / math.log2(2 * q + 1))), q) for q in RANGES]
    return min(
        (pair for pair in affordable if pair[0] > 0), key=lambda pair: variance_bound(order, *pair)
    )


class QCS(GradientCompressor):
    """Quantized compressive sampling of gradients (Abdi and Fekri, AAAI 2020, Algorithm 1).

    A partition g of n = ``bucket_size`` coordinates is projected to v = H (r ⊙ g)/√k, where r are
    new random signs and H is the first k rows of a Hadamard matrix (Eq. 2). v is quantised with a
    subtractive dither u ~ U(-1/2, 1/2), q = round(v/ς + u), ς = ‖v‖∞/Q, to the 2Q + 1 integers -Q …
    Q (Eq. 4), or for Q = 1/2 to one bit, q = sign(v/ς + u)/2 (Eq. 5, corrected: as printed its mean
    is 2 v). Receivers regenerate r and u from the payload's key, compute v̂ = ς (q - u) (Eq. 6),
    and estimate ĝ = α r ⊙ Hᵀ v̂/√k (Eq. 8). Only scales and integers are sent.

    Any fixed rows of H are valid: E[r_i r_j] = 0 for i ≠ j and the entries are ±1, so E[TᵀT] = I
    and T Tᵀ = n/k I (Lemma 1; footnote 1). The first k rows make the transform cheap: r ⊙ g is
    folded to the next power of two >= k before the fast Walsh-Hadamard transform.

    A last, partial bucket of a group is padded with zeros to the next allowed size m, with ⌈k m/n⌉
    measurements and its own scale. A zero projection, which is possible for g ≠ 0 if k < n, decodes
    to zeros. A bucket with a coordinate that is not finite, or whose sums overflow float32 (from
    10^38/n on), decodes to NaN.

    Encoding costs one transform, n log2(n) additions, per bucket. Decoding costs one for each
    rank's payload: every rank has its own signs, so projections cannot be added before they are
    inverted.

    Args:
        estimator: "unbiased" (α = 1; E‖ĝ - g‖² <= γ‖g‖², Theorem 2) or "mmse" (α = 1/(γ + 1),
            biased; <= γ/(γ + 1) ‖g‖², Lemma 3). γ is that of Eq. 10: see ``variance_bound``.
        gain: Compression gain, from 4 to 32 n/33 (Eq. 11, including the scale's 32 bits); k and Q
            with the least γ are chosen. Default 10. Not together with the next two.
        measurements: k, 1 to n (default n).
        quantizer_range: Q, 1/2 or 1 to 127.
        **shared: See ``hvd_adaptive.settings.Settings``. ``bucket_size`` must be a power of two or
            one of the paper's 96, 100, 192, 200, 288, 320, 384.

    Examples:
        >>> from hvd_adaptive import QCS
        >>> compressor = QCS(gain=10.0)
        >>> gradient = torch.randn(65_536)
        >>> round(gradient.nbytes / compressor.encode(gradient).nbytes)
        10
    """

    def __init__(
        self,
        *,
        estimator: Literal["unbiased", "mmse"] = "unbiased",
        gain: float | None = None,
        measurements: int | None = None,
        quantizer_range: float | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        check_choice("estimator", estimator, ("unbiased", "mmse"))
        settings = Settings.from_keywords(QCS, shared)
        order = settings.bucket_size
        if not hadamard.is_order(order):
            raise ValueError(f"bucket_size={order!r}: must be {hadamard.ALLOWED}")
        if quantizer_range is None and measurements is None:
            gain, most = 10 if gain is None else gain, 32 * order / (SCALE_BITS + 1)
            if not is_real(gain) or not LEAST_GAIN <= gain <= most:
                raise ValueError(
                    f"gain={gain!r}: must be a number from {LEAST_GAIN} to {most:.6g} (one "
                    f"measurement of one bit, and the scale) for bucket_size={order}"
                )
            measurements, quantizer_range = best_projection(order, gain)
        elif gain is not None:
            raise ValueError(
                f"gain={gain!r}: cannot be given together with measurements or quantizer_range"
            )
        rows = check_integer(
            "measurements", order if measurements is None else measurements, 1, order
        )
        if quantizer_range is None or not is_real(quantizer_range) or quantizer_range not in RANGES:
            raise ValueError(
                f"quantizer_range={quantizer_range!r}: must be 0.5 or an integer from 1 to "
                f"{RANGES[-1]}"
            )
        quantizer_range = quantizer_range if quantizer_range < 1 else int(quantizer_range)
        super().__init__(QCSCodec(settings, estimator, rows, quantizer_range))


class QCSCodec(PlainCodec):
    """Codec of QCS; k is ``measurements``, Q ``quantizer_range``."""

    name = "qcs"
    alphabet = 0  # until the constructor has set it

    def __init__(
        self, settings: Settings, estimator: str, measurements: int, quantizer_range: float
    ) -> None:
        super().__init__(settings)
        self.estimator, self.measurements = estimator, measurements
        self.quantizer_range, self.alphabet = quantizer_range, int(2 * quantizer_range + 1)

    @property
    def gamma(self) -> float:
        """Return γ of Eq. 10 for a whole partition."""
        return variance_bound(self.settings.bucket_size, self.measurements, self.quantizer_range)

    @property
    def compression_gain(self) -> float:
        """Return Eq. 11, 32 n over the bits of a partition, including the scale's 32 bits."""
        bits = self.measurements * math.log2(2 * self.quantizer_range + 1) + SCALE_BITS
        return 32 * self.settings.bucket_size / bits

    def codec_settings(self) -> dict[str, Any]:
        return {
            "estimator": self.estimator,
            "measurements": self.measurements,
            "quantizer_range": self.quantizer_range,
        }

    def body_bytes(self, coordinates: int) -> int:
        runs = self._runs(coordinates)
        words = packing_of(self.alphabet).words(sum(run.codes for run in runs))
        return 4 * (sum(run.buckets for run in runs) + words)

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> None:
        flat, runs = self._clipped(flat), self._runs(flat.numel())
        ops = kernels.for_device(flat.device, "qcs")
        ops.encode(flat, *_split(body, runs), runs, self.alphabet, key)

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        runs = self._runs(out.numel())
        pairs = [_split(body, runs) for body in bodies]
        ops = kernels.for_device(out.device, "qcs")
        ops.decode_add(pairs, keys, runs, self.alphabet, factor, out)

    def _runs(self, coordinates: int) -> list[Run]:
        """Return the run of whole buckets, then that of the partial one, as far as they exist."""
        n, k = self.settings.bucket_size, self.measurements
        count, rest = divmod(coordinates, n)
        runs = [Run(0, count * n, 0, n, k, self._weight(n, k))] if count else []
        if rest:
            m = hadamard.smallest_order(rest)
            rows = -(-k * m // n)
            runs.append(Run(count * n, coordinates, count, m, rows, self._weight(m, rows)))
        return runs

    def _weight(self, order: int, rows: int) -> float:
        """Return α of Eq. 9 or Eq. 12."""
        if self.estimator == "unbiased":
            return 1.0
        return 1 / (variance_bound(order, rows, self.quantizer_range) + 1)


def _split(body: torch.Tensor, runs: Sequence[Run]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and words of a body."""
    at = 4 * sum(run.buckets for run in runs)
    return body[:at].view(torch.float32), body[at:].view(torch.int32)
