"""What a scheme of one's own is made of: ``from hvd_adaptive.scheme import Scheme, Settings, ...``.

A scheme is a class derived from ``Scheme`` that names itself and says what bodies of codes look
like; payloads, checksums, groups, exchanges, error feedback, state and reports come with it:

    name                         at most 16 ASCII characters, in every payload
    __init__(**shared)           calls super().__init__(Settings.from_keywords("Name", shared))
    alphabet                     how many different codes there are (a property)
    codec_settings()             what a payload's bytes depend on, as a dict
    body_bytes(n)                bytes of n coordinates' body
    encode_body(flat, body, key) quantises flat (float32, 1-D) into body (uint8)
    add_bodies(bodies, keys, factor, out)
                                 out (float32, 1-D) becomes factor * (out + the bodies' values)

Where a bucket holds a NaN or Inf all of it must decode to NaN, and one of zeros to zeros, so that
AMP skips such steps on all ranks. Coordinates beyond the last whole bucket make a shorter one.
examples/custom_scheme.py is one, complete; codec.Codec tells of bodies whose length varies.
"""

from __future__ import annotations

import torch

from hvd_adaptive import kernels
from hvd_adaptive.compressor import GradientCompressor as Scheme
from hvd_adaptive.settings import Settings

__all__ = ["Scheme", "Settings", "in_buckets", "uniforms"]


def in_buckets(flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
    """``flat`` (1-D) as rows (buckets, bucket_size), the last one filled up with zeros; a view
    where nothing is to be filled up. At least one row."""
    buckets = max(1, -(-flat.numel() // bucket_size))
    missing = buckets * bucket_size - flat.numel()
    padded = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
    return padded.view(buckets, bucket_size)


def uniforms(rows: torch.Tensor, key: int) -> torch.Tensor:
    """Uniform numbers in [0, 1) for ``rows`` (buckets, bucket_size), float32 with 24 bits: the ones
    of ``key``, the same on every machine, torch's own generator untouched."""
    buckets, size = rows.shape
    draw = kernels.for_device(rows.device, "uniforms").uniforms
    drawn = draw(rows.numel(), size, key, rows.device)
    return drawn.view(buckets, size) * 2.0**-24
