"""Every scheme of the package at every rate it has, for rate_curve.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_adaptive import (
    ALQ,
    AMQ,
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
from hvd_adaptive.compressor import GradientCompressor

BUCKET = 8192
BITS = (2, 3, 4, 5, 6, 7, 8)
LEVELS = (3, 5, 9, 17, 33, 65)
GAINS = (4, 5, 6, 8, 10, 13, 16, 20, 27)
DENSITIES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
EDEN_BITS = (0.125, 0.25, 0.5, 1, 2, 3, 4, 5, 6, 7, 8)
ECDQ_BITS = (0.5, 0.75, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 8.5)


@dataclass(frozen=True)
class Family:
    """A scheme with one free parameter. unbiased: for every gradient, nothing clipped."""

    name: str
    unbiased: bool
    make: Callable[..., GradientCompressor]
    keyword: str | None
    values: Sequence[Any]
    others: dict[str, Any]

    @property
    def label(self) -> str:
        """What it is measured with."""
        return f"{self.name}: {self.keyword} {list(self.values)} {self.others}"

    def members(self) -> list[GradientCompressor]:
        """One compressor for each value."""
        own = [{self.keyword: value} for value in self.values] if self.keyword else [{}]
        shared = {"bucket_size": BUCKET, "keep_zeros": False}
        return [self.make(**each, **self.others, **shared) for each in own]


def _coded(
    name: str,
    unbiased: bool,
    make: Callable,
    keyword: str | None,
    values: Sequence[Any],
    codings: Sequence[str],
    **others: Any,
) -> list[Family]:
    """The family with fixed width, and again with each lossless coder."""
    plain = Family(name, unbiased, make, keyword, values, others)
    again = [
        Family(f"{name}, {c.capitalize()}", unbiased, make, keyword, values, others | {"coding": c})
        for c in codings
    ]
    return [plain, *again]


HUFFMAN, BOTH = ("huffman",), ("huffman", "elias")
FAMILIES: list[Family] = [
    Family("ECDQ", True, ECDQ, "bits", ECDQ_BITS, {}),
    # Its bias, of the order ||v||/n, is far below its error (docs/theory.md).
    Family("EDEN", True, EDEN, "bits", EDEN_BITS, {}),
    *_coded("ALQ", True, ALQ, "bits", BITS, HUFFMAN, symmetric=True, norm="l2"),
    *_coded("ALQ with zero", True, ALQ, "bits", BITS, HUFFMAN, symmetric=False, norm="l2"),
    *_coded("ALQ L∞ with zero", True, ALQ, "bits", BITS, HUFFMAN, symmetric=False, norm="linf"),
    *_coded("AMQ", True, AMQ, "bits", BITS, HUFFMAN, symmetric=True, norm="l2"),
    *_coded("NUQSGD", True, NUQSGD, "bits", BITS, BOTH),
    *_coded("QSGD", True, QSGD, "bits", BITS, BOTH),
    *_coded("QSGD L∞", True, QSGD, "bits", BITS, HUFFMAN, norm="linf"),
    *_coded("TernGrad, not clipped", True, TernGrad, None, (), HUFFMAN, clip=None),
    Family("ORQ", True, ORQ, "levels", LEVELS, {}),
    Family("LinearQuantile", True, LinearQuantile, "levels", LEVELS, {}),
    Family("NaturalCompression", True, NaturalCompression, None, (), {}),
    Family("SparseSGD", True, SparseSGD, "density", DENSITIES, {}),
    Family("QCS", True, QCS, "gain", GAINS, {}),
    *_coded("TernGrad, clipped at 2.5 σ", False, TernGrad, None, (), HUFFMAN),
    Family("QCS, MMSE", False, QCS, "gain", GAINS, {"estimator": "mmse"}),
    Family("BinGrad", False, BinGrad, "variant", ("partially_biased", "biased"), {}),
    Family("SignSGD", False, SignSGD, None, (), {}),
    Family("OneBitSGD", False, OneBitSGD, None, (), {"error_feedback": None}),
]
