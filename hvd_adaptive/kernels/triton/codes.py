"""Pack and unpack bare codes in Triton, for schemes that pack in a separate step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.packing import Packing, check_words
from hvd_adaptive.kernels.triton.decoder import unpack_add
from hvd_adaptive.kernels.triton.encoder import nothing
from hvd_adaptive.kernels.triton.encoder import pack as pack_words

# Buckets do not matter if bare codes are packed.
_ANY_BUCKET = 512


def pack(codes: torch.Tensor, packing: Packing, words: torch.Tensor) -> None:
    scheme = {"PREPARE": nothing, "CODE": _itself, "RULE": _itself}
    pack_words(codes, words, _ANY_BUCKET, packing, 0, (codes,), OPTIONS=(), **scheme)


def unpack(words: torch.Tensor, packing: Packing, codes: torch.Tensor) -> None:
    check_words(words, packing, codes)
    unpack_add([(words, words)], _ANY_BUCKET, packing, 1.0, codes, False, (codes,), VALUE=_bare)


@triton.jit
def _itself(v, counter, high, about, state, i, there, rule: tl.constexpr, OPTIONS: tl.constexpr):
    return v.to(tl.uint32)


@triton.jit
def _bare(code, bucket, i, there, payload, state, OPTIONS: tl.constexpr):
    """Return the code as a float32, which holds it exactly; the sum is stored as a byte."""
    return code.to(tl.float32)
