"""The kernels for CUDA tensors, in Triton.

Same signatures and the same integers as kernels/reference.py. Everything is queued on the current
stream of the tensors' device; ``histogram`` and ``checksum`` wait for their result.
"""

from __future__ import annotations

from hvd_adaptive.kernels.cuda_checksum import checksum
from hvd_adaptive.kernels.cuda_decode import decode_add
from hvd_adaptive.kernels.cuda_encode import encode
from hvd_adaptive.kernels.cuda_scan import bucket_norms, clipped, counts, histogram

__all__ = [
    "bucket_norms",
    "checksum",
    "clipped",
    "counts",
    "decode_add",
    "encode",
    "histogram",
]
