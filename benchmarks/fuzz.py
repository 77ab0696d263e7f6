"""Mutated payloads against every kind of payload: each is refused with PayloadError or decoded.

    python benchmarks/fuzz.py [--mutations 1000000] [--first 0] [--seed 0]

Bits are flipped, bytes overwritten, inserted, removed and moved, offsets and header fields changed;
mostly length and checksum are then made right, so that decoders and not the checksum meet them.
Payloads lie right before a page that nobody may read: a read behind their end kills the process.
Any other exception, a result of another length than the header says, or a decoding that takes
longer than ``SLOWEST`` seconds stops it with the mutation's number and seed, which repeat it
(``--first NUMBER``; so a long run can be done in pieces).
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import struct
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import hvd_adaptive
from hvd_adaptive import PayloadError, Tuning, kernels
from hvd_adaptive.coding import coders
from hvd_adaptive.coding.payload import SIZE, Header, body_seed, read_header

COORDINATES, BUCKET = 3000, 500
SLOWEST = 5.0
# Segments of a small payload: some of them each, as in a large one.
SEGMENT = 600
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ALQ huffman": ("ALQ", {"bits": 3, "coding": "huffman"}),
    "ALQ huffman symmetric": ("ALQ", {"bits": 3, "symmetric": True, "coding": "huffman"}),
    "ALQ huffman 8 bits": ("ALQ", {"bits": 8, "coding": "huffman", "tail": "full"}),
    "QSGD huffman": ("QSGD", {"bits": 8, "coding": "huffman"}),
    "TernGrad huffman": ("TernGrad", {"clip": None, "coding": "huffman"}),
    "QSGD elias": ("QSGD", {"bits": 3, "coding": "elias"}),
    "NUQSGD elias": ("NUQSGD", {"bits": 4, "coding": "elias"}),
    "TernGrad elias": ("TernGrad", {"coding": "elias"}),
    "ALQ": ("ALQ", {"bits": 3}),
    "ALQ 8 bits": ("ALQ", {"bits": 8, "tail": "full"}),
    "ALQ paper": ("ALQ", {"bits": 3, "norm": "l2", "symmetric": True}),
    "AMQ": ("AMQ", {"bits": 4}),
    "NUQSGD": ("NUQSGD", {"bits": 5}),
    "QSGD 2 bits": ("QSGD", {"bits": 2}),
    "QSGD radix": ("QSGD", {"intervals": 5}),
    "TernGrad": ("TernGrad", {}),
    "ORQ": ("ORQ", {"levels": 9}),
    "ORQ float16": ("ORQ", {"levels": 5, "level_dtype": "float16", "clip": 2.5}),
    "LinearQuantile": ("LinearQuantile", {"levels": 3}),
    "BinGrad": ("BinGrad", {}),
    "BinGrad biased": ("BinGrad", {"variant": "biased"}),
    "SignSGD": ("SignSGD", {}),
    "OneBitSGD": ("OneBitSGD", {}),
    "NaturalCompression": ("NaturalCompression", {}),
    "QCS": ("QCS", {"gain": 10, "bucket_size": 512}),
    "QCS measured": ("QCS", {"bucket_size": 512, "measurements": 200, "quantizer_range": 4}),
    "SparseSGD": ("SparseSGD", {"density": 0.05}),
    "SparseSGD dense": ("SparseSGD", {"density": 0.6, "tail": "full"}),
    "ECDQ": ("ECDQ", {"bits": 2.0}),
    "ECDQ low": ("ECDQ", {"bits": 0.5}),
    "ECDQ high": ("ECDQ", {"bits": 6.0, "tail": "full"}),
    "EDEN": ("EDEN", {"bits": 2, "bucket_size": 512}),
    # Of these gradients a row and one coordinate in ten are zero.
    "ALQ symmetric, zeros": ("ALQ", {"bits": 3, "symmetric": True, "keep_zeros": True}),
    "SignSGD, zeros": ("SignSGD", {"tail": "full", "keep_zeros": True}),
    "ECDQ, zeros": ("ECDQ", {"bits": 2.0, "keep_zeros": True}),
    "EDEN, zeros": ("EDEN", {"bits": 1, "bucket_size": 512, "keep_zeros": True}),
}
# Header fields (byte offset, format) whose lies a receiver must survive.
FIELDS = (
    *((7, "<B"), (8, "<I"), (32, "<Q"), (40, "<Q")),
    *((48, "<Q"), (56, "<I"), (64, "<Q"), (92, "<I")),
)


class GuardedPage:
    """Room whose end is followed by a page without any access."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.size = -(-size // page) * page
        self._map = mmap.mmap(-1, self.size + page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address + self.size), page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8, count=self.size)

    def holding(self, data: bytes) -> torch.Tensor:
        """``data`` as a tensor whose end is that of the room."""
        tensor = self._bytes[self.size - len(data) :]
        if data:
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return tensor


def subjects(seed: int, checksum: bool = True) -> dict[str, tuple[Any, bytes]]:
    """Label -> compressor and one of its payloads."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(COORDINATES, generator=generator) ** 3
    sparse = flat.clone()
    sparse[::10], sparse[1000:1700] = 0, 0
    made = {}
    whole, coders.SEGMENT = coders.SEGMENT, SEGMENT
    try:
        for label, (name, keywords) in CASES.items():
            scheme = getattr(hvd_adaptive, name)(
                **{"bucket_size": BUCKET, "tuning": Tuning(checksum=checksum)} | keywords
            )
            if hasattr(scheme, "fit"):
                scheme.fit(flat)
            payload = scheme.encode(sparse if scheme.settings.keep_zeros else flat, seed=seed)
            if read_header(payload).coding != scheme.settings.coding:
                raise RuntimeError(f"{label}: the payload is not coded")
            scheme.decode(payload)  # compiles what is not in Numba's cache
            made[label] = scheme, payload.numpy().tobytes()
    finally:
        coders.SEGMENT = whole
    return made


def sealed(data: bytearray) -> bytes:
    """With the length and checksum that a header of these fields must have."""
    data += bytes(-len(data) % 8)
    struct.pack_into("<Q", data, 80, len(data))
    try:
        header = Header.unpack(bytes(data[:SIZE]), len(data))
    except PayloadError:
        return bytes(data)
    words = torch.frombuffer(data, dtype=torch.int32, offset=SIZE) if len(data) > SIZE else None
    body = torch.empty(0, dtype=torch.int32) if words is None else words.clone()
    del words
    struct.pack_into(
        "<I", data, 12, kernels.on_host("checksum").checksum(body, body_seed(header.pack()))
    )
    return bytes(data)


def mutated(payload: bytes, rng: np.random.Generator) -> bytes:
    """One to four changes, sealed mostly; half of the payloads keep their header and length."""
    data = bytearray(payload)
    changes = CHANGES if rng.random() < 0.5 else IN_PLACE
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(SIZE, max(SIZE + 1, len(data))))
        # Scales and offsets come first: half of all changes meet them.
        at = min(at, SIZE + int(rng.integers(0, 80))) if rng.random() < 0.5 else at
        changes[int(rng.integers(len(changes)))](data, at, rng)
    return sealed(data) if rng.random() < 0.95 else bytes(data)


def _flip(data: bytearray, at: int, rng: np.random.Generator) -> None:
    if at < len(data):
        data[at] ^= 1 << int(rng.integers(8))


def _overwrite(data: bytearray, at: int, rng: np.random.Generator) -> None:
    count = int(rng.integers(1, 40))
    filler = (bytes(count), b"\xff" * count, rng.bytes(count))[int(rng.integers(3))]
    data[at : at + count] = filler[: max(0, len(data) - at)]


def _shorten(data: bytearray, at: int, rng: np.random.Generator) -> None:
    del data[at : at + int(rng.integers(1, 64))]


def _cut(data: bytearray, at: int, rng: np.random.Generator) -> None:
    del data[at:]


def _lengthen(data: bytearray, at: int, rng: np.random.Generator) -> None:
    data[at:at] = rng.bytes(int(rng.integers(1, 64)))


def _move(data: bytearray, at: int, rng: np.random.Generator) -> None:
    other, count = int(rng.integers(SIZE, len(data) + 1)), int(rng.integers(1, 64))
    data[at : at + count] = data[other : other + count]


def _number(data: bytearray, at: int, rng: np.random.Generator) -> None:
    """A 32-bit number becomes another: near it, or an extreme one."""
    at -= at % 4
    if at + 4 > len(data):
        return
    (old,) = struct.unpack_from("<I", data, at)
    choices = (old + 1, old - 1, 0, 2**31, 2**32 - 1, old + int(rng.integers(-300, 300)))
    struct.pack_into("<I", data, at, choices[int(rng.integers(len(choices)))] % 2**32)


def _lie(data: bytearray, at: int, rng: np.random.Generator) -> None:
    """A header field becomes another number, and all fits it."""
    offset, kind = FIELDS[int(rng.integers(len(FIELDS)))]
    if len(data) < SIZE:
        return
    (old,) = struct.unpack_from(kind, data, offset)
    choices = (old + 1, old - 1, 0, int(rng.integers(4)), old + int(rng.integers(-600, 600)))
    value = choices[int(rng.integers(len(choices)))]
    struct.pack_into(kind, data, offset, value % 256 ** struct.calcsize(kind))


IN_PLACE = (_flip, _overwrite, _number)
CHANGES = (_flip, _flip, _overwrite, _overwrite, _shorten, _cut, _lengthen, _move, _number, _lie)


def fuzz(mutations: int, seed: int = 0, progress: bool = False, first: int = 0) -> Counter[str]:
    """Counts of "label: refused" and "label: decoded"; AssertionError or the decoder's own error
    where a mutation is not dealt with."""
    cases = subjects(seed)
    room = GuardedPage(max(len(payload) for _, payload in cases.values()) + 512)
    labels, outcomes = list(cases), Counter()
    numbers = range(first, first + mutations)
    for number in tqdm(numbers, disable=not progress, unit="payload"):
        label = labels[number % len(labels)]
        scheme, payload = cases[label]
        data = mutated(payload, np.random.default_rng((seed, number)))
        begin = time.perf_counter()
        try:
            result = scheme.decode(room.holding(data))
        except PayloadError:
            outcomes[f"{label}: refused"] += 1
        except Exception as error:
            raise AssertionError(f"{label}, mutation {number}, seed {seed}: {error!r}") from error
        else:
            outcomes[f"{label}: decoded"] += 1
            wanted = struct.unpack_from("<Q", data, 32)[0]
            assert result.numel() == wanted, f"{label}, mutation {number}, seed {seed}"
        took = time.perf_counter() - begin
        assert took < SLOWEST, f"{label}, mutation {number}, seed {seed}: {took:.1f} s"
    return outcomes


def main() -> None:
    """Fuzz and print what became of the payloads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    outcomes = fuzz(args.mutations, args.seed, True, args.first)
    for label in CASES:
        refused, decoded = (outcomes[f"{label}: {what}"] for what in ("refused", "decoded"))
        print(f"{label:20} {refused:9,} refused {decoded:9,} decoded")
    print(f"{args.mutations:,} mutated payloads, none misread, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
