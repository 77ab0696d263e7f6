"""EDEN inside stock Horovod: averages against tests/oracle/rotated.py."""

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

BUCKET = 256
CASES = [(1, None), (0.5, None), (3, None), (6, None), (2, 5)]


def options(second: int | None) -> dict[str, object]:
    if second is None:
        return {"exchange": "allgather"}
    return {"exchange": ScatterReduce(second_stage_bits=second)}


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
