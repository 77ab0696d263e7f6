"""Encode and decode the body of a dithered payload: the buckets' steps, then coded integers.

All numbers are little-endian. The body begins with the u32 ``kind``, then one float32 step for each
bucket. If kind is CODED, two u32 follow for each segment of SEGMENT coordinates: the end of its
codes and the end of its escaped integers, counted from the first byte after these numbers. Then
come the segments. A segment's codes are the symbols of the first class in that class's book, then
those of the second class, and so on, without a gap; zero bits fill the last byte. Coordinates of
buckets whose step is not above 0 have no symbol.

If the codes would be longer, kind is the bytes of an integer, and all integers follow in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hvd_adaptive.coding.coder import LAST_END, mapped
from hvd_adaptive.coding.prefix_code import PrefixCode
from hvd_adaptive.device import Later
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.kernels import Lazy

cpu_ecdq, cpu_huffman = Lazy("cpu_ecdq"), Lazy("cpu_huffman")
cuda_encode, cuda_decode = Lazy("cuda_dithered_encode"), Lazy("cuda_dithered_decode")
cuda_huffman = Lazy("cuda_huffman")

# Runs of symbols fit in the second-level cache; 64 bits for each segment are negligible.
SEGMENT = 1 << 16
CODED = 0
WIDTHS: dict[int, np.dtype[Any]] = {2: np.dtype("<i2"), 4: np.dtype("<i4")}


class Code(Protocol):
    """Step and code books: see schemes/dithered_code.py."""

    @property
    def delta(self) -> float: ...

    @property
    def most(self) -> int: ...

    @property
    def dtype(self) -> type: ...

    @property
    def books(self) -> Sequence[PrefixCode]: ...


def least_bytes(coordinates: int, bucket_size: int, width: int) -> int:
    """Return the fewest bytes of a body."""
    offsets = 8 * -(-coordinates // SEGMENT)
    return _head(coordinates, bucket_size) + min(offsets, width * coordinates)


def most_bytes(coordinates: int, bucket_size: int, width: int) -> int:
    """Return the most bytes of a body whose integers have ``width`` bytes each."""
    return _head(coordinates, bucket_size) + width * coordinates


def encode(
    flat: torch.Tensor, bucket_size: int, code: Code, key: int, width: int, body: torch.Tensor
) -> int | Later:
    """Quantise ``flat`` into ``body``.

    Args:
        flat: float32 (n,).
        bucket_size: At most n.
        code: Step and code books.
        key: Random key of the dither.
        width: Bytes of an integer that can hold every quantised coordinate.
        body: uint8, ``most_bytes`` long.

    Returns:
        The bytes written; on a GPU an object that yields them later.
    """
    if flat.is_cuda and flat.numel():
        return cuda_encode.encode(flat, bucket_size, code, key, width, body, SEGMENT)
    if not flat.numel():
        body.zero_()
        return body.numel()
    out = body.numpy()
    steps = cpu_ecdq.bucket_steps(flat, bucket_size, code.delta)
    at = _head(flat.numel(), bucket_size)
    out[4:at].view("<f4")[:] = steps.numpy()
    kind, used = CODED, _encode_segments(flat, steps, bucket_size, code, key, out[at:])
    if used is None:
        q = cpu_ecdq.quantize(flat, steps, bucket_size, key)
        kind, used = width, width * flat.numel()
        out[at : at + used].view(WIDTHS[width])[:] = q.numpy()
    out[:4].view("<u4")[0] = kind
    return at + used


def add(
    bodies: Sequence[torch.Tensor],
    bucket_size: int,
    code: Code,
    keys: Sequence[int],
    width: int,
    out: torch.Tensor,
) -> Callable[[], None] | None:
    """Add the values of bodies to ``out`` (float32, (n,)) in order.

    If a PayloadError is raised, the contents of ``out`` are undefined.

    Args:
        bodies: uint8; up to 7 bytes of padding, which must be 0, may follow each body.
        bucket_size: Coordinates of a bucket.
        code: Step and code books.
        keys: Random key of each body.
        width: Bytes of an uncoded integer.
        out: float32 (n,).

    Returns:
        None on the CPU; on a GPU a function that completes the check of the bodies.

    Raises:
        PayloadError: A body is invalid. On a GPU the returned function raises it.
    """
    least = _head(out.numel(), bucket_size)
    for body in bodies:
        if body.numel() < least:
            raise PayloadError(f"payload's body of {body.numel()} bytes is too short")
    if out.is_cuda:
        if not out.numel():
            return None
        flags = cuda_decode.add(bodies, bucket_size, code, keys, width, out, SEGMENT)
        return lambda: _judge(flags.get().tolist())
    for body, key in zip(bodies, keys, strict=True):
        _add(body.numpy(), bucket_size, code, key, width, out)
    return None


def _judge(flags: Sequence[int]) -> None:
    """Raise PayloadError if a flag of cuda_dithered_decode.add reports an unreadable body."""
    for flag in filter(None, flags):
        segment = flag - cuda_huffman.SEGMENT_FLAG
        message = f"payload's segment {segment} is corrupt"
        raise PayloadError(cuda_decode.REASONS.get(flag, message))


def _add(
    data: np.ndarray, bucket_size: int, code: Code, key: int, width: int, out: torch.Tensor
) -> None:
    """Add one body on the CPU."""
    at = _head(out.numel(), bucket_size)
    kind, sent = int(data[:4].view("<u4")[0]), data[4:at].view("<f4")
    if not np.all((sent >= 0) & (sent < np.inf) | np.isnan(sent)):
        raise PayloadError("payload holds impossible steps")
    steps = torch.from_numpy(sent)
    if kind == CODED:
        _add_segments(data[at:], steps, bucket_size, code, key, out)
    elif kind == width:
        _check_end(data[at:], width * out.numel())
        q = data[at : at + width * out.numel()].view(WIDTHS[width]).astype(np.int32)
        cpu_ecdq.add(torch.from_numpy(q), steps, bucket_size, key, out)
    else:
        raise PayloadError(f"payload's body is of kind {kind}, not {CODED} or {width}")


def _head(coordinates: int, bucket_size: int) -> int:
    """Return the bytes of ``kind`` and the steps."""
    return 4 + 4 * -(-coordinates // bucket_size)


def _encode_segments(
    flat: torch.Tensor, steps: torch.Tensor, bucket_size: int, code: Code, key: int, out: np.ndarray
) -> int | None:
    """Fill ``out`` (uint8) with offsets and segments; return the bytes used, or None if full."""
    begins, n = range(0, flat.numel(), SEGMENT), flat.numel()
    head = 8 * len(begins)
    if head > out.size:
        return None
    out = out[: head + LAST_END]

    def coded(share: range) -> list[np.ndarray]:
        """Return the codes and escapes of some segments, one after another."""
        splitter = cpu_ecdq.Splitter(min(SEGMENT, n), len(code.books), code.most, code.dtype)
        room = np.empty(cpu_huffman.most_bytes(min(SEGMENT, n)), np.uint8)
        coded_parts: list[np.ndarray] = []
        size = 0
        for begin in share:
            end = min(begin + SEGMENT, n)
            runs, escaped = splitter(flat, steps, bucket_size, key, begin, end)
            bits = 0
            for run, book in zip(runs, code.books, strict=True):
                bits = cpu_huffman.encode(run, book, room, bits)
            escapes = cpu_ecdq.put_numbers(escaped, code.most)
            coded_parts += [room[: -(-bits // 8)].copy(), escapes]
            size += coded_parts[-2].size + escapes.size
            if size > out.size:  # it will not fit
                break
        return coded_parts

    shares = _shares(begins)
    of_shares: Iterator[list[np.ndarray]] = mapped(coded, shares, len(shares))
    parts = list(itertools.chain.from_iterable(of_shares))
    ends = np.cumsum([part.size for part in parts], dtype=np.int64)
    if len(parts) < 2 * len(begins) or (parts and head + ends[-1] > out.size):
        return None
    out[:head].view("<u4")[:] = ends
    used = head + int(ends[-1]) if parts else head
    np.concatenate([np.empty(0, np.uint8), *parts], out=out[head:used])
    return used


def _add_segments(
    data: np.ndarray, steps: torch.Tensor, bucket_size: int, code: Code, key: int, out: torch.Tensor
) -> None:
    begins, n = range(0, out.numel(), SEGMENT), out.numel()
    head = 8 * len(begins)
    if data.size < head:
        raise PayloadError(f"payload's body is too short for {len(begins)} segments")
    ends = np.concatenate([[0], data[:head].view("<u4").astype(np.int64)])
    if np.any(np.diff(ends) < 0):
        raise PayloadError("payload's segments have impossible ends")
    data = data[head:]
    _check_end(data, int(ends[-1]))

    def add_share(share: range) -> None:
        runs: np.ndarray = np.empty((len(code.books), min(SEGMENT, n)), code.dtype)
        for begin in share:
            index, end = begin // SEGMENT, min(begin + SEGMENT, n)
            start, middle, stop = ends[2 * index : 2 * index + 3].tolist()
            escaped = cpu_ecdq.numbers(data[middle:stop], code.most)
            found = cpu_ecdq.counts(steps, bucket_size, key, begin, end, len(runs)).tolist()
            good = (
                escaped is not None
                and _read(data[start:middle], code, found, runs)
                and cpu_ecdq.add_runs(
                    runs, escaped, steps, bucket_size, key, begin, end, code.most, out
                )
            )
            if not good:
                raise PayloadError(f"payload's segment {index} is corrupt")

    shares = _shares(begins)
    for _ in mapped(add_share, shares, len(shares)):
        pass


def _shares(begins: range) -> list[range]:
    """Split the segments into contiguous shares, one for each of torch's threads."""
    threads = max(1, min(torch.get_num_threads(), len(begins)))
    cuts = [len(begins) * thread // threads for thread in range(threads + 1)]
    return [begins[a:b] for a, b in itertools.pairwise(cuts)]


def _read(data: np.ndarray, code: Code, counts: list[int], runs: np.ndarray) -> bool:
    """Fill each row of ``runs`` with its count of symbols.

    Returns:
        Whether all data were used and the bits that fill the last byte are 0.
    """
    bits = 0
    for row, count, book in zip(runs, counts, code.books, strict=True):
        bits = cpu_huffman.decode(data, bits, book, row[:count])
        if bits < 0:
            return False
    return -(-bits // 8) == data.size and (bits % 8 == 0 or data[-1] >> (bits % 8) == 0)


def _check_end(data: np.ndarray, size: int) -> None:
    if not 0 <= data.size - size <= 7 or np.any(data[size:]):
        raise PayloadError(f"payload's body has {data.size - size} bytes after its end")
