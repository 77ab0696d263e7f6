"""Numbers of all random streams: what else than a fusion group draws random numbers.

A stream is named by (seed, rank, step, group) and a few more numbers (kernels/random.py). A fusion
group is named by its index, and by the attempt at its step from bit 32 on. Everything else has a
number of its own from 2**63 on.
"""

from __future__ import annotations

import enum


@enum.unique
class Use(enum.IntEnum):
    """Groups of the streams outside of training's groups."""

    ENCODE = 2**63  # compressor.encode
    SAMPLE = 2**63 + 1  # which buckets a table is fitted to
    ERROR = 2**63 + 2  # the relative error of a report
    DRAW = 2**63 + 16  # simulate.variance
    MEASURE = 2**63 + 32  # the errors from which a second stage's bits follow
    PICK = 2**63 + 33  # the functions that QSVRG picks
    UPDATE = 2**63 + 34  # QSVRG's updates
    AUTO = 2**63 + 64  # the groups that exchange="auto" sends to measure


@enum.unique
class Inside(enum.IntEnum):
    """Sub-streams of a payload's stream."""

    SIGNS = 1  # of QCS's randomised Hadamard transform
    DITHERS = 2  # of QCS's quantiser


def group_number(index: int, attempt: int = 0) -> int:
    """Of fusion group ``index`` at an attempt at its step: below every ``Use``."""
    return index + (attempt % 2**31 << 32)
