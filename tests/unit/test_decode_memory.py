"""What is decoded does not depend on what lay in memory before."""

from __future__ import annotations

import pytest
import torch
from hostile_buckets import BUCKET, SCHEMES, make

from hvd_adaptive.coding.payload import read_header

COORDINATES = 3 * BUCKET + 100


def payloads_of(scheme, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two ranks', a full-precision section and a zero bucket in each."""
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(2, COORDINATES + 50, generator=generator)
    gradients[:, BUCKET : 2 * BUCKET] = 0
    return [
        scheme.parts.default.payloads.encode(g.to(dtype), COORDINATES, key).bytes
        for key, g in enumerate(gradients)
    ]


@pytest.mark.many
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_old_contents_of_memory_are_overwritten(name, dtype):
    scheme = make(name)
    payloads = payloads_of(scheme, dtype)
    expected = read_header(payloads[0])
    out = torch.full((expected.coordinates,), float("nan"), dtype=dtype)
    scheme.parts.default.payloads.sum_into(
        payloads, expected, 0.5, out[:COORDINATES], out[COORDINATES:]
    )
    bodies = torch.zeros(COORDINATES)
    opened = list(map(scheme.parts.default.payloads.form(expected).open, payloads))
    scheme.parts.default.payloads.add(opened, 0.5, bodies)
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    assert torch.equal(out[:COORDINATES].view(bits), bodies.to(dtype).view(bits))
    full = 0.5 * sum(payload.full for payload in opened)
    assert torch.equal(out[COORDINATES:], full)
    assert torch.equal(scheme.parts.default.payloads.sum_wide(payloads, expected, 0.5), out)
