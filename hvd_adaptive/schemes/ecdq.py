"""Implement ECDQ: entropy-coded dithered quantisation (Ziv 1985; Zamir and Feder 1992)."""

from __future__ import annotations

import math
from typing import Any

from typing_extensions import Unpack

from hvd_adaptive.adapt.statistics import Adaptation
from hvd_adaptive.base.checks import check_choice, is_real
from hvd_adaptive.codec.dithered_codec import DitheredCodec
from hvd_adaptive.schemes.level_scheme import FittedScheme
from hvd_adaptive.settings import Settings, Shared, Statistics, Updates

LEAST_BITS, MOST_BITS = 0.5, 10.0
LEAST_VARIANCE, MOST_VARIANCE = 2e-6, 20.0


def often(step: int) -> bool:
    """Return True at steps 0, 1, 2, 4, ... 512, and every 500 from 1,000 on.

    The rate follows the gradients' law, which changes fastest at first.
    """
    if step <= 512:
        return step & (step - 1) == 0
    return step >= 1000 and step % 500 == 0


class ECDQ(FittedScheme):
    """Entropy-coded dithered quantisation: uniform steps with subtractive dither, then a prefix
    code that depends on the dither (Ziv 1985; Zamir and Feder 1992).

    A bucket v of root mean square ρ has the step Δ = δρ. A coordinate becomes the integer q =
    round(v_i/Δ + u_i) and is decoded as Δ(q - u_i). The dither u_i, uniform on (-1/2, 1/2), is
    generated from the payload's key by sender and receivers alike.

    The scheme is unbiased with relative variance δ²/12 for any bucket. v_i/Δ + u_i modulo 1 is
    uniform for every v_i, so the error, Δ times its distance to the nearest integer, is uniform on
    (-Δ/2, Δ/2). This law is the same for every v. Therefore the error has mean 0 and variance Δ²/12
    given v, and is uncorrelated with v. Errors of different coordinates are independent, since
    their dithers are. The sum of Δ²/12 over the bucket is δ²/12 ||v||². (The dither is a multiple
    of 2**-24, and float32 rounds the rest: both errors stay below Δ 2**-24 plus two units in the
    last place of v_i.)

    The rate is at most ½ log2(2πe (1/δ² + 1/12)) bits per coordinate for ideal codes that depend on
    the dither (docs/theory.md), for any law of the coordinates. The losses to it are:

    - The sign of the dither is removed by negating v_i and u_i together. This costs nothing, and
      makes the law of ±v_i even for any signs of the coordinates.
    - Above δ = 1/2, the code depends on the quarter of (0, 1/2) in which the dither's size lies;
      below, one code suffices. This costs 0.1 % at δ = 1.5 and 1 % at δ = 4.
    - Prefix codes of blocks of integers, which can take less than a bit each, cost 0.5 %.

    Rare integers are escaped. A bucket's step takes 32 bits, and a segment of 65,536 coordinates
    about 80.

    Before the first fit, the code is that of Gaussian buckets. A zero bucket decodes to exact
    zeros, as does a bucket whose step is below 2**-126. A bucket with NaN or Inf, or whose norm or
    step overflows float32, becomes NaN. If the codes would be longer, a payload holds 16-bit
    integers (32-bit ones for buckets above 16,376 coordinates). For the body see
    docs/wire_format.md.

    Args:
        bits: Bits per coordinate on the wire, 0.5 to 10, including everything except full-precision
            coordinates. At update steps δ is chosen so that the average over all steps and ranks
            reaches this value. It is computed from the law of abs(v_i)/ρ, sampled
            on all ranks with equal weights of buckets, and from the bits sent so far. Fewer bits
            are sent if the least δ, 1/256, needs fewer (sparse gradients). Below 0.5 bits the
            variance exceeds 2.4 times the squared norm for Gaussian buckets; above 10, it
            approaches float32's own rounding.
        relative_variance: δ²/12, 2e-6 to 20; either this or ``bits`` must be given. δ is then
            fixed, and update steps refit only the code.
        update_steps: As in ALQ. Default: 0, 1, 2, 4, ... 512, and every 500 from 1,000 on.
        samples: Buckets that each rank samples for a fit.
        statistics: "histogram".
        **shared: See ``hvd_adaptive.settings.Settings``. ``coding`` must be "fixed", since ECDQ has
            its own code; ``parameter_bits`` needs ``bits``, and values must be whole.

    Examples:
        >>> from hvd_adaptive import ECDQ
        >>> compressor = ECDQ(bits=2)
        >>> gradient = torch.randn(65_536)
        >>> compressor.fit(gradient)  # in training, ranks fit the code together
        >>> payload = compressor.encode(gradient)
        >>> difference = compressor.decode(payload) - gradient
        >>> bool(difference.norm() < 0.32 * gradient.norm())
        True
    """

    def __init__(
        self,
        *,
        bits: float | None = None,
        relative_variance: float | None = None,
        update_steps: Updates = None,
        samples: int = 20,
        statistics: Statistics = "histogram",
        **shared: Unpack[Shared],
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
            variance = _number("relative_variance", relative_variance, *ends)
            delta = math.sqrt(12 * variance)
        steps = often if update_steps is None else update_steps
        adaptation = Adaptation(True, steps, samples, statistics)
        settings = Settings.from_keywords(ECDQ, shared)
        super().__init__(DitheredCodec(settings, bits, delta, adaptation))


def _number(name: str, value: Any, least: float, most: float) -> float:
    """Return ``value`` as a float in [least, most]; raise ValueError otherwise."""
    if not is_real(value) or not least <= value <= most:
        raise ValueError(f"{name}={value!r}: must be a number from {least:g} to {most:g}")
    return float(value)
