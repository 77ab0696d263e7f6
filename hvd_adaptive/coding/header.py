"""The 96-byte little-endian header of every payload."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch

from hvd_adaptive.errors import PayloadError

MAGIC = b"HVDA"
FORMAT = 1
SIZE = 96
_FIELDS = struct.Struct("<4sHBBII16sQQQIIQQQII")
_NAMES = (
    "magic", "format", "dtype", "coding", "alphabet", "checksum", "scheme", "coordinates", "full",
    "bucket_size", "table_version", "table_fingerprint", "key", "layout", "length", "settings",
    "reserved",
)  # fmt: skip

DTYPES = {1: torch.float16, 2: torch.bfloat16, 3: torch.float32, 4: torch.float64}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
CODINGS = {"fixed": 0, "huffman": 1, "elias": 2}
CODING_NAMES = {code: name for name, code in CODINGS.items()}


@dataclass(frozen=True)
class Frame:
    """What a receiver knows of a payload before it arrives; a Header tells it, too."""

    coordinates: int
    full: int
    dtype: torch.dtype
    layout: int


@dataclass(frozen=True)
class Header:
    """What a receiver must know, and must find equal to its own settings.

    Byte offsets: 0 magic, 4 format (u16), 6 dtype (u8), 7 coding (u8), 8 alphabet (u32), 12
    checksum (u32), 16 scheme (16 bytes ASCII, zero-padded), 32 coordinates (u64), 40 how many of
    them travel in full precision (u64), 48 bucket size (u64), 56 table version (u32), 60 table
    fingerprint (u32), 64 random key (u64), 72 layout hash (u64), 80 payload length in bytes (u64),
    88 settings fingerprint (u32), 92 reserved, zero (u32).
    """

    scheme: str
    dtype: torch.dtype
    coding: str
    alphabet: int
    coordinates: int
    full: int
    bucket_size: int
    table_version: int
    table_fingerprint: int
    key: int
    layout: int
    length: int
    settings: int
    checksum: int = 0

    def pack(self) -> bytes:
        """The 96 bytes."""
        return _FIELDS.pack(
            MAGIC,
            FORMAT,
            DTYPE_CODES[self.dtype],
            CODINGS[self.coding],
            self.alphabet,
            self.checksum,
            self.scheme.encode("ascii"),
            self.coordinates,
            self.full,
            self.bucket_size,
            self.table_version,
            self.table_fingerprint,
            self.key,
            self.layout,
            self.length,
            self.settings,
            0,
        )

    @property
    def body_seed(self) -> int:
        """The header's own part of the checksum: CRC-32 of it with the checksum field zero."""
        packed = self.pack()
        return zlib.crc32(packed[:12] + bytes(4) + packed[16:])

    @classmethod
    def unpack(cls, data: bytes, available: int) -> Header:
        """Read a header from the first bytes of a payload of ``available`` bytes.

        Raises PayloadError where it is short, foreign or inconsistent; the checksum over the whole
        payload is the caller's to compare.
        """
        if len(data) < SIZE:
            raise PayloadError(f"payload of {available} bytes is shorter than its header of {SIZE}")
        raw = dict(zip(_NAMES, _FIELDS.unpack(data[:SIZE]), strict=True))
        magic, version, reserved = raw.pop("magic"), raw.pop("format"), raw.pop("reserved")
        if magic != MAGIC:
            raise PayloadError(f"payload starts with {magic!r}, not {MAGIC!r}: not one of ours")
        if version != FORMAT:
            raise PayloadError(f"payload has format version {version}, this package reads {FORMAT}")
        known = raw["dtype"] in DTYPES and raw["coding"] in CODING_NAMES
        if not known or reserved or raw["full"] > raw["coordinates"]:
            raise PayloadError("payload header is corrupt")
        if raw["length"] > available:
            raise PayloadError(f"payload is truncated: {available} of {raw['length']} bytes")
        raw["dtype"] = DTYPES[raw["dtype"]]
        raw["coding"] = CODING_NAMES[raw["coding"]]
        raw["scheme"] = raw["scheme"].rstrip(b"\0").decode("ascii", "replace")
        return cls(**raw)
