"""Write and read bodies of dithered payloads on the host, several segments at a time.

docs/wire_format.md describes the body ("ecdq"). If the codes would be longer than the integers, its
``kind`` is the bytes of an integer, and all integers follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.kernels import on_host
from hvd_adaptive.kernels.constants import LAST_END
from hvd_adaptive.kernels.prefix_tables import is_used_up
from hvd_adaptive.kernels.threads import mapped

# Runs of symbols stay in the second-level cache; 64 bits for each segment do not count.
SEGMENT = 1 << 16
CODED = 0
Code = Any  # a step and code books: codec.dithered_code.DitheredCode
WIDTHS: dict[int, np.dtype[Any]] = {2: np.dtype("<i2"), 4: np.dtype("<i4")}


class Stretch(NamedTuple):
    """Describe coordinates ``begin`` to ``end`` of a tensor with these steps and this key."""

    steps: np.ndarray
    bucket_size: int
    key: np.uint64
    begin: int
    end: int


def least_bytes(coordinates: int, bucket_size: int, width: int) -> int:
    """Return the fewest bytes of a body."""
    offsets = 8 * -(-coordinates // SEGMENT)
    return head_bytes(coordinates, bucket_size) + min(offsets, width * coordinates)


def most_bytes(coordinates: int, bucket_size: int, width: int) -> int:
    """Return the most bytes of a body, with integers of ``width`` bytes each."""
    return head_bytes(coordinates, bucket_size) + width * coordinates


def head_bytes(coordinates: int, bucket_size: int) -> int:
    """Return the bytes of ``kind`` and the steps."""
    return 4 + 4 * -(-coordinates // bucket_size)


def roundtrip(flat: torch.Tensor, bucket_size: int, delta: float, key: int) -> torch.Tensor:
    """Return ``flat`` (float32, (n,)) quantised and decoded."""
    ecdq, out = on_host("ecdq"), torch.zeros_like(flat)
    steps = ecdq.bucket_steps(flat.numpy(), bucket_size, delta)
    q = ecdq.quantize(flat.numpy(), steps, bucket_size, key)
    ecdq.add(q, steps, bucket_size, key, out.numpy())
    return out


def encode_body(
    flat: torch.Tensor, bucket_size: int, code: Code, key: int, width: int, body: torch.Tensor
) -> int:
    """Quantise ``flat`` (float32, (n,)) into ``body`` (uint8, most_bytes); return how many bytes
    are used. bucket_size: at most n. width: the bytes of an integer; every integer fits into them.
    """
    if not flat.numel():
        body.zero_()
        return body.numel()
    ecdq, x, out = on_host("ecdq"), flat.numpy(), body.numpy()
    steps = ecdq.bucket_steps(x, bucket_size, code.delta)
    at = head_bytes(x.size, bucket_size)
    out[4:at].view("<f4")[:] = steps
    whole = Stretch(steps, bucket_size, np.uint64(key), 0, x.size)
    kind, used = CODED, _encode_segments(x, whole, code, out[at:])
    if used is None:
        kind, used = width, width * x.size
        q = ecdq.quantize(x, steps, bucket_size, key)
        out[at : at + used].view(WIDTHS[width])[:] = q
    out[:4].view("<u4")[0] = kind
    return at + used


def add_bodies(
    bodies: Sequence[torch.Tensor],
    bucket_size: int,
    code: Code,
    keys: Sequence[int],
    width: int,
    out: torch.Tensor,
) -> None:
    """Add the values of ``bodies`` (uint8, and up to 7 bytes of padding, which must be 0) to
    ``out`` (float32, (n,)) in order. Raise PayloadError if a body is not valid; ``out`` is then of
    no use.
    """
    sums = out.numpy()
    for body, key in zip(bodies, keys, strict=True):
        kind, steps, rest = _opened(body.numpy(), head_bytes(sums.size, bucket_size))
        if kind == CODED:
            whole = Stretch(steps, bucket_size, np.uint64(key), 0, sums.size)
            _add_segments(rest, whole, code, sums)
        elif kind == width:
            _check_end(rest, width * sums.size)
            q = rest[: width * sums.size].view(WIDTHS[width]).astype(np.int32)
            on_host("ecdq").add(q, steps, bucket_size, key, sums)
        else:
            raise PayloadError(f"payload's body is of kind {kind}, not {CODED} or {width}")


def _encode_segments(flat: np.ndarray, whole: Stretch, code: Code, out: np.ndarray) -> int | None:
    """Fill ``out`` (uint8) with ends and segments; return None if they do not fit."""
    ecdq, huffman = on_host("ecdq"), on_host("huffman")
    begins, most = range(0, whole.end, SEGMENT), min(SEGMENT, whole.end)
    head = 8 * len(begins)
    if head > out.size:
        return None
    out = out[: head + LAST_END]

    def coded(share: range) -> list[np.ndarray]:
        """Return codes and escapes of some segments, one after another."""
        symbols: np.ndarray = np.empty((len(code.books), most), code.dtype)
        integers = np.empty(most, np.int32)
        room = np.empty(huffman.most_bytes(most), np.uint8)
        coded_parts: list[np.ndarray] = []
        size = 0
        for begin in share:
            where = _part(whole, begin)
            runs, escaped = ecdq.split(flat, where, code.most, symbols, integers)
            bits = 0
            for run, book in zip(runs, code.books, strict=True):
                bits = huffman.encode(run, book, room, bits)
            escapes = ecdq.put_numbers(escaped, code.most)
            coded_parts += [room[: -(-bits // 8)].copy(), escapes]
            size += coded_parts[-2].size + escapes.size
            if size > out.size:  # The segments do not fit: stop.
                break
        return coded_parts

    of_shares: Iterator[list[np.ndarray]] = mapped(coded, _shares(begins))
    parts = list(itertools.chain.from_iterable(of_shares))
    ends = np.cumsum([part.size for part in parts], dtype=np.int64)
    if len(parts) < 2 * len(begins) or head + ends[-1] > out.size:
        return None
    out[:head].view("<u4")[:] = ends
    used = head + int(ends[-1])
    np.concatenate(parts, out=out[head:used])
    return used


def _add_segments(data: np.ndarray, whole: Stretch, code: Code, out: np.ndarray) -> None:
    ecdq, huffman = on_host("ecdq"), on_host("huffman")
    begins, most = range(0, whole.end, SEGMENT), min(SEGMENT, whole.end)
    ends, data = _checked_ends(data, len(begins))

    def add_share(share: range) -> None:
        runs: np.ndarray = np.empty((len(code.books), most), code.dtype)
        for begin in share:
            index, where = begin // SEGMENT, _part(whole, begin)
            start, middle, stop = ends[2 * index : 2 * index + 3].tolist()
            escaped = ecdq.numbers(data[middle:stop], code.most)
            counts = ecdq.counts(where, len(runs)).tolist()
            good = escaped is not None and _read(huffman, data[start:middle], code, counts, runs)
            if not (good and ecdq.add_runs(runs, escaped, where, code.most, out)):
                raise PayloadError(f"payload's segment {index} is corrupt")

    for _ in mapped(add_share, _shares(begins)):
        pass


def _part(whole: Stretch, begin: int) -> Stretch:
    return whole._replace(begin=begin, end=min(begin + SEGMENT, whole.end))


def _shares(begins: range) -> list[range]:
    """Divide segments into runs of neighbours, one for each of torch's threads; use all threads."""
    threads = max(1, min(torch.get_num_threads(), len(begins)))
    cuts = [len(begins) * thread // threads for thread in range(threads + 1)]
    return [begins[a:b] for a, b in itertools.pairwise(cuts)]


def _read(
    huffman: ModuleType, data: np.ndarray, code: Code, counts: list[int], runs: np.ndarray
) -> bool:
    """Fill the rows of ``runs`` with their symbols; return whether these are all the data."""
    bits = 0
    for row, count, book in zip(runs, counts, code.books, strict=True):
        bits = huffman.decode(data, bits, book, row[:count])
        if bits < 0:
            return False
    return is_used_up(data, bits)


def _opened(data: np.ndarray, head: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the kind of a body (uint8), its steps, and what follows these ``head`` bytes. Raise
    PayloadError if it is too short, or a step is impossible.
    """
    if data.size < head:
        raise PayloadError(f"payload's body of {data.size} bytes is too short")
    steps = data[4:head].view("<f4")
    if not np.all((steps >= 0) & (steps < np.inf) | np.isnan(steps)):
        raise PayloadError("payload holds impossible steps")
    return int(data[:4].view("<u4")[0]), steps, data[head:]


def _checked_ends(data: np.ndarray, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """Return 0 and the ends (int64) of codes and escapes, and the data behind these numbers. Raise
    PayloadError if they do not fit each other.
    """
    head = 8 * segments
    if data.size < head:
        raise PayloadError(f"payload's body is too short for {segments} segments")
    ends = np.concatenate([[0], data[:head].view("<u4").astype(np.int64)])
    if np.any(np.diff(ends) < 0):
        raise PayloadError("payload's segments have impossible ends")
    _check_end(data[head:], int(ends[-1]))
    return ends, data[head:]


def _check_end(data: np.ndarray, size: int) -> None:
    """Raise PayloadError unless ``size`` bytes and up to 7 zeros are all of ``data``."""
    if not 0 <= data.size - size <= 7 or np.any(data[size:]):
        raise PayloadError(f"payload's body goes on for {data.size - size} bytes behind its end")
