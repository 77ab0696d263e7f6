"""Define the numbers of all random streams outside of fusion groups.

A stream is named by (seed, rank, step, group) and a few more numbers (kernels/random.py). The group
number of a fusion group is its index, plus the attempt at its step from bit 32 on. Everything else
has its own number, from 2**63 on.
"""

from __future__ import annotations

import enum


@enum.unique
class Use(enum.IntEnum):
    """Group numbers of the streams outside of training's groups."""

    ENCODE = 2**63  # compressor.encode
    SAMPLE = 2**63 + 1  # sampled buckets of a fit
    ERROR = 2**63 + 2  # relative error of a report
    DRAW = 2**63 + 16  # simulate.variance
    MEASURE = 2**63 + 32  # errors that determine a second stage's bits
    PICK = 2**63 + 33  # functions picked by QSVRG
    UPDATE = 2**63 + 34  # QSVRG's updates
    ROTATION = 2**63 + 48  # signs of EDEN's shared rotation
    AUTO = 2**63 + 64  # groups sent by exchange="auto" to measure


@enum.unique
class Inside(enum.IntEnum):
    """Sub-streams of a payload's stream."""

    SIGNS = 1  # of QCS's randomised Hadamard transform
    DITHERS = 2  # of QCS's quantiser
    ROTATION = 3  # signs of a rank's own rotation in EDEN
    AGAIN = 4  # signs of EDEN's second shared rotation


def group_number(index: int, attempt: int = 0) -> int:
    """Return the number of fusion group ``index`` in an attempt at its step; below any ``Use``."""
    return index + (attempt % 2**31 << 32)
