"""Pack and unpack codes of buckets that have levels of their own, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.packing import Packing, check_sections, packing_of
from hvd_adaptive.kernels.triton.decoder import unpack_add
from hvd_adaptive.kernels.triton.encoder import pack
from hvd_adaptive.kernels.triton.uniforms import integer24

# So many thresholds are laid out one after the other, 128 times in the kernel of codes of whole
# bits, else once for each digit of a unit. Compiling thus takes seconds for any number of levels.
_MOST_OF_BITS, _MOST_OF_DIGITS = 3, 8


def round_codes(flat, levels, words, bucket_size, key):
    alphabet = levels.shape[1]
    packing, state = packing_of(alphabet), (levels.contiguous(), alphabet)
    scheme = {"PREPARE": _scaling, "CODE": _rounded, "OPTIONS": (alphabet, _turn(packing))}
    pack(flat, words, bucket_size, packing, key, state, **scheme)


def cut_codes(flat, cuts, words, bucket_size):
    scheme, state = {"PREPARE": _cut, "CODE": _side, "OPTIONS": ()}, (cuts.contiguous(),)
    pack(flat, words, bucket_size, packing_of(2), 0, state, **scheme)


def decode_add(payloads, bucket_size, factor, out):
    alphabet = payloads[0][0].shape[1]
    packing = packing_of(alphabet)
    n = out.numel()
    check_sections(payloads, "buckets", -(-n // bucket_size), packing.words(n))
    # Levels were made for each rank; side by side they do not cut runs of gathered words.
    rows = torch.stack([values for values, _ in payloads])
    pairs = [(row, words) for row, (_, words) in zip(rows, payloads, strict=True)]
    unpack_add(
        pairs, bucket_size, packing, factor, out, True, (out,), VALUE=_level, OPTIONS=(alphabet,)
    )


def _turn(packing: Packing) -> int:
    """Return how many thresholds one turn of ``_rounded``'s loop compares with."""
    thresholds = packing.alphabet - 1
    turns = -(-thresholds // (_MOST_OF_BITS if packing.digits == 1 else _MOST_OF_DIGITS))
    return -(-thresholds // turns)


@triton.jit
def _scaling(bucket, there, state, OPTIONS: tl.constexpr):
    """Return the power of two that brings the largest level into [2, 4), 0 if there is none, and
    the place at which the bucket's levels begin (int64).
    """
    row = bucket * OPTIONS[0]
    first = tl.load(state[0] + row, mask=there, other=0.0)
    last = tl.load(state[0] + row + (OPTIONS[0] - 1), mask=there, other=0.0)
    largest = tl.maximum(tl.abs(first), tl.abs(last))
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1)
    factor = ((255 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest > 0, factor, 0.0), row


@triton.jit
def _rounded(v, counter, high, about, state, there, OPTIONS: tl.constexpr):
    """Count the gaps that the random number leaves below v."""
    # Few thresholds are one turn. For more, their number is an argument of the kernel, or compilers
    # would unroll all turns.
    TURN: tl.constexpr = OPTIONS[1]
    alphabet = OPTIONS[0] if OPTIONS[0] - 1 == TURN else state[1]
    factor, levels = about[0], state[0] + about[1]
    u = (integer24(counter, high) | 1).to(tl.float32)
    x = v * factor
    m = tl.zeros(v.shape, tl.uint32)
    lower = tl.load(levels, mask=there, other=0.0) * factor
    for first in range(1, alphabet, TURN):
        for j in tl.static_range(TURN):
            # Nothing exceeds a missing threshold.
            known = there & (first + j < alphabet)
            upper = tl.load(levels + (first + j), mask=known, other=float("inf")) * factor
            gap = (upper - lower) * 2.0**-24
            m += (x - lower > u * gap).to(tl.uint32)
            lower = upper
    return m


@triton.jit
def _cut(bucket, there, state, OPTIONS: tl.constexpr):
    return (tl.load(state[0] + bucket, mask=there, other=0.0),)


@triton.jit
def _side(v, counter, high, about, state, there, OPTIONS: tl.constexpr):
    return (v >= about[0]).to(tl.uint32)


@triton.jit
def _level(code, bucket, there, levels, state, OPTIONS: tl.constexpr):
    """Return the bucket's level; NaN for codes that no encoder makes."""
    known = code < OPTIONS[0]
    return tl.load(levels + bucket * OPTIONS[0] + code, mask=there & known, other=float("nan"))
