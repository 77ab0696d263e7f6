"""What the bodies of EDEN's codecs have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from hvd_adaptive.kernels.random import MASK64, stream_key
from hvd_adaptive.streams import Inside

KEY_BYTES = 8  # of the shared rotation's stream, with which a body begins


def by_rotation(
    bodies: Sequence[torch.Tensor], keys: Sequence[int]
) -> Iterator[tuple[int, list[tuple[torch.Tensor, int]]]]:
    """Yield neighbouring bodies that share a rotation, with their keys."""
    rotations = torch.stack([body[:KEY_BYTES].view(torch.int64)[0] for body in bodies]).tolist()
    triples = zip(rotations, bodies, keys, strict=True)
    for rotation, own in groupby(triples, key=lambda triple: triple[0]):
        yield rotation & MASK64, [(body, key) for _, body, key in own]


def own_stream(key: int) -> int:
    """Return the stream of signs of a payload's own rotation."""
    return stream_key(key, Inside.ROTATION)


def signed(number: int) -> int:
    """Return the int64 with the bits of a 64-bit number."""
    return number - (1 << 64) if number >> 63 else number
