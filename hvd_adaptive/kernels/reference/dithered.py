"""Code and decode bodies of dithered payloads in plain torch and Python: the oracle.

kernels/dithered.py describes the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    opened,
)
from hvd_adaptive.kernels.reference import ecdq, huffman


def encode_body(
    flat: torch.Tensor,
    bucket_size: int,
    code: Code,
    key: int,
    width: int,
    body: torch.Tensor,
    segment: int = SEGMENT,
) -> int:
    """Quantise ``flat`` (float32, (n,)) into ``body`` (uint8, most_bytes); return how many bytes
    are used.

    bucket_size: at most n. width: the bytes of an integer; every integer fits into them. segment:
    in coordinates.
    """
    if not flat.numel():
        body.zero_()
        return body.numel()
    steps = ecdq.bucket_steps(flat, bucket_size, code.delta)
    q = ecdq.quantize(flat, steps, bucket_size, key)
    kind, room = CODED, min(width * flat.numel(), 8 * -(-flat.numel() // segment) + LAST_END)
    data = _coded(q, steps, bucket_size, code, key, segment)
    if len(data) > room:
        kind, data = width, q.cpu().numpy().astype(WIDTHS[width]).tobytes()
    head = np.array([kind], "<u4").tobytes() + steps.cpu().numpy().astype("<f4").tobytes()
    made = np.frombuffer(head + data, np.uint8).copy()
    body[: made.size].copy_(torch.from_numpy(made))
    return made.size


def add_bodies(
    bodies: Sequence[torch.Tensor],
    bucket_size: int,
    code: Code,
    keys: Sequence[int],
    width: int,
    out: torch.Tensor,
    segment: int = SEGMENT,
) -> None:
    """Add the values of ``bodies`` to ``out`` (float32, (n,)) in order.

    Raise PayloadError if a body is not valid; ``out`` is then of no use.

    bodies: uint8, followed by up to 7 bytes of padding, which must be 0.
    """
    for body, key in zip(bodies, keys, strict=True):
        sent, coded, integers = opened(body.cpu().numpy(), bucket_size, width, out.numel())
        steps, q = (torch.from_numpy(part).to(out.device) for part in (sent, integers))
        if coded is not None:
            q = _decoded(coded, steps, bucket_size, code, key, out.numel(), segment)
        ecdq.add(q, steps, bucket_size, key, out)


def _coded(
    q: torch.Tensor, steps: torch.Tensor, bucket_size: int, code: Code, key: int, segment: int
) -> bytes:
    """Return the segments' ends and the segments."""
    ends, parts = [], b""
    for begin in range(0, q.numel(), segment):
        end = min(begin + segment, q.numel())
        where = Stretch(steps, bucket_size, key, begin, end)
        runs, escapes = ecdq.split(q, where, len(code.books), code.most)
        out, bits = np.zeros(huffman.most_bytes(end - begin) + 1, np.uint8), 0
        for run, book in zip(runs, code.books, strict=True):
            out = np.concatenate([out, np.zeros(huffman.most_bytes(run.size), np.uint8)])
            bits = huffman.encode(run, book, out, bits)
        for part in (out[: -(-bits // 8)].tobytes(), escapes):
            parts += part
            ends.append(len(parts))
    return np.array(ends, np.int64).astype("<u4").tobytes() + parts


def _decoded(
    data: np.ndarray,
    steps: torch.Tensor,
    bucket_size: int,
    code: Code,
    key: int,
    coordinates: int,
    segment: int,
) -> torch.Tensor:
    """Invert ``_coded``: return q (int32). Raise PayloadError if a segment is corrupt."""
    begins = range(0, coordinates, segment)
    ends, data = checked_ends(data, len(begins))
    parts = [torch.zeros(0, dtype=torch.int32, device=steps.device)]
    for index, begin in enumerate(begins):
        end = min(begin + segment, coordinates)
        where = Stretch(steps, bucket_size, key, begin, end)
        start, middle, stop = ends[2 * index : 2 * index + 3].tolist()
        runs = _runs(data[start:middle], code, ecdq.counts(where, len(code.books)))
        q = None
        if runs is not None:
            q = ecdq.joined(runs, data[middle:stop].tobytes(), where, code.most)
        if q is None:
            raise corrupt_segment(index)
        parts.append(q)
    return torch.cat(parts)


def _runs(data: np.ndarray, code: Code, counts: Sequence[int]) -> list[np.ndarray] | None:
    """Return the given number of symbols of each class, or None unless they use all of the data."""
    runs, bits = [], 0
    for count, book in zip(counts, code.books, strict=True):
        run = np.empty(count, np.uint16)
        bits = huffman.decode(data, bits, book, run)
        if bits < 0:
            return None
        runs.append(run)
    used = -(-bits // 8) == data.size and (bits % 8 == 0 or data[-1] >> (bits % 8) == 0)
    return runs if used else None
