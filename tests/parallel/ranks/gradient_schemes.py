"""Schemes for checks of gradients whose averages are known: a bucket has one value."""

from __future__ import annotations

import pytest
import torch
from scheme_cases import scheme

BUCKET = 64
# Buckets of one value come back exactly, but for ECDQ's dither.
SCHEMES = {
    "alq": scheme("alq-4", update_steps=[0]),
    "qsgd": scheme("qsgd-4-linf"),
    "bingrad": scheme("bingrad"),
    "feedback": scheme("bingrad-biased", error_feedback=1.0),
    "ecdq": scheme("ecdq-variance0.0001", update_steps=[0]),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def make(scheme: str, **keywords):
    return SCHEMES[scheme](**{"bucket_size": BUCKET, "min_numel": 2} | keywords)


def assert_average(gradient: torch.Tensor, value: float) -> None:
    """All coordinates are ``value``, within the rounding of bfloat16 and half a step of ECDQ's."""
    expected = torch.full(gradient.shape, value, dtype=torch.float64)
    torch.testing.assert_close(gradient.double(), expected, rtol=0.03, atol=0.0)
