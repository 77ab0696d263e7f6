"""Implement AMQ, adaptive multiplier quantization (Faghri et al. 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hvd_adaptive.adapt.statistics import Adaptation
from hvd_adaptive.base.checks import check_choice, check_flag, check_integer
from hvd_adaptive.codec.adaptive_codec import NORMS, AdaptiveCodec
from hvd_adaptive.codec.level_table import LevelTable
from hvd_adaptive.levels import Distribution, fit_multiplier
from hvd_adaptive.schemes.alq import first_table
from hvd_adaptive.schemes.level_scheme import LevelScheme
from hvd_adaptive.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hvd_adaptive.shared_keywords import Norm, Shared, Statistics, Updates


class AMQ(LevelScheme):
    """Adaptive multiplier quantization (Faghri et al., Adaptive Gradient Quantization for
    Data-Parallel SGD, 2020, section 3.3, Eqs 8, 32, 38, App. B.3.3, C.3).

    The table is 0, +-p**s, ..., +-p, +-1 with a single parameter, the multiplier p =
    ``levels[-2]``. It is fitted by descent on the expected variance of the sampled buckets or, if
    ``normalized`` (AMQ-N), on the expected normalized variance. Statistics, schedule and broadcast
    are those of ALQ. The form of the paper's experiments is ``norm="l2", symmetric=True``.

    Args:
        bits: 2 to 8, including the sign.
        norm: "linf", or "l2" as in the paper.
        normalized: Whether to minimise the expected normalized variance (AMQ-N).
        symmetric: False for a level zero and s = 2**(bits-1) - 2; with 2 bits the levels are -1, 0
            and 1, and nothing is fitted. True for no zero and s = 2**(bits-1) - 1 (App. B.3.3).
        update_steps: As in ALQ.
        samples: As in ALQ.
        statistics: As in ALQ.
        **shared: See ``hvd_adaptive.settings.Settings``.

    Raises:
        ValueError: A keyword is wrong.

    Examples:
        >>> from hvd_adaptive import AMQ
        >>> compressor = AMQ(bits=3)
        >>> compressor.fit(torch.randn(65_536))
        >>> p = compressor.levels[-2]
        >>> torch.allclose(compressor.levels[-3:], torch.stack([p**2, p, p**0]))
        True
    """

    def __init__(
        self,
        *,
        bits: int = 3,
        norm: Norm = "linf",
        normalized: bool = False,
        symmetric: bool = False,
        update_steps: Updates = None,
        samples: int = 20,
        statistics: Statistics = "histogram",
        **shared: Unpack[Shared],
    ) -> None:
        bits = check_integer("bits", bits, 2, 8)
        check_choice("norm", norm, NORMS)
        check_flag("symmetric", symmetric)
        settings = Settings.from_keywords(AMQ, shared)
        first = first_table(bits, symmetric, settings.bucket_size)
        adaptation = Adaptation(normalized, update_steps, samples, statistics)
        super().__init__(
            AdaptiveCodec("amq", settings, norm, first, adaptation, _fitted, {}, self._again)
        )


def _fitted(law: Distribution, table: LevelTable) -> np.ndarray:
    count, start = len(table.magnitudes), float(table.magnitudes[-2])
    return fit_multiplier(law, count, table.symmetric, start).magnitudes
