"""Numba: arrays of codes to words and back, laid out as coding/fixed.py and coding/radix.py say."""

from __future__ import annotations

import functools

import numpy as np

from hvd_adaptive.coding.fixed import QUARTER
from hvd_adaptive.coding.packing import Packing
from hvd_adaptive.kernels.cpu_decode import load_chunk
from hvd_adaptive.kernels.cpu_encode import chunk_size, store_chunk
from hvd_adaptive.kernels.jit import jit


def pack(codes: np.ndarray, packing: Packing, words: np.ndarray) -> None:
    """codes: uint8 (n,), each below the alphabet. words: uint32 (packing.words(n),), filled."""
    _packer(packing.alphabet, packing.digits, packing.width)(codes, words)


def unpack(words: np.ndarray, packing: Packing, codes: np.ndarray) -> None:
    """Inverse of ``pack``: fills codes (uint8, (n,)). ValueError where words are too few."""
    if words.size < packing.words(codes.size):
        raise ValueError(f"payload of {words.size} words is too short for {codes.size} codes")
    _unpacker(packing.alphabet, packing.digits, packing.width)(words, codes)


def warm(packing: Packing) -> None:
    """Compile the kernels of a packing into Numba's cache."""
    codes, words = np.zeros(100, np.uint8), np.zeros(packing.words(100), np.uint32)
    pack(codes, packing, words)
    unpack(words, packing, codes)


@functools.cache
def _packer(alphabet: int, digits: int, width: int):
    chunk = chunk_size(Packing(alphabet, digits, width))

    @jit
    def pack(codes, words):
        block, rows = np.empty(chunk, np.uint32), np.empty(QUARTER, np.uint32)
        for index in range((codes.size + chunk - 1) // chunk):
            part = codes[index * chunk : (index + 1) * chunk]
            for i in range(part.size):
                block[i] = np.uint32(part[i])
            store_chunk(block, index, part.size, chunk, alphabet, digits, width, rows, words)

    return pack


@functools.cache
def _unpacker(alphabet: int, digits: int, width: int):
    chunk = chunk_size(Packing(alphabet, digits, width))

    @jit
    def unpack(words, codes):
        block, rows = np.empty(chunk, np.uint32), np.empty(QUARTER, np.uint32)
        for index in range((codes.size + chunk - 1) // chunk):
            part = codes[index * chunk : (index + 1) * chunk]
            load_chunk(words, index, part.size, chunk, alphabet, digits, width, rows, block)
            for i in range(part.size):
                part[i] = np.uint8(block[i])

    return unpack
