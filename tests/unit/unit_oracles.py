"""Independent implementations that the unit tests compare with: Python integers and float64.

Nothing here imports the package: constants and layouts are written out again from its docstrings.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

M32, M64 = 2**32 - 1, 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
HEADER = "<4sHBBII16sQQQIIQQQII"
# name -> (byte offset, struct format) of every header field
FIELDS = {
    "magic": (0, "4s"),
    "format": (4, "H"),
    "dtype": (6, "B"),
    "coding": (7, "B"),
    "alphabet": (8, "I"),
    "checksum": (12, "I"),
    "scheme": (16, "16s"),
    "coordinates": (32, "Q"),
    "full": (40, "Q"),
    "bucket_size": (48, "Q"),
    "table_version": (56, "I"),
    "table_fingerprint": (60, "I"),
    "key": (64, "Q"),
    "layout": (72, "Q"),
    "length": (80, "Q"),
    "settings": (88, "I"),
    "zeros": (92, "I"),
}


def mix64(z: int) -> int:
    """SplitMix64's finaliser."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def stream_key(*numbers: int) -> int:
    """(seed, rank, step, group), each added and mixed in turn."""
    key = mix64(GOLDEN)
    for number in numbers:
        key = mix64((key + number * GOLDEN + 1) % 2**64)
    return key


def uniform_integers(stream: int, bucket: int, count: int) -> list[int]:
    """The integers below 2**24 of the first coordinates of a bucket."""
    key = mix64((stream + (bucket + 1) * GOLDEN) % 2**64)
    low, high = key % 2**32, key // 2**32
    result = []
    for j in range(count):
        h = (j * 0x9E3779B1 + low) % 2**32
        h = ((h ^ (h >> 16)) * 0x85EBCA6B + high) % 2**32
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) % 2**32
        result.append(h >> 8)
    return result


def pack(codes: list[int], bits: int) -> list[int]:
    """Bit by bit, as the docstring of kernels/packing.py says; unsigned 32-bit words."""
    words: list[int] = []
    for begin in range(0, len(codes), 512):
        block = codes[begin : begin + 512]
        rows = 8 if len(block) == 512 else -(-len(block) // 64)
        streams = [0] * 16
        for i, code in enumerate(block):
            quarter, rest = divmod(i, rows * 16)
            row, lane = divmod(rest, 16)
            for bit in range(bits):
                streams[lane] |= (code >> bit & 1) << ((4 * row + quarter) * bits + bit)
        for word in range(-(-rows * 4 * bits // 32)):
            words += [streams[lane] >> (32 * word) & M32 for lane in range(16)]
    return words


# alphabet -> (codes in a unit, bits of a unit) of those packed by radix
UNITS = {
    3: (20, 32),
    5: (12, 28),
    7: (11, 31),
    9: (10, 32),
    11: (8, 28),
    13: (7, 26),
    17: (7, 29),
    33: (6, 31),
    65: (5, 31),
    129: (4, 29),
}


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


def word_count(n: int, alphabet: int) -> int:
    """32-bit words of n codes."""
    if alphabet in UNITS:
        digits, width = UNITS[alphabet]
        return 16 * -(-(-(-n // (16 * digits)) * width) // 32)
    bits = (alphabet - 1).bit_length()
    blocks, rest = divmod(n, 512)
    lane_bits = -(-rest // 64) * 4 * bits
    return 16 * (blocks * bits + -(-lane_bits // 32))


def payload_length(
    n: int, alphabet: int, bucket: int, tail: str = "quantize", itemsize: int = 4
) -> int:
    """96 + scales and words, rounded up to 8 + full-precision coordinates, rounded up to 8."""
    full = n % bucket if tail == "full" else 0
    quantized = n - full
    body = 4 * (-(-quantized // bucket) + word_count(quantized, alphabet))
    return 96 + -(-body // 8) * 8 + -(-full * itemsize // 8) * 8


def checksum(payload: bytes) -> int:
    """Of a whole payload: CRC-32 of its header without checksum seeds the chain over 64 lanes."""
    seed = zlib.crc32(payload[:12] + bytes(4) + payload[16:96])
    return word_checksum(np.frombuffer(payload[96:], "<u4").tolist(), seed)


def word_checksum(words: list[int], seed: int) -> int:
    sums = [0] * 64
    for block in range(-(-len(words) // 4096)):
        own = words[4096 * block : 4096 * (block + 1)]
        for lane in range(64):
            s = block * 0x9E3779B1 % 2**32
            for word in own[lane::64]:
                s = (s + word * 0x85EBCA77) % 2**32
                s = (s << 13 | s >> 19) & M32
                s = s * 0x9E3779B1 % 2**32
            sums[lane] += (s ^ s >> 15) * 0x85EBCA77
    total = (seed + len(words)) % 2**32
    for lane in sums:
        total = (total ^ (lane & M32)) * 0x9E3779B1 % 2**32
        total ^= total >> 15
        total = total * 0x85EBCA77 % 2**32
    return total


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


def signed_levels(magnitudes: np.ndarray, symmetric: bool) -> np.ndarray:
    """Ascending distinct levels, float64 of what float32 holds."""
    m = np.asarray(magnitudes, np.float32).astype(np.float64)
    return np.concatenate([-m[::-1], m if symmetric else m[1:]])


def neighbours(r: np.ndarray, magnitudes: np.ndarray, symmetric: bool) -> tuple:
    """Lower and upper level around r = abs(v)/norm (float64): -l1 and l1 below l1 if symmetric."""
    m = np.asarray(magnitudes, np.float32).astype(np.float64)
    ladder = np.concatenate([-m[:1], m]) if symmetric else m
    upper = np.clip(np.searchsorted(ladder, r, side="left"), 1, len(ladder) - 1)
    return ladder[upper - 1], ladder[upper]
