"""Implement NUQSGD: exponentially spaced levels (Ramezani-Kebrya et al. 2019)."""

from __future__ import annotations

from typing_extensions import Unpack

from hvd_adaptive.adapt.statistics import Adaptation
from hvd_adaptive.base.checks import check_choice, check_flag, check_integer, is_real
from hvd_adaptive.codec.adaptive_codec import NORMS, FixedCodec
from hvd_adaptive.codec.table_codec import LevelTable
from hvd_adaptive.levels import exponential_magnitudes
from hvd_adaptive.schemes.level_scheme import LevelScheme
from hvd_adaptive.settings import Norm, Settings, Shared, Statistics, Updates

# The least level must be a float32. Between levels below 2**-102, the gap times 2**-24 underflows,
# and r is rounded up instead of at random: a bias of at most 2**-102 of the norm.
_LEAST = 2.0**-140


class NUQSGD(LevelScheme):
    """Nonuniform quantized SGD (Ramezani-Kebrya, Faghri, Roy, 2019).

    The levels are 0, p**s, ..., p, 1 with a sign, and rounding is random and unbiased. The paper
    uses p = 1/2 and the L2 norm.

    Args:
        bits: 2 to 8, including the sign.
        multiplier: p, between 0 and 1, default 0.5. The least level must not be smaller than
            2**-140 (at 8 bits p must be at least 0.463).
        norm: "l2" or "linf".
        symmetric: Use the levels +-1, +-p, ..., without zero, as in the ALQ paper's experiments.
        update_steps: As in ALQ, for the code book if ``coding`` has one.
        samples: As in ALQ, for the code book.
        statistics: As in ALQ, for the code book.
        **shared: See ``hvd_adaptive.settings.Settings``.

    Examples:
        >>> from hvd_adaptive import NUQSGD
        >>> NUQSGD(bits=3).levels.tolist()
        [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]
    """

    def __init__(
        self,
        *,
        bits: int = 3,
        multiplier: float = 0.5,
        norm: Norm = "l2",
        symmetric: bool = False,
        update_steps: Updates = None,
        samples: int = 20,
        statistics: Statistics = "histogram",
        **shared: Unpack[Shared],
    ) -> None:
        bits = check_integer("bits", bits, 2, 8)
        check_choice("norm", norm, NORMS)
        check_flag("symmetric", symmetric)
        powers = (1 << (bits - 1)) - (1 if symmetric else 2)
        least = _LEAST ** (1 / max(powers, 1))
        if not is_real(multiplier) or not least <= multiplier < 1:
            raise ValueError(
                f"multiplier={multiplier!r}: must be a number from {least:.3g} to below 1"
            )
        p = float(multiplier)
        magnitudes = exponential_magnitudes(1 << (bits - 1), p, symmetric)
        table = LevelTable(bits, symmetric, magnitudes)
        adaptation = Adaptation(False, update_steps, samples, statistics)
        settings, own = Settings.from_keywords(NUQSGD, shared), {"multiplier": p}
        super().__init__(FixedCodec("nuqsgd", settings, norm, table, adaptation, own))
