"""Write and read bodies of random sparsification on the host: docs/wire_format.md, "sparse"."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.kernels import on_host

# A code without its quotient must fit in 32 bits.
LARGEST_PARAMETER = 29


def rice_parameter(density: float) -> int:
    """Return the k with the fewest bits for gaps between coordinates that are kept independently
    with this probability (Kiely, Selecting the Golomb parameter in Rice coding, 2004, Eq. 8).
    """
    if density >= 1:
        return 0
    golden = (1 + math.sqrt(5)) / 2
    best = math.log(math.log(golden - 1) / math.log1p(-density), 2)
    return min(LARGEST_PARAMETER, max(0, 1 + math.floor(best)))


def most_words(coordinates: int, k: int) -> int:
    """Return the most 32-bit words of a stream: every coordinate kept, every quotient bit used."""
    return -(-(coordinates * (k + 3) + (coordinates >> k)) // 32)


def encode_body(
    flat: torch.Tensor, bucket_size: int, density: float, k: int, key: int, body: torch.Tensor
) -> int:
    """Fill ``body`` (uint8, of the largest possible length) from ``flat`` (float32, (n,)); return
    how many bytes are used. For the other arguments see numba.sparse.encode.
    """
    if not flat.numel():
        body.zero_()
        return body.numel()
    sections = on_host("sparse").encode(flat.numpy(), bucket_size, density, k, key)
    out, at = body.numpy(), 8
    out[:8].view("<i8")[0] = sections[1].size
    for section in sections:
        end = at + section.nbytes
        out[at:end].view(section.dtype)[:] = section
        at = end
    return at


def add_bodies(bodies: Sequence[torch.Tensor], bucket_size: int, k: int, out: torch.Tensor) -> None:
    """Add the values of ``bodies`` (uint8, long enough for their thresholds) to ``out`` (float32,
    (n,)) in order. Raise PayloadError if a body cannot be read; ``out`` is then of no use.
    """
    for body in bodies:
        sections = _sections_of(body.numpy(), out.numel(), bucket_size)
        if not on_host("sparse").add(*sections, bucket_size, np.int64(k), out.numpy()):
            raise PayloadError(f"payload's body does not hold {out.numel()} coordinates")


def _sections_of(body: np.ndarray, coordinates: int, bucket_size: int) -> list[np.ndarray]:
    """Return the sections of a body: thresholds (float32, one per bucket), exact values (float32),
    words (uint32). Raise PayloadError if it is too short for them.
    """
    start = 8 + 4 * -(-coordinates // bucket_size)
    count = int(body[:8].view("<i8")[0])
    if not 0 <= count <= min(coordinates, (body.size - start) // 4):
        raise PayloadError(f"payload says it holds {count} exact values")
    end = start + 4 * count
    words = body[end : end + (body.size - end) // 4 * 4]
    return [body[8:start].view("<f4"), body[start:end].view("<f4"), words.view("<u4")]
