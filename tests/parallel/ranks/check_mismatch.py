"""Ranks constructed differently: every rank tells which keyword, which value, which rank."""

from __future__ import annotations

import itertools
import time

import horovod.torch as hvd
import pytest
import torch
from conftest import make_model, train, wait_for
from rank_optimizers import distributed, drain

import hvd_adaptive
from hvd_adaptive import (
    ALQ,
    ECDQ,
    ORQ,
    QSGD,
    BinGrad,
    Hierarchical,
    RankMismatchError,
    ScatterReduce,
    Tuning,
)
from hvd_adaptive.hooks.horovod import agreement
from hvd_adaptive.hooks.horovod.placeholder import position
from hvd_adaptive.run import agreement as run_agreement

pytestmark = [pytest.mark.ranks, pytest.mark.gloo]

SEEDS = itertools.count(5000)


def others() -> str:
    """How all ranks but rank 1 are called."""
    return {1: "rank 0", 3: "ranks 0, 2-3"}[hvd.size() - 1]


def told_everywhere(model, compressor) -> str:
    """What the step's error says; the same on every rank."""
    optimizer = distributed(model, compressor)
    with pytest.raises(RankMismatchError) as caught:
        train(model, optimizer, 1)
    told = str(caught.value)
    assert hvd.allgather_object(told, name="check.told") == [told] * hvd.size()
    drain(optimizer)  # which ends: no placeholder waits for a rank that does not have its parameter
    return told


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("bits", 3, 4),
        ("bucket_size", 8192, 256),
        ("norm", "l2", "linf"),
        ("seed", 3, 2**40),
        ("exchange", "allgather", "scatter_reduce"),
        ("coding", "fixed", "huffman"),
        ("min_numel", 1024, 0),
        ("tail", "quantize", "full"),
        ("error_feedback", None, 0.5),
        ("parameter_bits", None, {"0.*": 4}),
        ("fusion_bytes", 2**24, 4096),
        ("clip", None, 2.5),
        ("warmup_steps", 0, 1),
        ("exchange", ScatterReduce(second_stage_bits=4), ScatterReduce(second_stage_bits=5)),
        ("exchange", Hierarchical(ranks_per_node=1), Hierarchical(ranks_per_node=2)),
        ("tuning", Tuning(), Tuning(in_flight_bytes=2**28)),
        ("tuning", Tuning(checksum=False), Tuning()),
        ("samples", 20, 10),
    ],
)
def test_a_keyword(name, theirs, ours):
    seed = {} if name == "seed" else {"seed": next(SEEDS)}
    told = told_everywhere(make_model(), ALQ(**seed | {name: ours if hvd.rank() == 1 else theirs}))
    assert f"disagree on settings: {name} is {theirs!r} on {others()}, {ours!r} on rank 1" in told
    assert told.count(" is ") == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: QSGD(bits=3, **k),
        lambda **k: QSGD(bits=3, exchange="scatter_reduce", **k),
        lambda **k: ORQ(levels=5, **k),
        lambda **k: BinGrad(error_feedback=1.0, **k),
        lambda **k: ECDQ(bits=2, **k),
    ],
    ids=["qsgd", "qsgd-scatter", "orq", "bingrad", "ecdq"],
)
def test_schemes_of_other_numbers_of_collectives(make):
    seed = next(SEEDS)
    compressor = make(seed=seed) if hvd.rank() == 1 else ALQ(seed=seed)
    told = told_everywhere(make_model(), compressor)
    scheme = hvd.broadcast_object(type(compressor).__name__, 1, name="check.scheme")
    assert f"settings: scheme is 'ALQ' on {others()}, '{scheme}' on rank 1" in told


def test_package_versions(monkeypatch):
    if hvd.rank() == 1:
        monkeypatch.setattr(run_agreement, "__version__", "0.0.1")
    told = told_everywhere(make_model(), ALQ(seed=next(SEEDS)))
    ours = hvd_adaptive.__version__
    assert f"the package version: hvd_adaptive is {ours} on {others()}, 0.0.1 on rank 1" in told
    assert "settings" not in told


class Net(torch.nn.Module):
    """A body and heads of given widths."""

    def __init__(self, **heads: int) -> None:
        super().__init__()
        self.body = torch.nn.Linear(100, 20)
        self.heads = torch.nn.ModuleDict({k: torch.nn.Linear(20, n) for k, n in heads.items()})

    def forward(self, x):
        return torch.cat([head(self.body(x)) for head in self.heads.values()], 1)


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ({"a": 10, "b": 4}, {"a": 10}, "heads.b.bias is float32 [4] on {}, missing on rank 1"),
        ({"a": 10}, {"a": 10, "c": 4}, "heads.c.bias is missing on {}, float32 [4] on rank 1"),
        ({"a": 10}, {"a": 12}, "heads.a.bias is float32 [10] on {}, float32 [12] on rank 1"),
        ({"a": 10}, {"z": 10}, "heads.a.bias is float32 [10] on {}, missing on rank 1"),
    ],
    ids=["missing", "more", "shape", "renamed"],
)
def test_parameters(theirs, ours, told):
    """Placeholders of unequal names would wait for each other for ever."""
    model = Net(**(ours if hvd.rank() == 1 else theirs))
    assert told.format(others()) in told_everywhere(model, QSGD(bits=4, seed=next(SEEDS)))


def test_a_frozen_parameter():
    model = Net(a=10)
    model.body.bias.requires_grad_(hvd.rank() != 1)
    told = told_everywhere(model, QSGD(bits=4, seed=next(SEEDS)))
    assert f"parameters: body.bias is float32 [20] on {others()}, missing on rank 1" in told


def test_a_rank_without_compression(monkeypatch):
    """It does not answer; Horovod then sees that its gradients are none of ours."""
    monkeypatch.setattr(agreement, "SECONDS", 0.5)
    begin = time.monotonic()
    model = make_model()
    compressor = QSGD(bits=4, seed=next(SEEDS))
    optimizer = distributed(model, hvd.Compression.none if hvd.rank() == 1 else compressor)
    with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="Mismatched"):
        train(model, optimizer, 1)
    assert time.monotonic() - begin < 10  # no hook waited
    drain(optimizer)
    if hvd.rank() == 1:  # the answer that the others' workers wait for
        hvd.allreduce(position(1, 0, 0, 0), op=hvd.Sum, name="hvd_adaptive.agreement.0.bias")
    else:
        drive = compressor._training.connection.drive
        wait_for(drive.over.is_set)
        assert isinstance(drive.error, RankMismatchError)  # without words: rank 1 has none
    hvd.barrier()


def test_a_second_try_fails_alike():
    """Ranks meet anew, and nobody waits for the parameters of others."""
    model = Net(**({"a": 10} if hvd.rank() == 1 else {"a": 10, "b": 4}))
    optimizer = distributed(model, QSGD(bits=4, seed=next(SEEDS)))
    for _ in range(2):
        with pytest.raises(RankMismatchError, match=r"parameters: heads\.b\.bias is"):
            train(model, optimizer, 1)
        drain(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # drops Horovod's handles


def test_ranks_that_differ_later():
    """A compressor that is replaced on one rank alone, in training."""
    model, seed = make_model(), next(SEEDS)
    optimizer = distributed(model, QSGD(bits=4, seed=seed))
    train(model, optimizer, 1)
    session = optimizer._compression._training.connection
    if hvd.rank() == 1:
        optimizer._compression.settings.__dict__["min_numel"] = 7
        del optimizer._compression.parts.default.settings_fingerprint
    with pytest.raises(RankMismatchError, match=f"min_numel is 1024 on {others()}, 7 on rank 1"):
        train(model, optimizer, 1)
    assert session is optimizer._compression._training.connection
    drain(optimizer)
