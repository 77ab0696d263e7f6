"""Code and decode bodies of dithered payloads (kernels/dithered.py) in Triton.

Signatures and bytes are the same as in reference/dithered.py. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_adaptive.device import HostCopy
from hvd_adaptive.errors import BodyCheck, PayloadError
from hvd_adaptive.kernels.dithered import SEGMENT, Code, check_lengths, corrupt_segment
from hvd_adaptive.kernels.triton import dithered_decode, dithered_encode
from hvd_adaptive.kernels.triton.prefix_streams import SEGMENT_FLAG


def encode_body(
    flat: torch.Tensor,
    bucket_size: int,
    code: Code,
    key: int,
    width: int,
    body: torch.Tensor,
    segment: int = SEGMENT,
) -> int | HostCopy:
    """See reference.dithered.encode_body."""
    if not flat.numel():
        body.zero_()
        return body.numel()
    return dithered_encode.encode(flat, bucket_size, code, key, width, body, segment)


def add_bodies(
    bodies: Sequence[torch.Tensor],
    bucket_size: int,
    code: Code,
    keys: Sequence[int],
    width: int,
    out: torch.Tensor,
    segment: int = SEGMENT,
) -> BodyCheck | None:
    """See reference.dithered.add_bodies."""
    check_lengths(bodies, bucket_size, out)
    if not out.numel():
        return None
    flags = dithered_decode.add(bodies, bucket_size, code, keys, width, out, segment)
    return lambda: _judge(flags.get().tolist())


def _judge(flags: Sequence[int]) -> None:
    """Raise PayloadError if a flag of dithered_decode.add marks a body as unreadable."""
    for flag in filter(None, flags):
        if flag in dithered_decode.REASONS:
            raise PayloadError(dithered_decode.REASONS[flag])
        raise corrupt_segment(flag - SEGMENT_FLAG)
