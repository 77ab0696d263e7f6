"""Pack and unpack bare codes in Triton, for schemes that pack in a separate step."""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_adaptive.kernels.packing import check_words
from hvd_adaptive.kernels.triton.decoder import unpack_add
from hvd_adaptive.kernels.triton.encoder import nothing
from hvd_adaptive.kernels.triton.encoder import pack as pack_words

# Buckets do not matter if bare codes are packed.
_ANY_BUCKET = 512


def pack(codes, packing, words):
    scheme = {"PREPARE": nothing, "CODE": _itself, "OPTIONS": ()}
    pack_words(codes, words, _ANY_BUCKET, packing, 0, (codes,), **scheme)


def unpack(words, packing, codes):
    check_words(words, packing, codes)
    unpack_add([(words, words)], _ANY_BUCKET, packing, 1.0, codes, False, (codes,), VALUE=_bare)


@triton.jit
def _itself(v, counter, high, about, state, there, OPTIONS: tl.constexpr):
    return v.to(tl.uint32)


@triton.jit
def _bare(code, bucket, there, payload, state, OPTIONS: tl.constexpr):
    """Return the code as a float32, which holds it exactly; the sum is stored as a byte."""
    return code.to(tl.float32)
