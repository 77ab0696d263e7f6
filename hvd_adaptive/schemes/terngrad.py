"""Implement TernGrad: ternary levels and clipping (Wen et al. 2017)."""

from __future__ import annotations

from typing_extensions import Unpack

from hvd_adaptive.adapt.statistics import Adaptation
from hvd_adaptive.codec.adaptive_codec import FixedCodec
from hvd_adaptive.codec.table_codec import LevelTable
from hvd_adaptive.levels import uniform_magnitudes
from hvd_adaptive.schemes.level_scheme import LevelScheme
from hvd_adaptive.settings import Settings, Statistics, Updates, WithFeedback


class TernGrad(LevelScheme):
    """Ternary gradients (Wen et al. 2017, as the ALQ paper, App. K.2, and the ORQ paper use it).

    Each bucket is clipped to ``clip`` times its deviation (ALQ paper, Eq. 49), divided by its
    largest coordinate after clipping, and rounded at random, without bias, to -1, 0 or 1. 32 bits
    hold 20 codes.

    Args:
        clip: c, default 2.5; None disables clipping. Clipping reduces the variance considerably and
            makes the result slightly biased: it is unbiased for the clipped gradient only.
        update_steps: As in ALQ, for the code book if ``coding`` has one.
        samples: As in ALQ, for the code book.
        statistics: As in ALQ, for the code book.
        **shared: See ``hvd_adaptive.settings.Settings``.

    Examples:
        >>> from hvd_adaptive import TernGrad
        >>> compressor = TernGrad()
        >>> decoded = compressor.decode(compressor.encode(torch.randn(8192)))
        >>> decoded.unique().numel()
        3
    """

    def __init__(
        self,
        *,
        clip: float | None = 2.5,
        update_steps: Updates = None,
        samples: int = 20,
        statistics: Statistics = "histogram",
        **shared: Unpack[WithFeedback],
    ) -> None:
        settings = Settings.from_keywords(TernGrad, {**shared, "clip": clip})
        table = LevelTable(2, False, uniform_magnitudes(2, False))
        adaptation = Adaptation(False, update_steps, samples, statistics)
        super().__init__(FixedCodec("terngrad", settings, "linf", table, adaptation, {}))
