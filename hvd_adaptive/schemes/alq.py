"""Implement ALQ and AMQ, adaptive level and multiplier quantization (Faghri et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from typing_extensions import Unpack

from hvd_adaptive.adapt.statistics import Adaptation
from hvd_adaptive.base.checks import check_choice, check_flag, check_integer
from hvd_adaptive.codec.adaptive_codec import NORMS, AdaptiveCodec
from hvd_adaptive.codec.table_codec import LevelTable
from hvd_adaptive.levels import SOLVERS, Distribution, fit_levels, fit_multiplier
from hvd_adaptive.levels.worst_case import safe_magnitudes
from hvd_adaptive.schemes.level_scheme import LevelScheme
from hvd_adaptive.settings import Norm, Settings, Shared, Statistics, Updates


class ALQ(LevelScheme):
    """Adaptive level quantization (Faghri, Tabrizian, Markov, Alistarh, Roy, Ramezani-Kebrya:
    Adaptive Gradient Quantization for Data-Parallel SGD, 2020).

    Each bucket is divided by its norm and rounded at random, without bias, to a table of levels
    that all ranks share (section 3, Eqs 1, 2). The levels minimise the expected variance of
    the sampled buckets (section 3.4, Eq. 10) or, if ``normalized`` (ALQ-N), the expected normalized
    variance (Eq. 3). The solver is coordinate descent (Eqs 4, 5, 31, 33) or projection-free
    gradient descent (ALQG; Eqs 6, 7, 36). The law of the samples gets a corrected tail
    (docs/theory.md), so that the table also suits new buckets.

    By default the table has a level zero, so that a coordinate that is zero stays exactly zero. The
    form of the paper's experiments is ``norm="l2", symmetric=True``, whose error is larger.

    Args:
        bits: 2 to 8, including the sign.
        norm: "linf", or "l2" as in the paper.
        normalized: Whether to minimise the expected normalized variance (ALQ-N).
        solver: "coordinate_descent" or "gradient_descent" (ALQG).
        symmetric: False for 0 and signed magnitudes, 2**bits - 1 levels (section 3); with 2 bits
            these are -1, 0 and 1, whatever the gradients. True for 2**bits levels +-l1 ... +-1
            without zero (App. B.3).
        table: Levels until the first fit, ascending and signed. If None, they are the exponential
            levels with the least bound on the error of any bucket (docs/training.md).
        update_steps: Steps at which the table is refitted: a collection, an ascending iterable or a
            callable. Default: 0, 1, 7, 100, 2,000 and every 10,000 (docs/training.md).
        samples: Buckets that each rank samples at each of the steps that a fit is based on.
        statistics: "histogram", or "normal" for the paper's truncated normals.
        **shared: Keywords of every scheme. Those that people change first are ``exchange``,
            ``error_feedback``, ``parameter_bits``, ``warmup_steps`` and ``coding``;
            ``help(hvd_adaptive.settings.Settings)`` describes all of them.

    Examples:
        >>> from hvd_adaptive import ALQ
        >>> compressor = ALQ(bits=3)
        >>> gradient = torch.randn(65_536)
        >>> compressor.fit(gradient)  # in training, ranks fit the table together
        >>> compressor.levels.numel()
        7
        >>> payload = compressor.encode(gradient)
        >>> round(gradient.nbytes / payload.nbytes, 1)
        11.3
        >>> difference = compressor.decode(payload) - gradient
        >>> bool(difference.norm() < 0.5 * gradient.norm())
        True
    """

    def __init__(
        self,
        *,
        bits: int = 3,
        norm: Norm = "linf",
        normalized: bool = False,
        solver: Literal["coordinate_descent", "gradient_descent"] = "coordinate_descent",
        symmetric: bool = False,
        table: Sequence[float] | torch.Tensor | None = None,
        update_steps: Updates = None,
        samples: int = 20,
        statistics: Statistics = "histogram",
        **shared: Unpack[Shared],
    ) -> None:
        bits = check_integer("bits", bits, 2, 8)
        check_choice("norm", norm, NORMS)
        check_flag("symmetric", symmetric)
        check_choice("solver", solver, SOLVERS)
        settings, own = Settings.from_keywords(ALQ, shared), {"solver": solver}
        first = first_table(bits, symmetric, settings.bucket_size, table)
        adaptation = Adaptation(normalized, update_steps, samples, statistics)
        fit = partial(_fitted, solver)
        super().__init__(
            AdaptiveCodec("alq", settings, norm, first, adaptation, fit, own, self._again)
        )


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
            AdaptiveCodec("amq", settings, norm, first, adaptation, _multiplier, {}, self._again)
        )


def _multiplier(law: Distribution, table: LevelTable) -> np.ndarray:
    count, start = len(table.magnitudes), float(table.magnitudes[-2])
    return fit_multiplier(law, count, table.symmetric, start).magnitudes


def _fitted(solver: str, law: Distribution, table: LevelTable) -> np.ndarray:
    starts = (table.magnitudes,)
    return fit_levels(law, table.bits, table.symmetric, solver, extra_starts=starts).magnitudes


def first_table(
    bits: int,
    symmetric: bool,
    bucket_size: int,
    levels: Sequence[float] | torch.Tensor | None = None,
) -> LevelTable:
    """Return the table of the given levels, or one that is safe for any gradient if None."""
    count = 1 << (bits - 1)
    if levels is None:
        magnitudes = safe_magnitudes(count, symmetric, bucket_size)
        return LevelTable(bits, symmetric, np.array(magnitudes))
    table = LevelTable.from_levels(levels, bits, symmetric)
    if table.magnitudes.size < count:  # as fits return them
        raise ValueError(
            f"table: must have {2 * count - 1} levels for bits={bits}, symmetric={symmetric}, not "
            f"{len(table.levels)}"
        )
    return table
