"""Code and decode dithered payloads (kernels/dithered.py) in Numba, several segments at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hvd_adaptive.kernels.constants import LAST_END
from hvd_adaptive.kernels.dithered import (
    CODED,
    SEGMENT,
    WIDTHS,
    Code,
    Stretch,
    checked_ends,
    corrupt_segment,
    head_bytes,
    opened,
)
from hvd_adaptive.kernels.numba import ecdq, huffman
from hvd_adaptive.kernels.numba.escapes import numbers, put_numbers
from hvd_adaptive.kernels.threads import mapped


def encode_body(
    flat: torch.Tensor,
    bucket_size: int,
    code: Code,
    key: int,
    width: int,
    body: torch.Tensor,
    segment: int = SEGMENT,
) -> int:
    if not flat.numel():
        body.zero_()
        return body.numel()
    out = body.numpy()
    steps = ecdq.bucket_steps(flat, bucket_size, code.delta)
    at = head_bytes(flat.numel(), bucket_size)
    out[4:at].view("<f4")[:] = steps.numpy()
    kind, used = CODED, _encode_segments(flat, steps, bucket_size, code, key, out[at:], segment)
    if used is None:
        q = ecdq.quantize(flat, steps, bucket_size, key)
        kind, used = width, width * flat.numel()
        out[at : at + used].view(WIDTHS[width])[:] = q.numpy()
    out[:4].view("<u4")[0] = kind
    return at + used


def add_bodies(
    bodies: Sequence[torch.Tensor],
    bucket_size: int,
    code: Code,
    keys: Sequence[int],
    width: int,
    out: torch.Tensor,
    segment: int = SEGMENT,
) -> None:
    for body, key in zip(bodies, keys, strict=True):
        sent, coded, q = opened(body.numpy(), bucket_size, width, out.numel())
        steps = torch.from_numpy(sent)
        if coded is None:
            ecdq.add(torch.from_numpy(q), steps, bucket_size, key, out)
        else:
            _add_segments(coded, steps, bucket_size, code, key, out, segment)


def _encode_segments(
    flat: torch.Tensor,
    steps: torch.Tensor,
    bucket_size: int,
    code: Code,
    key: int,
    out: np.ndarray,
    segment: int,
) -> int | None:
    """Fill ``out`` (uint8) with offsets and segments; return None if they do not fit."""
    begins, n = range(0, flat.numel(), segment), flat.numel()
    head = 8 * len(begins)
    if head > out.size:
        return None
    out = out[: head + LAST_END]

    def coded(share: range) -> list[np.ndarray]:
        """Return codes and escapes of some segments, one after another."""
        splitter = ecdq.Splitter(min(segment, n), len(code.books), code.most, code.dtype)
        room = np.empty(huffman.most_bytes(min(segment, n)), np.uint8)
        coded_parts: list[np.ndarray] = []
        size = 0
        for begin in share:
            where = Stretch(steps, bucket_size, key, begin, min(begin + segment, n))
            runs, escaped = splitter(flat, where)
            bits = 0
            for run, book in zip(runs, code.books, strict=True):
                bits = huffman.encode(run, book, room, bits)
            escapes = put_numbers(escaped, code.most)
            coded_parts += [room[: -(-bits // 8)].copy(), escapes]
            size += coded_parts[-2].size + escapes.size
            if size > out.size:  # The segments do not fit: stop.
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
    data: np.ndarray,
    steps: torch.Tensor,
    bucket_size: int,
    code: Code,
    key: int,
    out: torch.Tensor,
    segment: int,
) -> None:
    begins, n = range(0, out.numel(), segment), out.numel()
    ends, data = checked_ends(data, len(begins))

    def add_share(share: range) -> None:
        runs: np.ndarray = np.empty((len(code.books), min(segment, n)), code.dtype)
        for begin in share:
            index = begin // segment
            where = Stretch(steps, bucket_size, key, begin, min(begin + segment, n))
            start, middle, stop = ends[2 * index : 2 * index + 3].tolist()
            escaped = numbers(data[middle:stop], code.most)
            found = ecdq.counts(where, len(runs)).tolist()
            good = escaped is not None and _read(data[start:middle], code, found, runs)
            if not (good and ecdq.add_runs(runs, escaped, where, code.most, out)):
                raise corrupt_segment(index)

    shares = _shares(begins)
    for _ in mapped(add_share, shares, len(shares)):
        pass


def _shares(begins: range) -> list[range]:
    """Divide segments into runs of neighbours, one for each of torch's threads; use all threads."""
    threads = max(1, min(torch.get_num_threads(), len(begins)))
    cuts = [len(begins) * thread // threads for thread in range(threads + 1)]
    return [begins[a:b] for a, b in itertools.pairwise(cuts)]


def _read(data: np.ndarray, code: Code, counts: list[int], runs: np.ndarray) -> bool:
    """Fill the rows of ``runs`` with so many symbols each; return whether all the data were used
    and the bits that fill the last byte are 0.
    """
    bits = 0
    for row, count, book in zip(runs, counts, code.books, strict=True):
        bits = huffman.decode(data, bits, book, row[:count])
        if bits < 0:
            return False
    return -(-bits // 8) == data.size and (bits % 8 == 0 or data[-1] >> (bits % 8) == 0)
