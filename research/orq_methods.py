"""The methods of the ORQ paper ("Optimal Gradient Quantization Condition", 2020)."""

from __future__ import annotations

import functools
from collections.abc import Callable

from hvd_adaptive import ORQ, QSGD, BinGrad, LinearQuantile, SignSGD, TernGrad
from hvd_adaptive.compressor import GradientCompressor

# Evenly spaced levels up to the largest magnitude: the paper counts QSGD-3 and TernGrad as one.
_even = functools.partial(QSGD, norm="linf")
METHODS: dict[str, Callable[..., GradientCompressor]] = {
    "BinGrad-pb": functools.partial(BinGrad, variant="partially_biased"),
    "BinGrad-b": functools.partial(BinGrad, variant="biased"),
    "SignSGD": SignSGD,
    "TernGrad": TernGrad,
    "Linear-3": functools.partial(LinearQuantile, levels=3),
    "ORQ-3": functools.partial(ORQ, levels=3),
    "QSGD-5": functools.partial(_even, intervals=2),
    "Linear-5": functools.partial(LinearQuantile, levels=5),
    "ORQ-5": functools.partial(ORQ, levels=5),
    "QSGD-9": functools.partial(_even, intervals=4),
    "Linear-9": functools.partial(LinearQuantile, levels=9),
    "ORQ-9": functools.partial(ORQ, levels=9),
}
# By number of levels; from three on: evenly spaced, quantiles, optimised.
BY_LEVELS = {
    2: ("BinGrad-pb", "BinGrad-b", "SignSGD"),
    3: ("TernGrad", "Linear-3", "ORQ-3"),
    5: ("QSGD-5", "Linear-5", "ORQ-5"),
    9: ("QSGD-9", "Linear-9", "ORQ-9"),
}
FULL = "FP"
# Of the paper's CIFAR experiments, of its Table 3 (in part), and of its Table 4.
BUCKET = 2048
BUCKETS = (128, 512, 2048, 32768)
SIZED = ("TernGrad", "ORQ-3")
CLIP_BUCKET = 512
CLIPPED = ("TernGrad", "ORQ-3", "ORQ-5", "ORQ-9")
CLIPS = (1.7, 2.5, None)
# Of its section 5.2, on ImageNet: four workers, clipped.
WORKERS, WORKERS_CLIP = 4, 2.5
DISTRIBUTED = ("TernGrad", "ORQ-3", "QSGD-5", "ORQ-5", "QSGD-9", "ORQ-9")


def make(
    method: str, bucket_size: int, clip: float | None = None, seed: int = 0
) -> GradientCompressor | None:
    """The method's compressor, without clipping unless told; None in full precision."""
    if method == FULL:
        return None
    return METHODS[method](bucket_size=bucket_size, clip=clip, seed=seed, keep_zeros=False)
