"""Provide the parts of a custom scheme: ``from hvd_adaptive.custom import Scheme, Settings, ...``.

A scheme is a class derived from ``Scheme`` that defines its name and the layout of its bodies of
codes. ``Scheme`` provides payloads, checksums, groups, exchanges, error feedback, state and
reports:

    name                         at most 16 ASCII characters, in every payload
    __init__(**shared)           calls super().__init__(Settings.from_keywords("Name", shared))
    alphabet                     number of different codes (a property)
    codec_settings()             settings on which a payload's bytes depend, as a dict
    body_bytes(n)                bytes of the body of n coordinates
    encode_body(flat, body, key) quantises flat (float32, 1-D) into body (uint8)
    add_bodies(bodies, keys, factor, out)
                                 out (float32, 1-D) becomes factor * (out + the bodies' values)

A bucket with a NaN or Inf must decode to NaN as a whole, and a bucket of zeros to zeros, so that
AMP skips such steps on all ranks. Coordinates after the last whole bucket form a shorter bucket.
docs/examples.md has a complete example, examples/custom_scheme.py. A codec whose bodies vary in
length overrides ``least_body_bytes`` (docs/contributing.md).
"""

from __future__ import annotations

import torch

from hvd_adaptive import kernels
from hvd_adaptive.codec.adaptive_codec import PlainCodec
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.settings import Settings

__all__ = ["Scheme", "Settings", "in_buckets", "uniforms"]


class Scheme(GradientCompressor, PlainCodec):
    """Base of custom schemes, which are their own codecs.

    Args:
        settings: ``Settings.from_keywords(...)``.
    """

    name: str = ""

    def __init__(self, settings: Settings) -> None:
        PlainCodec.__init__(self, settings)
        GradientCompressor.__init__(self, self)


def in_buckets(flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
    """Return ``flat`` (1-D) as at least one row of shape (buckets, bucket_size).

    The last row is padded with zeros. The result is a view if no padding is needed.

    Examples:
        >>> from hvd_adaptive.custom import in_buckets
        >>> in_buckets(torch.ones(5), 3)
        tensor([[1., 1., 1.],
                [1., 1., 0.]])
    """
    buckets = max(1, -(-flat.numel() // bucket_size))
    missing = buckets * bucket_size - flat.numel()
    padded = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
    return padded.view(buckets, bucket_size)


def uniforms(rows: torch.Tensor, key: int) -> torch.Tensor:
    """Return uniform numbers in [0, 1) for ``rows`` (buckets, bucket_size), float32 with 24 bits.

    The numbers depend only on ``key``, are the same on every machine, and leave torch's generator
    unchanged.

    Examples:
        >>> from hvd_adaptive.custom import in_buckets, uniforms
        >>> rows = in_buckets(torch.zeros(1000), 256)
        >>> uniforms(rows, key=7).shape
        torch.Size([4, 256])
    """
    buckets, size = rows.shape
    draw = kernels.for_device(rows.device, "uniforms").uniforms
    drawn = draw(rows.numel(), size, key, rows.device)
    return drawn.view(buckets, size) * 2.0**-24
