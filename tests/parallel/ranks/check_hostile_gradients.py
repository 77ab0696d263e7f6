"""Gradients that are not finite, zero, denormal, huge, constant or one outlier, on one rank or all:
the same result on every rank, for every scheme of the package."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from hostile_buckets import (
    BUCKET,
    DENORMAL,
    FINITE,
    HUGE,
    NOT_FINITE,
    SCHEMES,
    WIDE,
    ZEROS,
    make,
    normal,
)
from training import assert_same_everywhere, distributed

from hvd_adaptive import Hierarchical, ScatterReduce

KINDS = NOT_FINITE | ZEROS | DENORMAL | HUGE | FINITE


def is_last() -> bool:
    return hvd.rank() == hvd.size() - 1


EXCHANGES = {"allgather": "allgather", "scatter_reduce": "scatter_reduce"}
EXCHANGES["nodes of one"] = Hierarchical(ranks_per_node=1)
LOSSY_TWICE = ["alq-3", "qsgd-3", "bingrad", "ecdq-3", "qsgd-3-linf"]


@pytest.mark.parametrize(
    ("scheme", "exchange"),
    [
        *((scheme, "allgather") for scheme in SCHEMES),
        *((scheme, name) for scheme in LOSSY_TWICE for name in list(EXCHANGES)[1:]),
    ],
)
def test_every_kind_on_one_rank_and_on_all(scheme, exchange):
    """Two buckets of each kind: in the first only the last rank has it."""
    own = [[kind if is_last() else normal(hvd.rank()), kind] for kind in KINDS.values()]
    flat = torch.cat([bucket for pair in own for bucket in pair])
    compressor = make(scheme, exchange=EXCHANGES[exchange])
    result = hvd.allreduce(flat, compression=compressor, name=f"hostile.{scheme}.{exchange}")
    assert_same_everywhere(result)
    for name, (one, every) in zip(KINDS, result.view(-1, 2, BUCKET), strict=True):
        if name in HUGE and (scheme.startswith(("eden", "drive")) or exchange != "allgather"):
            continue  # sums inside the inverse rotation, or of ranks, may exceed float32
        if name in NOT_FINITE or (name in HUGE and scheme not in WIDE):
            assert one.isnan().all() and every.isnan().all(), name
        elif name == "largest":  # the sum over ranks is beyond float32
            assert one.isfinite().all() and every.isinf().all(), name
        elif name == "constant_1e38":
            assert one.isfinite().all() and not every.isnan().any(), name
        else:
            assert one.isfinite().all() and every.isfinite().all(), name
        if name in ZEROS:
            assert one.any() and not every.any(), name
        if name in DENORMAL:
            assert every.abs().max() < 1e-38, name


@pytest.mark.parametrize("scheme", ["alq-3", "ecdq-3", "alq-8-symmetric"])
@pytest.mark.parametrize("exchange", ["allgather", ScatterReduce(second_stage_bits=8)], ids=str)
def test_a_nan_in_every_step_hinders_no_fit(scheme, exchange):
    """A script that replaces NaN has no scaler that skips a step: every step is applied."""
    model = torch.nn.Linear(BUCKET, 32, bias=False)
    compressor = make(scheme, exchange=exchange, update_steps=[0, 1, 7])
    optimizer = distributed(model, compressor, lr=1e-3)
    hole = torch.ones(32, BUCKET)
    hole[3, 5] = torch.nan
    if hvd.rank() == 0:
        model.weight.register_hook(lambda gradient: gradient * hole)
    for step in range(9):
        optimizer.zero_grad()
        model(normal(100 * step + hvd.rank())[None]).square().sum().backward()
        optimizer.synchronize()
        average = model.weight.grad
        assert average.isnan().any(1).tolist() == [row == 3 for row in range(32)]
        torch.nan_to_num_(average)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert compressor.report()["table_version"] == 1 + (step >= 1) + (step >= 7)
        assert compressor.report()["non_finite"] == 1
    assert_same_everywhere(model)
