"""ECDQ: entropy-coded dithered quantisation (Ziv 1985; Zamir and Feder 1992)."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.schemes.adaptive import Adaptation
from hvd_adaptive.schemes.dithered_code import gaussian_code
from hvd_adaptive.schemes.dithered_scheme import DitheredScheme
from hvd_adaptive.settings import Settings, check_choice

LEAST_BITS, MOST_BITS = 0.5, 10.0
LEAST_VARIANCE, MOST_VARIANCE = 2e-6, 20.0


def often(step: int) -> bool:
    """Steps 0, 1, 2, 4, ... 512, then every 500 from 1,000 on: the rate follows the gradients'
    law, which changes fastest at first."""
    if step <= 512:
        return step & (step - 1) == 0
    return step >= 1000 and step % 500 == 0


class ECDQ(DitheredScheme):
    """Uniform steps with subtractive dither, then a prefix code that knows the dither.

    A bucket v of root mean square ρ has the step Δ = δρ. A coordinate becomes the integer
    q = round(v_i/Δ + u_i) and comes back as Δ(q - u_i), where the dither u_i, uniform on
    (-1/2, 1/2), is made from the payload's key by sender and receivers alike.

    Unbiased, of relative variance δ²/12 whatever the bucket: v_i/Δ + u_i modulo 1 is uniform, for
    every v_i, so the error, Δ times its distance to the nearest integer, is uniform on
    (-Δ/2, Δ/2). It is the same law for every v, hence of mean 0 and variance Δ²/12 given v, and
    uncorrelated with it; errors of different coordinates are independent, since their dithers are.
    Σ Δ²/12 over the bucket is δ²/12 ||v||². (The dither is a multiple of 2**-24, float32 rounds
    the rest: both stay below Δ 2**-24 plus two units in the last place of v_i.)

    Rate: at most ½ log2(2πe (1/δ² + 1/12)) bits per coordinate for ideal codes that know the
    dither (levels/dithered.py), for any law of the coordinates. What is lost to it: the sign of the
    dither is taken out, v_i and u_i turned round together, which costs nothing and makes the law of
    ±v_i even, whatever the signs of the coordinates; of its size the code knows the quarter of
    (0, 1/2) it lies in, above δ = 1/2 (below, one code does): 0.1 % more at δ = 1.5, 1 % at δ = 4;
    prefix codes of blocks of integers, which need not take a bit each: 0.5 %. Rare integers
    escape. A bucket's step takes 32 bits, a segment of 65,536 coordinates some 80.

    bits: bits per coordinate on the wire, everything but full-precision coordinates included, 0.5
        to 10. δ is chosen at update steps so that their average over all steps and ranks meets
        this (rate_control.py): from the law of abs(v_i)/ρ, sampled on all ranks, buckets alike,
        and from what was really sent. Less is sent where the least δ, 1/256, needs less (sparse
        gradients). Below 0.5 bits the variance exceeds 2.4 times the square of the norm for
        Gaussian buckets; above 10 float32's own rounding is not far.
    relative_variance: δ²/12, 2e-6 to 20, in place of ``bits``: then δ is fixed and update steps
        refit the code alone.
    update_steps: see schedule.UpdateSchedule; where None, see ``often``. samples: buckets that each
        rank draws. statistics: "histogram".
    shared: see settings.Settings. coding: "fixed" alone, since ECDQ brings a code of its own;
        parameter_bits: whole bits, and only with ``bits``.

    Before a fit the code is that of Gaussian buckets. A zero bucket decodes to exact zeros, as does
    one whose step is below 2**-126; a bucket with NaN or Inf, or whose norm or step overflows
    float32, becomes NaN. A payload is never longer than one of 16-bit integers (32-bit ones for
    buckets above 16,376 coordinates), which it falls back to. Body: kernels/dithered.py.
    """

    name = "ecdq"

    def __init__(
        self,
        *,
        bits: float | None = None,
        relative_variance: float | None = None,
        update_steps: Iterable[int] | Callable[[int], bool] | None = None,
        samples: int = 20,
        statistics: str = "histogram",
        **shared: Any,
    ) -> None:
        if (bits is None) == (relative_variance is None):
            raise ValueError(
                f"bits={bits!r}, relative_variance={relative_variance!r}: give one of them"
            )
        check_choice("statistics", statistics, ("histogram",))
        delta = None
        if bits is not None:
            bits = _number("bits", bits, LEAST_BITS, MOST_BITS)
        else:
            ends = LEAST_VARIANCE, MOST_VARIANCE
            delta = math.sqrt(12 * _number("relative_variance", relative_variance, *ends))
        steps = often if update_steps is None else update_steps
        adaptation = Adaptation(True, steps, samples, statistics)
        super().__init__(Settings.from_keywords("ECDQ", shared), bits, delta, adaptation)

    def second_codec(self, bits: int) -> GradientCompressor:
        """A codec for averages: the step that takes ``bits`` for Gaussian buckets. It needs no fit:
        its variance is the same for any law, and averages are the more Gaussian the more ranks."""
        variance = gaussian_code(float(bits), None).delta ** 2 / 12
        return ECDQ(relative_variance=variance, **self._for_averages())

    def fitted_to(self, flat: torch.Tensor) -> GradientCompressor:
        if self.bits is None:  # the same variance for any law
            return self
        own = self.settings
        copy = ECDQ(bits=self.bits, bucket_size=own.bucket_size, clip=own.clip)
        copy.fit(flat)
        return copy


def _number(name: str, value: Any, least: float, most: float) -> float:
    """``value`` as a float in [least, most]; ValueError otherwise."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not least <= value <= most:
        raise ValueError(f"{name}={value!r}: must be a number from {least:g} to {most:g}")
    return float(value)
