"""First stages that lose nothing: the second one must not, either."""

from __future__ import annotations

import pytest
import torch
from test_exchanges import averaged

from hvd_adaptive import (
    NUQSGD,
    ORQ,
    QSGD,
    BinGrad,
    LinearQuantile,
    OneBitSGD,
    SignSGD,
    SparseSGD,
    TernGrad,
)
from hvd_adaptive.exchange.second_stage import FULL_PRECISION, default_bits

# Each coordinate is its own bucket, and so its own scale; or all of them are sent.
LOSSLESS = {
    "sparse": lambda **k: SparseSGD(density=1.0, **k),
    "sparse-1": lambda **k: SparseSGD(density=1.0, bucket_size=1, **k),
    "qsgd": lambda **k: QSGD(bits=3, bucket_size=1, **k),
    "qsgd-linf": lambda **k: QSGD(bits=3, bucket_size=1, norm="linf", **k),
    "nuqsgd": lambda **k: NUQSGD(bits=3, bucket_size=1, **k),
    "terngrad": lambda **k: TernGrad(bucket_size=1, **k),
    "orq": lambda **k: ORQ(levels=5, bucket_size=1, **k),
    "linear": lambda **k: LinearQuantile(levels=5, bucket_size=1, **k),
    "bingrad": lambda **k: BinGrad(bucket_size=1, **k),
    "signsgd": lambda **k: SignSGD(bucket_size=1, **k),
    "onebit": lambda **k: OneBitSGD(bucket_size=1, error_feedback=None, **k),
}


@pytest.mark.parametrize("exchange", ["scatter_reduce", "hierarchical"])
@pytest.mark.parametrize("scheme", LOSSLESS)
def test_averages_are_exact(scheme, exchange):
    """On 6 ranks, on 3 nodes of 2."""
    compressor = LOSSLESS[scheme](exchange=exchange, ranks_per_node=2)
    exact, found = averaged(compressor, 6)
    for want, got in zip(exact, found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", LOSSLESS)
def test_second_stage_is_in_full_precision(scheme):
    for ranks in (2, 5):
        assert default_bits(LOSSLESS[scheme](), ranks) == FULL_PRECISION


def test_a_little_loss_is_not_none():
    """One coordinate in a hundred is lost by chance: 8 bits, and a warning, as before."""
    assert default_bits(SparseSGD(density=0.99), 4) == 8
