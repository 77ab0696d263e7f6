"""The schemes that tests run over, each with what is its own: bits or levels, norm, solver, coding.

Tests add the keywords that all schemes share, such as ``bucket_size``:

    schemes("alq-3", "qsgd-4-linf", bucket_size=64)     # label -> constructor
    scheme("alq-3", update_steps=[0, 2])                # one constructor
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hvd_adaptive import (
    ALQ,
    AMQ,
    DRIVE,
    ECDQ,
    EDEN,
    NUQSGD,
    ORQ,
    QCS,
    QSGD,
    BinGrad,
    LinearQuantile,
    NaturalCompression,
    OneBitSGD,
    SignSGD,
    SparseSGD,
    TernGrad,
)

Make = Callable[..., Any]

# The form of ALQ and AMQ in their paper's experiments; the defaults are others.
PAPER: dict[str, Any] = {"norm": "l2", "symmetric": True}

CASES: dict[str, Make] = {
    "alq-2": partial(ALQ, bits=2),
    "alq-2-paper": partial(ALQ, bits=2, **PAPER),
    "alq-2-paper-gradient-huffman": partial(
        ALQ, bits=2, **PAPER, solver="gradient_descent", coding="huffman"
    ),
    "alq-3": partial(ALQ, bits=3),
    "alq-3-clip2.5": partial(ALQ, bits=3, clip=2.5),
    "alq-3-gradient": partial(ALQ, bits=3, solver="gradient_descent"),
    "alq-3-huffman": partial(ALQ, bits=3, coding="huffman"),
    "alq-3-l2": partial(ALQ, bits=3, norm="l2"),
    "alq-3-n": partial(ALQ, bits=3, normalized=True),
    "alq-3-n-normal": partial(ALQ, bits=3, normalized=True, statistics="normal"),
    "alq-3-normal": partial(ALQ, bits=3, statistics="normal"),
    "alq-3-paper": partial(ALQ, bits=3, **PAPER),
    "alq-3-paper-n-normal": partial(ALQ, bits=3, **PAPER, normalized=True, statistics="normal"),
    "alq-3-paper-normal": partial(ALQ, bits=3, **PAPER, statistics="normal"),
    "alq-3-symmetric": partial(ALQ, bits=3, symmetric=True),
    "alq-3-symmetric-huffman": partial(ALQ, bits=3, symmetric=True, coding="huffman"),
    "alq-4": partial(ALQ, bits=4),
    "alq-4-n": partial(ALQ, bits=4, normalized=True),
    "alq-8": partial(ALQ, bits=8),
    "alq-8-normal": partial(ALQ, bits=8, statistics="normal"),
    "alq-8-paper": partial(ALQ, bits=8, **PAPER),
    "alq-8-symmetric": partial(ALQ, bits=8, symmetric=True),
    "amq-3": partial(AMQ, bits=3),
    "amq-3-n-normal": partial(AMQ, bits=3, normalized=True, statistics="normal"),
    "amq-3-paper": partial(AMQ, bits=3, **PAPER),
    "amq-4": partial(AMQ, bits=4),
    "amq-4-symmetric": partial(AMQ, bits=4, symmetric=True),
    "amq-6-n": partial(AMQ, bits=6, normalized=True),
    "bingrad": BinGrad,
    "bingrad-biased": partial(BinGrad, variant="biased"),
    "bingrad-biased-clip1.7": partial(BinGrad, variant="biased", clip=1.7),
    "bingrad-biased-iterated": partial(BinGrad, variant="biased", iterate=True),
    "drive": DRIVE,
    "ecdq-1.5": partial(ECDQ, bits=1.5),
    "ecdq-2": partial(ECDQ, bits=2),
    "ecdq-2.5": partial(ECDQ, bits=2.5),
    "ecdq-3": partial(ECDQ, bits=3),
    "ecdq-variance0.0001": partial(ECDQ, relative_variance=1e-4),
    "ecdq-variance0.01": partial(ECDQ, relative_variance=0.01),
    "ecdq-variance0.1": partial(ECDQ, relative_variance=0.1),
    "ecdq-variance0.2": partial(ECDQ, relative_variance=0.2),
    "eden-0.5": partial(EDEN, bits=0.5),
    **{f"eden-{bits}": partial(EDEN, bits=bits) for bits in range(1, 9)},
    "quantile-10": partial(LinearQuantile, levels=10),
    "quantile-4": partial(LinearQuantile, levels=4),
    "quantile-5": partial(LinearQuantile, levels=5),
    "quantile-9": partial(LinearQuantile, levels=9),
    "nuqsgd-3": partial(NUQSGD, bits=3),
    "nuqsgd-4": partial(NUQSGD, bits=4),
    "nuqsgd-4-huffman": partial(NUQSGD, bits=4, coding="huffman"),
    "nuqsgd-5": partial(NUQSGD, bits=5),
    "nuqsgd-5-p0.8-symmetric": partial(NUQSGD, bits=5, multiplier=0.8, symmetric=True),
    "nuqsgd-6": partial(NUQSGD, bits=6),
    "nuqsgd-8": partial(NUQSGD, bits=8),
    "natural": NaturalCompression,
    "orq-3-clip2.5": partial(ORQ, levels=3, clip=2.5),
    "orq-3-half": partial(ORQ, levels=3, level_dtype="float16"),
    "orq-5": partial(ORQ, levels=5),
    "orq-5-descent": partial(ORQ, levels=5, solver="coordinate_descent"),
    "orq-9": partial(ORQ, levels=9),
    "orq-9-half": partial(ORQ, levels=9, level_dtype="float16"),
    "orq-9-half-clip2.5": partial(ORQ, levels=9, level_dtype="float16", clip=2.5),
    "onebit": OneBitSGD,
    "onebit-no-feedback": partial(OneBitSGD, error_feedback=None),
    "qcs": QCS,
    "qcs-gain10": partial(QCS, gain=10),
    "qcs-gain4": partial(QCS, gain=4),
    "qcs-gain8": partial(QCS, gain=8),
    "qcs-k24-range1": partial(QCS, measurements=24, quantizer_range=1),
    "qcs-mmse": partial(QCS, estimator="mmse"),
    "qcs-mmse-gain10": partial(QCS, estimator="mmse", gain=10),
    "qcs-range1": partial(QCS, quantizer_range=1),
    "qsgd-2": partial(QSGD, bits=2),
    "qsgd-2-linf-symmetric": partial(QSGD, bits=2, norm="linf", symmetric=True),
    "qsgd-3": partial(QSGD, bits=3),
    "qsgd-3-elias": partial(QSGD, bits=3, coding="elias"),
    "qsgd-3-huffman": partial(QSGD, bits=3, coding="huffman"),
    "qsgd-3-linf": partial(QSGD, bits=3, norm="linf"),
    "qsgd-3-linf-huffman": partial(QSGD, bits=3, norm="linf", coding="huffman"),
    "qsgd-3-linf-symmetric": partial(QSGD, bits=3, norm="linf", symmetric=True),
    "qsgd-3-symmetric": partial(QSGD, bits=3, symmetric=True),
    "qsgd-4": partial(QSGD, bits=4),
    "qsgd-4-elias": partial(QSGD, bits=4, coding="elias"),
    "qsgd-4-linf": partial(QSGD, bits=4, norm="linf"),
    "qsgd-4-linf-clip2.5-huffman": partial(QSGD, bits=4, norm="linf", clip=2.5, coding="huffman"),
    "qsgd-4-linf-symmetric": partial(QSGD, bits=4, norm="linf", symmetric=True),
    "qsgd-4-linf-symmetric-clip2.0": partial(QSGD, bits=4, norm="linf", symmetric=True, clip=2.0),
    "qsgd-8": partial(QSGD, bits=8),
    "qsgd-8-linf": partial(QSGD, bits=8, norm="linf"),
    "qsgd-s1-linf": partial(QSGD, intervals=1, norm="linf"),
    "qsgd-s5": partial(QSGD, intervals=5),
    "signsgd": SignSGD,
    "sparse-0.05": partial(SparseSGD, density=0.05),
    "sparse-0.1": partial(SparseSGD, density=0.1),
    "sparse-0.2": partial(SparseSGD, density=0.2),
    "sparse-0.3": partial(SparseSGD, density=0.3),
    "sparse-1.0": partial(SparseSGD, density=1.0),
    "terngrad": TernGrad,
    "terngrad-clip2.5": partial(TernGrad, clip=2.5),
    "terngrad-unclipped": partial(TernGrad, clip=None),
}

# Each scheme of the package once.
EVERY = (
    "alq-3",
    "amq-3",
    "bingrad",
    "drive",
    "ecdq-3",
    "eden-2",
    "natural",
    "nuqsgd-3",
    "onebit-no-feedback",
    "orq-5",
    "qcs-gain10",
    "qsgd-3",
    "quantile-5",
    "signsgd",
    "sparse-0.2",
    "terngrad",
)


def scheme(label: str, **shared: Any) -> Make:
    """Return the case's constructor with more keywords; a call may override them."""
    return partial(CASES[label], **shared)


def schemes(*labels: str, **shared: Any) -> dict[str, Make]:
    """Return the constructors of several cases by their labels."""
    return {label: scheme(label, **shared) for label in labels}
