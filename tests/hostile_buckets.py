"""Buckets that training should not make but does, and every scheme of the package."""

from __future__ import annotations

import torch
from scheme_cases import EVERY, scheme, schemes

BUCKET = 64
SCHEMES = schemes(
    *EVERY,
    *("alq-3-clip2.5", "alq-3-paper", "alq-8-symmetric", "bingrad-biased", "ecdq-variance0.01"),
    *("qcs-mmse-gain10", "qsgd-3-elias", "qsgd-3-linf", "qsgd-3-linf-huffman"),
) | {"qcs-one-bit": scheme("qcs-range1", measurements=BUCKET)}
# Their scale is no L2 norm, deviation or multiple of the largest, so none can overflow.
WIDE = {
    *("qsgd-3-linf", "qsgd-3-linf-huffman", "alq-3", "alq-8-symmetric", "amq-3", "orq-5"),
    *("quantile-5", "bingrad", "bingrad-biased", "signsgd", "onebit-no-feedback", "natural"),
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
