"""What FSDP's functions refuse; tests/parallel/ddp/check_fsdp.py has several ranks."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_adaptive import ALQ, EDEN, QSGD, OneBitSGD
from hvd_adaptive.checkpoint import packed
from hvd_adaptive.fsdp import _factor_of, compress_all_reduce, compress_reduce_scatter


@pytest.fixture
def model(alone):
    """A sharded model of one rank."""
    return fully_shard(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("compressor", "told"),
    [
        (lambda: ALQ, "compressor=ALQ: is a class"),
        (lambda: ALQ(error_feedback=1.0), "error_feedback=1.0: must be None with FSDP"),
        (lambda: OneBitSGD(), "error_feedback=1.0: must be None with FSDP"),
        (
            lambda: ALQ(exchange="allgather"),
            "exchange='allgather': must be one of None, .*FSDP",
        ),
        (lambda: ALQ(process_set=Mock()), "process_set: must be None"),
    ],
)
def test_compressors(model, compressor, told):
    with pytest.raises(ValueError, match=told):
        compress_reduce_scatter(model, compressor())


def test_a_compressor_serves_one_model(model):
    compressor = EDEN(bits=4)
    compress_reduce_scatter(model, compressor)
    with pytest.raises(ValueError, match="already serves"):
        compress_reduce_scatter(model, compressor)
    with pytest.raises(RuntimeError, match="serves a model of FSDP"):
        compressor.compress(torch.ones(3))


def test_models(model):
    with pytest.raises(ValueError, match="fully_shard has sharded none of its modules"):
        compress_reduce_scatter(nn.Linear(3, 3), QSGD(bits=4))
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module, not generator"):
        compress_reduce_scatter(model.parameters(), QSGD(bits=4))
    with pytest.raises(ValueError, match=r"hook of its own: model\.register_comm_hook\("):
        compress_reduce_scatter(DistributedDataParallel(nn.Linear(3, 3)), QSGD(bits=4))
    old = FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"\(FSDP1\) is not supported; shard the model by"):
        compress_reduce_scatter(old, QSGD(bits=4))
    with pytest.raises(ValueError, match="group: must be a process group, not str"):
        compress_all_reduce(model, QSGD(bits=4), "gloo")


@pytest.mark.parametrize("method", ["set_custom_reduce_scatter", "set_all_reduce_hook"])
def test_older_torch(model, method, monkeypatch):
    monkeypatch.delattr(FSDPModule, method)
    group = dist.group.WORLD
    with pytest.raises(RuntimeError, match=rf"needs a newer torch: .* has no FSDPModule\.{method}"):
        if method == "set_all_reduce_hook":
            compress_all_reduce(model, QSGD(bits=4), group)
        else:
            compress_reduce_scatter(model, QSGD(bits=4))


def test_one_rank_trains(model):
    """It sends nothing."""
    compressed = compress_reduce_scatter(model, ALQ(bits=2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert compressed.compressor.step == 0


def test_operations():
    assert _factor_of(dist.ReduceOp.AVG, 4) == 0.25
    assert _factor_of(dist.ReduceOp.SUM, 4) == 1.0
    assert _factor_of(dist.ReduceOp.PREMUL_SUM(0.2), 4) == 0.2
    with pytest.raises(ValueError, match="must be AVG, SUM or PREMUL_SUM"):
        _factor_of(dist.ReduceOp.MAX, 4)


def test_states_of_others(model):
    compressed = compress_reduce_scatter(model, ALQ(bits=2))
    state = compressed.state_dict()
    with pytest.raises(ValueError, match="no entry 'compressor'"):
        compressed.load_state_dict({})
    with pytest.raises(ValueError, match="must be bytes, not dict"):
        compressed.load_state_dict({"compressor": {}})
    earlier = {"compressor": packed([compressed.compressor.state_dict()])}
    with pytest.raises(ValueError, match=r"must hold \(ranks, state\) of each rank"):
        compressed.load_state_dict(earlier)
    compressed.load_state_dict(state)
    other = compress_reduce_scatter(fully_shard(nn.Linear(3, 3)), QSGD(bits=2))
    with pytest.raises(ValueError, match="scheme 'alq', not 'qsgd'"):
        other.load_state_dict(state)


def test_models_are_freed_in_a_step_of_another_optimizer(model):
    """The garbage collector may run while torch calls the hooks of steps."""
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    handle = register_optimizer_step_pre_hook(lambda *of: gc.collect() and None)
    freed = weakref.ref(compress_reduce_scatter(fully_shard(nn.Linear(3, 3)), QSGD(bits=2)))
    try:
        assert freed() is not None
        other(torch.ones(2)).sum().backward()
        optimizer.step()
    finally:
        handle.remove()
    assert freed() is None
