"""EDEN inside stock Horovod: averages against tests/oracle/rotated.py, equal replicas, no bias."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from conftest import assert_same_everywhere
from scheme_cases import scheme

from hvd_adaptive import ScatterReduce

from oracle import rotated  # isort: skip

pytestmark = pytest.mark.ranks

BUCKET, STEPS = 256, 16
CASES = [(1, None), (0.5, None), (3, None), (6, None), (2, 5)]
LAWS = ("normal", "one-hot")


def options(second: int | None) -> dict[str, object]:
    if second is None:
        return {"exchange": "allgather"}
    return {"exchange": ScatterReduce(second_stage_bits=second)}


def gradient(law: str, count: int) -> torch.Tensor:
    """The same on all ranks."""
    if law == "normal":
        return torch.randn(count, generator=torch.Generator().manual_seed(5))
    out = torch.zeros(count)
    out[3::BUCKET] = 1.0
    return out


@pytest.mark.parametrize(("bits", "second"), CASES)
def test_averages_are_those_of_the_paper(bits, second):
    """Up to float32's rounding."""
    vectors = []
    for rank in range(hvd.size()):
        own = torch.randn(2 * BUCKET * hvd.size(), generator=torch.Generator().manual_seed(rank))
        own *= torch.linspace(0.01, 3, own.numel()) ** 3
        vectors.append(own)
    compressor = scheme(f"eden-{bits}", bucket_size=BUCKET, seed=17, **options(second))()
    result = hvd.allreduce(
        vectors[hvd.rank()], compression=compressor, op=hvd.Average, name="check_eden.average"
    )
    expected = rotated.average([v.numpy() for v in vectors], bits, second, BUCKET, seed=17)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-5 * np.abs(expected).max())
    assert_same_everywhere(result, "average")


@pytest.mark.parametrize("second", (None, 5))
@pytest.mark.parametrize("law", LAWS)
def test_equal_gradients_have_a_mean_without_bias(law, second):
    """The squared error of the average is 1/N of a rank's; that of T steps' mean is 1/T of it."""
    x = gradient(law, 16 * BUCKET)
    compressor = scheme("eden-2", bucket_size=BUCKET, seed=3, **options(second))()
    total, errors = torch.zeros_like(x), []
    for step in range(STEPS):
        result = hvd.allreduce(
            x, compression=compressor, op=hvd.Average, name=f"check_eden.mean.{step}"
        )
        errors.append(((result - x).square().sum() / x.square().sum()).item())
        total += result
        assert_same_everywhere(result, "mean")
    first = rotated.lost(2) / hvd.size()
    expected = first if second is None else first + (1 + first) * rotated.lost(second)
    # An error has about 16 * 256 free dimensions: sqrt(2/4096) = 2 %. A one-hot bucket's rotated
    # coordinates are sums of signs, whose error differs by a few per cent.
    assert np.mean(errors) == pytest.approx(expected, rel=0.1)
    left = ((total / STEPS - x).square().sum() / x.square().sum()).item()
    assert left == pytest.approx(expected / STEPS, rel=0.25)
