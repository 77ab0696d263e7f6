"""Pack bare codes into words and unpack them in Numba, laid out as in fixed.py and radix.py."""

from __future__ import annotations

import functools

import numpy as np
import torch

from hvd_adaptive.kernels.fixed import QUARTER
from hvd_adaptive.kernels.numba.decoder import load_fixed, load_units
from hvd_adaptive.kernels.numba.encoder import chunk_size, store_fixed, store_units
from hvd_adaptive.kernels.numba.jit import jit
from hvd_adaptive.kernels.packing import Packing, check_words


def pack(codes: torch.Tensor, packing: Packing, words: torch.Tensor) -> None:
    _packer(packing)(codes.numpy(), words.numpy().view(np.uint32))


def unpack(words: torch.Tensor, packing: Packing, codes: torch.Tensor) -> None:
    check_words(words, packing, codes)
    _unpacker(packing)(words.numpy().view(np.uint32), codes.numpy())


def warm(packing: Packing) -> None:
    """Compile the kernels of a packing into Numba's cache."""
    codes = torch.zeros(100, dtype=torch.uint8, device="cpu")
    words = torch.zeros(packing.words(100), dtype=torch.int32, device="cpu")
    pack(codes, packing, words)
    unpack(words, packing, codes)


@functools.cache
def _packer(packing: Packing):
    chunk = chunk_size(packing)
    alphabet, digits, width = packing

    @jit
    def pack(codes, words):
        block, rows = np.empty(chunk, np.uint32), np.empty(QUARTER, np.uint32)
        for index in range((codes.size + chunk - 1) // chunk):
            part = codes[index * chunk : (index + 1) * chunk]
            for i in range(part.size):
                block[i] = np.uint32(part[i])
            if digits > 1:
                store_units(block, index, part.size, chunk, alphabet, digits, width, rows, words)
            else:
                store_fixed(block, index, part.size, width, rows, words)

    return pack


@functools.cache
def _unpacker(packing: Packing):
    chunk = chunk_size(packing)
    alphabet, digits, width = packing

    @jit
    def unpack(words, codes):
        block, rows = np.empty(chunk, np.uint32), np.empty(QUARTER, np.uint32)
        for index in range((codes.size + chunk - 1) // chunk):
            part = codes[index * chunk : (index + 1) * chunk]
            if digits > 1:
                load_units(words, index, part.size, chunk, alphabet, digits, width, block)
            else:
                load_fixed(words, index, part.size, width, rows, block)
            for i in range(part.size):
                part[i] = np.uint8(block[i])

    return unpack
