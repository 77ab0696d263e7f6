"""Pack and unpack the 96-byte little-endian header of every payload."""

from __future__ import annotations

import functools
import struct
import zlib
from typing import NamedTuple

import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.coding import CODINGS
from hvd_adaptive.kernels.checksum import CHECKSUM_AT, HEADER_BYTES

MAGIC = b"HVDA"
FORMAT = 1
SIZE = HEADER_BYTES
_NO_CHECKSUM = bytes(4)
_FIELDS = struct.Struct("<4sHBBII16sQQQIIQQQII")

CODING_NAMES = {code: name for name, code in CODINGS.items()}
DTYPES = {1: torch.float16, 2: torch.bfloat16, 3: torch.float32, 4: torch.float64}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Frame(NamedTuple):
    """Fields of a payload that a receiver can compute before it arrives; a Header has them too."""

    coordinates: int
    full: int
    dtype: torch.dtype
    layout: int


class Header(NamedTuple):
    """Header of a payload, in the order of its bytes; a receiver compares it with its own settings.

    Byte offsets: 0 magic, 4 format (u16), 6 dtype (u8), 7 coding (u8), 8 alphabet (u32), 12
    checksum (u32), 16 scheme (16 bytes ASCII, zero-padded), 32 coordinates (u64), 40 coordinates in
    full precision (u64), 48 bucket size (u64), 56 table version (u32), 60 table fingerprint (u32),
    64 random key (u64), 72 layout hash (u64), 80 payload length in bytes (u64), 88 settings
    fingerprint (u32), 92 length of the section of zeros in bytes (u32).
    """

    dtype: torch.dtype
    coding: str
    alphabet: int
    checksum: int
    scheme: str
    coordinates: int
    full: int
    bucket_size: int
    table_version: int
    table_fingerprint: int
    key: int
    layout: int
    length: int
    settings: int
    zeros: int

    def pack(self) -> bytes:
        """Return the 96 bytes."""
        dtype, coding, alphabet, checksum, scheme, *numbers = self
        codes = DTYPE_CODES[dtype], CODINGS[coding]
        name = scheme.encode("ascii")
        return _FIELDS.pack(MAGIC, FORMAT, *codes, alphabet, checksum, name, *numbers)

    @classmethod
    def unpack(cls, data: bytes, available: int) -> Header:
        """Read a header from the first bytes of a payload of ``available`` bytes, whose checksum
        the caller compares; raise PayloadError if it is short, foreign or inconsistent.
        """
        if len(data) < SIZE:
            raise PayloadError(f"payload of {available} bytes is shorter than its header of {SIZE}")
        fields = _FIELDS.unpack_from(data)
        magic, version, dtype, coding, alphabet, checksum, scheme, *numbers = fields
        if magic != MAGIC:
            raise PayloadError(f"payload starts with {magic!r}, not {MAGIC!r}: foreign data")
        if version != FORMAT:
            raise PayloadError(f"payload has format version {version}, this package reads {FORMAT}")
        if dtype not in DTYPES or coding not in CODING_NAMES:
            raise PayloadError("payload header is corrupt")
        codes = DTYPES[dtype], CODING_NAMES[coding]
        header = cls(*codes, alphabet, checksum, _name(scheme), *numbers)
        if header.zeros % 8 or header.full > header.coordinates:
            raise PayloadError("payload header is corrupt")
        if header.length > available:
            raise PayloadError(f"payload is truncated: {available} of {header.length} bytes")
        return header


def body_seed(packed: bytes) -> int:
    """Return the header's part of the checksum: CRC-32 of its bytes with a zero checksum field."""
    begin = zlib.crc32(_NO_CHECKSUM, zlib.crc32(packed[:CHECKSUM_AT]))
    return zlib.crc32(packed[CHECKSUM_AT + 4 :], begin)


@functools.lru_cache(maxsize=64)
def _name(scheme: bytes) -> str:
    return scheme.rstrip(b"\0").decode("ascii", "replace")
