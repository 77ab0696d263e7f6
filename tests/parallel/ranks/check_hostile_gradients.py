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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_kind_on_one_rank_and_on_all(scheme):
    """Two buckets of each kind: in the first only the last rank has it."""
    own = [[kind if is_last() else normal(hvd.rank()), kind] for kind in KINDS.values()]
    flat = torch.cat([bucket for pair in own for bucket in pair])
    result = hvd.allreduce(flat, compression=make(scheme), name=f"hostile.{scheme}")
    assert_same_everywhere(result)
    for name, (one, every) in zip(KINDS, result.view(-1, 2, BUCKET), strict=True):
        if name in HUGE and scheme.startswith(("eden", "drive")):
            continue  # sums inside the inverse rotation may exceed float32
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


@pytest.mark.parametrize("exchange", ["scatter_reduce", Hierarchical(ranks_per_node=1)], ids=str)
@pytest.mark.parametrize("scheme", ["alq-3", "qsgd-3", "bingrad", "ecdq-3", "qsgd-3-linf"])
def test_two_lossy_stages(scheme, exchange):
    kinds = NOT_FINITE | ZEROS | FINITE
    flat = [kind if is_last() else normal(hvd.rank()) for kind in kinds.values()]
    flat = torch.cat([*flat, torch.zeros(BUCKET)])
    compressor = make(scheme, exchange=exchange)
    result = hvd.allreduce(flat, compression=compressor, name=f"two_stages.{scheme}")
    assert_same_everywhere(result)
    *buckets, zeros = result.view(-1, BUCKET)
    for name, bucket in zip(kinds, buckets, strict=True):
        assert bucket.isnan().all() if name in NOT_FINITE else bucket.isfinite().all(), name
    assert not zeros.any()


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


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_coordinate_reaches_every_rank_in_every_dtype(dtype, value):
    """And nobody else's bucket; coordinates in full precision keep it to themselves."""
    flat = torch.ones(3 * BUCKET, dtype=dtype)
    if is_last():
        flat[BUCKET + 9] = value
    compressor = make("alq-8-symmetric")
    result = hvd.allreduce(flat, compression=compressor, name=f"one.{dtype}.{value}")
    assert result.dtype == dtype and result[BUCKET : 2 * BUCKET].isnan().all()
    rest = torch.cat([result[:BUCKET], result[2 * BUCKET :]])
    torch.testing.assert_close(rest, torch.ones_like(rest), rtol=0.01, atol=0)
    small = flat[BUCKET : BUCKET + 20].contiguous()
    compressor = SCHEMES["alq-3"](bucket_size=BUCKET, min_numel=21)
    lost = ~hvd.allreduce(small, compression=compressor, name=f"few.{dtype}.{value}").isfinite()
    assert lost.nonzero().tolist() == [[9]]
