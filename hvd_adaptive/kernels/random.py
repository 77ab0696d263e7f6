"""Derive counter-based random numbers: the host mixes keys, the kernels mix coordinates.

A stream is named by (seed, rank, step, group) and, except for a process's first compressor, the
compressor's number (instances.py). In a stream, bucket ``b`` owns the 64-bit key
``bucket_key(stream, b)``, and coordinate ``j`` of the bucket owns the 32-bit hash of ``j`` under
that key. Every kernel (reference, Numba, Triton) computes the same integers, so codes agree bit for
bit.

The group number of a fusion group is its index, plus the attempt at its step from bit 32 on.
Everything else has its own number, a ``Use``.
"""

from __future__ import annotations

import enum

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
MIX64_A = 0xBF58476D1CE4E5B9
MIX64_B = 0x94D049BB133111EB

# Constants of the per-coordinate hash (32-bit, three odd multipliers).
COUNTER = 0x9E3779B1
MIX32_A = 0x85EBCA6B
MIX32_B = 0xC2B2AE35


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


def mix64(value: int) -> int:
    """Apply the 64-bit finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * MIX64_A) & MASK64
    value = ((value ^ (value >> 27)) * MIX64_B) & MASK64
    return value ^ (value >> 31)


def stream_key(seed: int, rank: int = 0, step: int = 0, group: int = 0, *more: int) -> int:
    """Return the 64-bit key of the stream (seed, rank, step, group, ...).

    Each number is added and mixed in turn; ``bucket_key`` mixes once more, so that the last number
    passes through two rounds as well.
    """
    key = mix64(GOLDEN64)
    for number in (seed, rank, step, group, *more):
        key = mix64(key + (number & MASK64) * GOLDEN64 + 1)
    return key


def key_of(number: int, seed: int, rank: int, step: int, group: int) -> int:
    """Return the key of a stream of compressor ``number``; that of compressor 0 has no number."""
    return stream_key(seed, rank, step, group, *([number] if number else []))


def group_number(index: int, attempt: int = 0) -> int:
    """Return the number of fusion group ``index`` in an attempt at its step; below any ``Use``."""
    return index + (attempt % 2**31 << 32)


def bucket_key(stream: int, bucket: int) -> tuple[int, int]:
    """Return the low and high 32 bits of bucket ``bucket``'s key in ``stream``."""
    key = mix64(stream + (bucket + 1) * GOLDEN64)
    return key & 0xFFFFFFFF, key >> 32


def signed(key: int) -> int:
    """Return the int64 with the bits of a 64-bit key."""
    return key - (1 << 64) if key >> 63 else key
