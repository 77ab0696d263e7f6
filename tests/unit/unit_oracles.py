"""Independent implementations that the unit tests compare with: Python integers and float64.

Nothing here imports the package: what tests/wire_decoder.py reads, this writes.
"""

from __future__ import annotations

import re
import struct

import numpy as np
import torch
from wire_decoder import (
    GOLDEN,
    HEADER,
    M32,
    NAMES,
    Book,
    checksum,
    integers,
    packing,
    word_checksum,
)
from wire_decoder import mix as mix64
from wire_decoder import stream as stream_key
from wire_decoder import words_of as word_count

__all__ = ["GOLDEN", "checksum", "mix64", "stream_key", "word_checksum", "word_count"]

KINDS = re.findall(r"\d*[a-zA-Z]", HEADER.format)
# name -> (byte offset, struct format) of every header field
FIELDS = {
    name: (struct.calcsize("<" + "".join(KINDS[:place])), KINDS[place])
    for place, name in enumerate(NAMES)
}
# alphabet -> (codes in a unit, bits of a unit) of those packed by radix
UNITS = {alphabet: packing(alphabet) for alphabet in (3, 5, 7, 9, 11, 13, 17, 33, 65, 129)}


def uniform_integers(stream: int, bucket: int, count: int) -> list[int]:
    """The integers below 2**24 of the first coordinates of a bucket."""
    return integers(stream, bucket, count).tolist()


def pack_radix(codes: list[int], alphabet: int) -> list[int]:
    """As the docstring of kernels/packing.py says, with Python's integers of any size."""
    digits, width = UNITS[alphabet]
    rows = -(-len(codes) // (16 * digits))
    padded = codes + [0] * (rows * 16 * digits - len(codes))
    streams = [0] * 16
    for row in range(rows):
        for lane in range(16):
            unit = sum(padded[(digits * row + t) * 16 + lane] * alphabet**t for t in range(digits))
            streams[lane] |= unit << (row * width)
    words = -(-rows * width // 32)
    return [streams[lane] >> (32 * word) & M32 for word in range(words) for lane in range(16)]


def read_field(payload: bytes, name: str) -> int | bytes:
    at, kind = FIELDS[name]
    return struct.unpack_from("<" + kind, payload, at)[0]


def forge(payload: bytes, **fields: int | bytes) -> bytes:
    """The payload with other header fields and a checksum that is right for them."""
    data = bytearray(payload)
    for name, value in fields.items():
        at, kind = FIELDS[name]
        struct.pack_into("<" + kind, data, at, value)
    if len(data) % 4 == 0 and "checksum" not in fields:
        struct.pack_into("<I", data, 12, checksum(bytes(data)))
    return bytes(data)


def omega(k: int) -> str:
    """Elias's recursive code of k >= 1: groups of digits, the recursion from the front, then 0."""

    def groups(k: int) -> str:
        return "" if k == 1 else groups(len(f"{k:b}") - 1) + f"{k:b}"

    return groups(k) + "0"


def prefix_bits(book: Book, symbols: np.ndarray) -> str:
    """The codes of symbols. The shortest code completes a block that they end in."""
    codes = {block: f"{code:0{length}b}" for (length, code), block in book.by_code.items()}
    found, block, most = [], (), len(book.children[0]) - 1
    for symbol in symbols.tolist():
        block += (min(symbol, most),)
        if block in codes:
            found.append(codes[block])
            block = ()
    if block:
        longer = (one for one in codes if one[: len(block)] == block)
        found.append(codes[min(longer, key=lambda one: (len(codes[one]), one))])
    return "".join(found)


def prefix_symbols(book: Book, bits: list[int], count: int) -> tuple[int, list[int]]:
    """The end of the last code, and so many symbols; -1 if the stream ends before."""
    try:
        symbols, end = book.read(bits, 0, count)
    except IndexError:
        return -1, []
    return end, symbols.tolist()


def received(payload: bytes) -> torch.Tensor:
    """As it arrives: a tensor of bytes."""
    return torch.from_numpy(np.frombuffer(payload, np.uint8).copy())


def forged(payload: bytes, **fields: int | bytes) -> torch.Tensor:
    """A forgery as it arrives."""
    return received(forge(payload, **fields))


def neighbours(r: np.ndarray, magnitudes: np.ndarray, symmetric: bool) -> tuple:
    """Lower and upper level around r = abs(v)/norm (float64): -l1 and l1 below l1 if symmetric."""
    m = np.asarray(magnitudes, np.float32).astype(np.float64)
    ladder = np.concatenate([-m[:1], m]) if symmetric else m
    upper = np.clip(np.searchsorted(ladder, r, side="left"), 1, len(ladder) - 1)
    return ladder[upper - 1], ladder[upper]
