"""Quantise to level tables for CUDA tensors, in Triton.

Signatures and integers are the same as in reference/tables.py. Everything is queued on the current
stream of the tensors' device; ``histogram`` waits for its result.
"""

from __future__ import annotations

from hvd_adaptive.kernels.triton.decoder import decode_add
from hvd_adaptive.kernels.triton.encoder import encode
from hvd_adaptive.kernels.triton.scan import bucket_norms, clipped, counts, histogram

__all__ = [
    "bucket_norms",
    "clipped",
    "counts",
    "decode_add",
    "encode",
    "histogram",
]
