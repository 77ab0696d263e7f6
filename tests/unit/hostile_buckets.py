"""Buckets that training should not make but does, and every scheme of the package."""

from __future__ import annotations

import torch

from hvd_adaptive import (
    ALQ,
    AMQ,
    ECDQ,
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

BUCKET = 64
SCHEMES = {
    "qsgd": lambda **k: QSGD(bits=3, **k),
    "qsgd_linf": lambda **k: QSGD(bits=3, norm="linf", **k),
    "qsgd_huffman": lambda **k: QSGD(bits=3, norm="linf", coding="huffman", **k),
    "qsgd_elias": lambda **k: QSGD(bits=3, coding="elias", **k),
    "nuqsgd": lambda **k: NUQSGD(bits=3, **k),
    "terngrad": lambda **k: TernGrad(**k),
    "alq": lambda **k: ALQ(bits=3, **k),
    "alq_linf": lambda **k: ALQ(bits=8, norm="linf", **k),
    "alq_clipped": lambda **k: ALQ(bits=3, clip=2.5, **k),
    "amq": lambda **k: AMQ(bits=3, **k),
    "orq": lambda **k: ORQ(levels=5, **k),
    "quantile": lambda **k: LinearQuantile(levels=5, **k),
    "bingrad": lambda **k: BinGrad(**k),
    "bingrad_biased": lambda **k: BinGrad(variant="biased", **k),
    "signsgd": lambda **k: SignSGD(**k),
    "onebit": lambda **k: OneBitSGD(error_feedback=None, **k),
    "natural": lambda **k: NaturalCompression(**k),
    "qcs": lambda **k: QCS(gain=10, **k),
    "qcs_mmse": lambda **k: QCS(gain=10, estimator="mmse", **k),
    "qcs_one_bit": lambda **k: QCS(measurements=BUCKET, quantizer_range=1, **k),
    "sparse": lambda **k: SparseSGD(density=0.2, **k),
    "ecdq": lambda **k: ECDQ(bits=3, **k),
    "ecdq_variance": lambda **k: ECDQ(relative_variance=0.01, **k),
}
# Their scale is no L2 norm, deviation or multiple of the largest, so none can overflow.
WIDE = {
    "qsgd_linf",
    "qsgd_huffman",
    "alq_linf",
    "orq",
    "quantile",
    "bingrad",
    "bingrad_biased",
    "signsgd",
    "onebit",
    "natural",
}


def make(scheme: str, **keywords):
    return SCHEMES[scheme](bucket_size=BUCKET, min_numel=0, **keywords)


def normal(seed: int = 0) -> torch.Tensor:
    return torch.randn(BUCKET, generator=torch.Generator().manual_seed(seed))


def with_value(value: float, at: int = 7) -> torch.Tensor:
    bucket = normal()
    bucket[at] = value
    return bucket


NOT_FINITE = {
    "nan": with_value(float("nan")),
    "inf": with_value(float("inf")),
    "minus_inf": with_value(-float("inf")),
    "two_infs": torch.cat([with_value(float("inf"))[:32], with_value(-float("inf"))[:32]]),
    "all_nan": torch.full((BUCKET,), float("nan")),
}
ZEROS = {"zeros": torch.zeros(BUCKET), "minus_zeros": -torch.zeros(BUCKET)}
# Below float32's normal range, 1.2e-38.
DENORMAL = {"denormal": normal() * 1e-40, "least": torch.full((BUCKET,), 1e-45)}
HUGE = {
    "constant_1e38": torch.full((BUCKET,), 1e38),
    "largest": torch.full((BUCKET,), torch.finfo(torch.float32).max),
}
FINITE = {
    "constant": torch.full((BUCKET,), -0.37),
    "one_hot": torch.eye(BUCKET)[3],
    "outlier": with_value(1e30),
    "small": normal() * 1e-36,
    "large": normal() * 1e36,
}
