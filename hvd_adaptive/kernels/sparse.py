"""Define what the kernels of random sparsification share: a body and its sections.

A body holds the number of values that travel in full (int64), λ of each bucket (float32), those
values (float32), and then the words of kernels/rice.py.
"""

from __future__ import annotations

import torch

from hvd_adaptive.base.errors import PayloadError

# A payload's sections: thresholds (float32, one per bucket), exact values (float32), words (int32).
Sections = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def head_bytes(coordinates: int, bucket_size: int) -> int:
    """Return the bytes of the number of exact values and of the thresholds."""
    return 8 + 4 * -(-coordinates // bucket_size)


def write_body(sections: Sections, body: torch.Tensor) -> int:
    """Put sections into ``body`` (uint8, of the largest length); return how many bytes are used."""
    body[:8].view(torch.int64)[0] = sections[1].numel()
    at = 8
    for section in sections:
        end = at + 4 * section.numel()
        body[at:end].view(section.dtype).copy_(section)
        at = end
    return at


def sections_of(body: torch.Tensor, coordinates: int, bucket_size: int) -> Sections:
    """Return the sections of a body; PayloadError if it is too short for them."""
    start = head_bytes(coordinates, bucket_size)
    count = int(body[:8].view(torch.int64)[0])
    if not 0 <= count <= min(coordinates, (body.numel() - start) // 4):
        raise PayloadError(f"payload says it holds {count} exact values")
    end = start + 4 * count
    lambdas, exact = body[8:start].view(torch.float32), body[start:end].view(torch.float32)
    return lambdas, exact, body[end : end + (body.numel() - end) // 4 * 4].view(torch.int32)


def unreadable(coordinates: int) -> PayloadError:
    """Return the error for a body that does not hold so many coordinates."""
    return PayloadError(f"payload's body does not hold {coordinates} coordinates")
