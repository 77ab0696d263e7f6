"""Pack bare codes into words and unpack them, in plain torch."""

from __future__ import annotations

import torch

from hvd_adaptive.kernels.packing import Packing, check_words
from hvd_adaptive.kernels.reference.pack import pack_codes, unpack_codes


def pack(codes: torch.Tensor, packing: Packing, words: torch.Tensor) -> None:
    """Pack ``codes`` (uint8, (n,), each below the alphabet) into ``words`` (int32); the first
    packing.words(n) words are filled.
    """
    words[: packing.words(codes.numel())] = pack_codes(codes.to(torch.int64), packing)


def unpack(words: torch.Tensor, packing: Packing, codes: torch.Tensor) -> None:
    """Invert ``pack``: fill ``codes`` (uint8, (n,)). Raise ValueError if the words are too few."""
    check_words(words, packing, codes)
    codes.copy_(unpack_codes(words, codes.numel(), packing))
