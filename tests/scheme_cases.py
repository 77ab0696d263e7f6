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
    **{f"alq-{bits}": partial(ALQ, bits=bits) for bits in (2, 3, 4, 8)},
    **{f"alq-{bits}-paper": partial(ALQ, bits=bits, **PAPER) for bits in (2, 3, 8)},
    "alq-2-paper-gradient-huffman": partial(
        ALQ, bits=2, **PAPER, solver="gradient_descent", coding="huffman"
    ),
    "alq-3-clip2.5": partial(ALQ, bits=3, clip=2.5),
    "alq-3-gradient": partial(ALQ, bits=3, solver="gradient_descent"),
    "alq-3-huffman": partial(ALQ, bits=3, coding="huffman"),
    "alq-3-l2": partial(ALQ, bits=3, norm="l2"),
    "alq-3-n": partial(ALQ, bits=3, normalized=True),
    "alq-3-n-normal": partial(ALQ, bits=3, normalized=True, statistics="normal"),
    "alq-3-normal": partial(ALQ, bits=3, statistics="normal"),
    "alq-3-paper-n-normal": partial(ALQ, bits=3, **PAPER, normalized=True, statistics="normal"),
    "alq-3-paper-normal": partial(ALQ, bits=3, **PAPER, statistics="normal"),
    "alq-3-symmetric-huffman": partial(ALQ, bits=3, symmetric=True, coding="huffman"),
    "alq-4-n": partial(ALQ, bits=4, normalized=True),
    "alq-8-normal": partial(ALQ, bits=8, statistics="normal"),
    "alq-8-symmetric": partial(ALQ, bits=8, symmetric=True),
    **{f"amq-{bits}": partial(AMQ, bits=bits) for bits in (3, 4)},
    "amq-3-n-normal": partial(AMQ, bits=3, normalized=True, statistics="normal"),
    "amq-3-paper": partial(AMQ, bits=3, **PAPER),
    "amq-4-symmetric": partial(AMQ, bits=4, symmetric=True),
    "bingrad": BinGrad,
    "bingrad-biased": partial(BinGrad, variant="biased"),
    "bingrad-biased-iterated": partial(BinGrad, variant="biased", iterate=True),
    "drive": DRIVE,
    **{f"ecdq-{bits}": partial(ECDQ, bits=bits) for bits in (1.5, 2, 2.5, 3)},
    **{f"ecdq-variance{v}": partial(ECDQ, relative_variance=v) for v in (0.0001, 0.01, 0.1, 0.2)},
    **{f"eden-{bits}": partial(EDEN, bits=bits) for bits in (0.5, *range(1, 9))},
    **{f"quantile-{levels}": partial(LinearQuantile, levels=levels) for levels in (4, 5, 9)},
    **{f"nuqsgd-{bits}": partial(NUQSGD, bits=bits) for bits in (3, 4, 5, 6)},
    "nuqsgd-4-huffman": partial(NUQSGD, bits=4, coding="huffman"),
    "nuqsgd-5-p0.8-symmetric": partial(NUQSGD, bits=5, multiplier=0.8, symmetric=True),
    "natural": NaturalCompression,
    "orq-3-clip2.5": partial(ORQ, levels=3, clip=2.5),
    "orq-3-half": partial(ORQ, levels=3, level_dtype="float16"),
    **{f"orq-{levels}": partial(ORQ, levels=levels) for levels in (5, 9)},
    "orq-5-descent": partial(ORQ, levels=5, solver="coordinate_descent"),
    "orq-9-half": partial(ORQ, levels=9, level_dtype="float16"),
    "orq-9-half-clip2.5": partial(ORQ, levels=9, level_dtype="float16", clip=2.5),
    "onebit": OneBitSGD,
    "onebit-no-feedback": partial(OneBitSGD, error_feedback=None),
    "qcs": QCS,
    **{f"qcs-gain{gain}": partial(QCS, gain=gain) for gain in (8, 10)},
    "qcs-k24-range1": partial(QCS, measurements=24, quantizer_range=1),
    "qcs-mmse": partial(QCS, estimator="mmse"),
    "qcs-mmse-gain10": partial(QCS, estimator="mmse", gain=10),
    "qcs-range1": partial(QCS, quantizer_range=1),
    **{f"qsgd-{bits}": partial(QSGD, bits=bits) for bits in (2, 3, 4, 8)},
    "qsgd-2-linf-symmetric": partial(QSGD, bits=2, norm="linf", symmetric=True),
    "qsgd-3-elias": partial(QSGD, bits=3, coding="elias"),
    "qsgd-3-huffman": partial(QSGD, bits=3, coding="huffman"),
    **{f"qsgd-{bits}-linf": partial(QSGD, bits=bits, norm="linf") for bits in (3, 4, 8)},
    "qsgd-3-linf-huffman": partial(QSGD, bits=3, norm="linf", coding="huffman"),
    "qsgd-3-linf-symmetric": partial(QSGD, bits=3, norm="linf", symmetric=True),
    "qsgd-3-symmetric": partial(QSGD, bits=3, symmetric=True),
    "qsgd-4-elias": partial(QSGD, bits=4, coding="elias"),
    "qsgd-4-linf-clip2.5-huffman": partial(QSGD, bits=4, norm="linf", clip=2.5, coding="huffman"),
    "qsgd-4-linf-symmetric-clip2.0": partial(QSGD, bits=4, norm="linf", symmetric=True, clip=2.0),
    "qsgd-s5": partial(QSGD, intervals=5),
    "signsgd": SignSGD,
    **{f"sparse-{d}": partial(SparseSGD, density=d) for d in (0.05, 0.1, 0.2, 0.3, 1.0)},
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


def has_level_zero(label: str) -> bool:
    """Whether the case's levels contain 0, by the papers."""
    if "symmetric" in label or "paper" in label:
        return False
    return label.startswith(("alq", "amq", "qsgd", "nuqsgd", "terngrad", "natural", "sparse"))


def scheme(label: str, **shared: Any) -> Make:
    """Return the case's constructor with more keywords; a call may override them."""
    return partial(CASES[label], **shared)


def schemes(*labels: str, **shared: Any) -> dict[str, Make]:
    return {label: scheme(label, **shared) for label in labels}
