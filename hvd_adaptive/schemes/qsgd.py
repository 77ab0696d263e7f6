"""Implement QSGD and QSGDinf: uniform levels (Alistarh et al. 2017)."""

from __future__ import annotations

from typing_extensions import Unpack

from hvd_adaptive.adapt.statistics import Adaptation
from hvd_adaptive.base.checks import check_choice, check_flag, check_integer
from hvd_adaptive.codec.adaptive_codec import NORMS, FixedCodec
from hvd_adaptive.codec.table_codec import LevelTable
from hvd_adaptive.levels import uniform_magnitudes
from hvd_adaptive.schemes.level_scheme import LevelScheme
from hvd_adaptive.settings import Norm, Settings, Shared, Statistics, Updates


class QSGD(LevelScheme):
    """Quantized SGD (Alistarh, Grubic, Li, Tomioka, Vojnovic, 2017, Eq. 4, Lemma 3.1).

    The levels are 0, 1/s, ..., 1 with a sign. |v_i|/||v|| is rounded at random, without bias, to
    one of its two neighbours; v = 0 gives 0. ``norm="l2"`` is used in the paper's theory,
    ``norm="linf"`` in its experiments (QSGDinf).

    Args:
        bits: 2 to 8, including the sign: s = 2**(bits-1) - 1 intervals (default 3 bits, s = 3).
        intervals: s, 1 to 127, instead of ``bits``; the code has the least sufficient width.
        norm: "l2" or "linf".
        symmetric: Use the ALQ paper's QSGDinf, 2**bits uniform levels without zero.
        update_steps: As in ALQ, for the code book if ``coding`` has one.
        samples: As in ALQ, for the code book.
        statistics: As in ALQ, for the code book.
        **shared: See ``hvd_adaptive.settings.Settings``.

    Examples:
        >>> from hvd_adaptive import QSGD
        >>> QSGD(bits=3).levels.numel()
        7
        >>> gradient = torch.randn(65_536)
        >>> compressor = QSGD(bits=8, norm="linf")  # as in the paper's experiments
        >>> difference = compressor.decode(compressor.encode(gradient)) - gradient
        >>> bool(difference.norm() < 0.02 * gradient.norm())
        True
    """

    def __init__(
        self,
        *,
        bits: int | None = None,
        intervals: int | None = None,
        norm: Norm = "l2",
        symmetric: bool = False,
        update_steps: Updates = None,
        samples: int = 20,
        statistics: Statistics = "histogram",
        **shared: Unpack[Shared],
    ) -> None:
        check_choice("norm", norm, NORMS)
        check_flag("symmetric", symmetric)
        if intervals is not None:
            if bits is not None or symmetric:
                raise ValueError(
                    f"intervals={intervals!r}: cannot be given together with bits or symmetric=True"
                )
            intervals = check_integer("intervals", intervals, 1, 127)
            bits, count = 1 + intervals.bit_length(), intervals + 1
        else:
            bits = check_integer("bits", 3 if bits is None else bits, 2, 8)
            count = 1 << (bits - 1)
        table = LevelTable(bits, symmetric, uniform_magnitudes(count, symmetric))
        adaptation = Adaptation(False, update_steps, samples, statistics)
        own = {} if intervals is None else {"bits": None, "intervals": intervals}
        settings = Settings.from_keywords(QSGD, shared)
        super().__init__(FixedCodec("qsgd", settings, norm, table, adaptation, own))
