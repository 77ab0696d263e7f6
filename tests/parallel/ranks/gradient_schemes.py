"""Schemes for checks of gradients whose averages are known: a bucket has one value."""

from __future__ import annotations

import pytest
import torch

from hvd_adaptive import ALQ, ECDQ, QSGD, BinGrad

BUCKET = 64
# Buckets of one value come back exactly, but for ECDQ's dither.
SCHEMES = {
    "alq": lambda **k: ALQ(bits=4, norm="linf", update_steps=[0], **k),
    "qsgd": lambda **k: QSGD(bits=4, norm="linf", **k),
    "bingrad": lambda **k: BinGrad(**k),
    "feedback": lambda **k: BinGrad(variant="biased", error_feedback=1.0, **k),
    "ecdq": lambda **k: ECDQ(relative_variance=1e-4, update_steps=[0], **k),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def make(scheme: str, **keywords):
    return SCHEMES[scheme](**{"bucket_size": BUCKET, "min_numel": 2} | keywords)


def assert_average(gradient: torch.Tensor, value: float) -> None:
    """All coordinates are ``value``, within the rounding of bfloat16 and half a step of ECDQ's."""
    expected = torch.full(gradient.shape, value, dtype=torch.float64)
    torch.testing.assert_close(gradient.double(), expected, rtol=0.03, atol=0.0)
