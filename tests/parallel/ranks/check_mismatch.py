"""Ranks that differ fail together, before anything is averaged: every rank tells which keyword,
which value, which rank."""

from __future__ import annotations

import itertools
import time

import horovod.torch as hvd
import pytest
import torch
from scheme_cases import scheme
from training import (
    assert_same_everywhere,
    distributed,
    drain,
    give_up,
    make_model,
    restart,
    take_step,
    train,
    trained,
    wait_for,
)

import hvd_adaptive
from hvd_adaptive import ALQ, QSGD, Hierarchical, Monitor, RankMismatchError, ScatterReduce, Tuning
from hvd_adaptive.hooks.horovod import agreement
from hvd_adaptive.hooks.horovod.placeholder import position
from hvd_adaptive.run import agreement as run_agreement

pytestmark = [pytest.mark.ranks, pytest.mark.gloo]

# Of each case: sessions of equal settings are numbered, and ranks that fail here differ.
SEEDS = itertools.count(5000)


@pytest.fixture(autouse=True)
def settled():
    """Let what a step that failed has in flight come to its end before the next test."""
    yield
    hvd.barrier()


def others() -> str:
    """How all ranks but rank 1 are called."""
    return {1: "rank 0", 3: "ranks 0, 2-3"}[hvd.size() - 1]


def told_everywhere(model, compressor, tries: int = 1) -> str:
    """What the step's error says; the same on every rank, and at each try."""
    optimizer = distributed(model, compressor)
    for _ in range(tries):
        with pytest.raises(RankMismatchError) as caught:
            train(model, optimizer, 1)
        told = str(caught.value)
        assert hvd.allgather_object(told, name="check.told") == [told] * hvd.size()
        restart(optimizer)  # which ends: no placeholder waits for a rank without its parameter
    return told


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("bits", 3, 4),
        ("bucket_size", 8192, 256),
        ("norm", "l2", "linf"),
        ("seed", 3, 2**40),
        ("exchange", "allgather", "scatter_reduce"),
        ("exchange", "auto", "hierarchical"),  # before they measure
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


@pytest.mark.parametrize("label", ["qsgd-3", "qsgd-3-scatter", "orq-5", "onebit", "ecdq-2"])
def test_schemes_of_other_numbers_of_collectives(label):
    exchange = "scatter_reduce" if label.endswith("scatter") else None
    theirs = scheme(label.removesuffix("-scatter"), exchange=exchange)
    compressor = (theirs if hvd.rank() == 1 else ALQ)(seed=next(SEEDS))
    told = told_everywhere(make_model(), compressor)
    name = hvd.broadcast_object(type(compressor).__name__, 1, name="check.scheme")
    assert f"settings: scheme is 'ALQ' on {others()}, '{name}' on rank 1" in told


def test_package_versions(monkeypatch):
    if hvd.rank() == 1:
        monkeypatch.setattr(run_agreement, "__version__", "0.0.1")
    told = told_everywhere(make_model(), ALQ(seed=next(SEEDS)))
    ours = hvd_adaptive.__version__
    assert f"the package version: hvd_adaptive is {ours} on {others()}, 0.0.1 on rank 1" in told
    assert "settings" not in told


def test_all_ranks_compare_or_none():
    monitor = Monitor(compare=True) if hvd.rank() == 1 else Monitor()
    told = told_everywhere(make_model(), QSGD(bits=4, seed=next(SEEDS), monitor=monitor))
    assert f"Monitor(compare=) is False on {others()}, True on rank 1" in told


class Net(torch.nn.Module):
    """A body and heads of given widths."""

    def __init__(self, frozen: bool = False, **heads: int) -> None:
        super().__init__()
        self.body = torch.nn.Linear(100, 20)
        self.body.bias.requires_grad_(not frozen)
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
        ({"a": 10}, {"a": 10, "frozen": True}, "body.bias is float32 [20] on {}, missing on rank"),
    ],
    ids=["missing", "more", "shape", "renamed", "frozen"],
)
def test_parameters(theirs, ours, told):
    """Placeholders of unequal names would wait for each other for ever; so at a second try."""
    model = Net(**(ours if hvd.rank() == 1 else theirs))
    found = told_everywhere(model, QSGD(bits=4, seed=next(SEEDS)), tries=2)
    assert f"parameters: {told.format(others())}" in found


def test_a_rank_without_compression(monkeypatch):
    """It does not answer; Horovod then sees that its gradients are none of ours."""
    monkeypatch.setattr(agreement, "SECONDS", 0.5)
    begin = time.monotonic()
    model, compressor = make_model(), QSGD(bits=4, seed=next(SEEDS))
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


@pytest.mark.parametrize("change", ["set apart", "set alone", "changed in place"])
def test_ranks_that_differ_later(change):
    """In training; also a compressor whose settings are not bound anew."""
    compressor = ALQ(bits=3, seed=next(SEEDS), update_steps=[])
    model, optimizer = trained(compressor, 1)
    connection, told = compressor._training.connection, "bits is 4 on rank 0, "
    if change == "set apart":
        compressor.set(bits=4 + hvd.rank())
    elif change == "set alone" and hvd.rank() == 0:
        compressor.set(bits=4)
    elif change == "changed in place":
        told = f"min_numel is 1024 on {others()}, 7 on rank 1"
        if hvd.rank() == 1:
            compressor.settings.__dict__["min_numel"] = 7
            del compressor.parts.default.settings_fingerprint
    with pytest.raises(RankMismatchError, match=f"disagree on settings: {told}"):
        train(model, optimizer, 1)
    assert compressor._training.connection is connection
    restart(optimizer)


@pytest.mark.parametrize("due", [True, False])
@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
def test_different_update_steps(exchange, due):
    """Tables of averages are due on all ranks at the first step of a scatter-reduce."""
    own = due == (hvd.rank() == 1)
    compressor = ALQ(seed=next(SEEDS), update_steps=[0] if own else [], exchange=exchange)
    theirs, ours = ("not due", "due") if due else ("due", "not due")
    told = told_everywhere(make_model(), compressor)
    assert f"(update_steps) is {theirs} on {others()}, {ours} on rank 1" in told


@pytest.mark.parametrize("keywords", [{}, {"exchange": Hierarchical(ranks_per_node=2)}])
def test_update_steps_that_will_differ(keywords):
    """From the first step on that only some ranks sample for a fit; in a node, that is a
    collective."""
    model, last = make_model(), 30 if hvd.rank() == 1 else 9
    compressor = ALQ(seed=next(SEEDS), update_steps=[last], **keywords)
    optimizer = distributed(model, compressor)
    train(model, optimizer, 2)
    told = f"samples for a fit is due on {others()}, not due on rank 1"
    with pytest.raises(RankMismatchError, match=told):
        train(model, optimizer, 1)


def test_different_steps_and_training_after_them():
    """The step that failed is given up: nothing of it is waited for, or mixed with the next."""
    compressor = ALQ(update_steps=[], seed=next(SEEDS))
    model, optimizer = trained(compressor, 1)
    if hvd.rank() == 0:
        compressor.step += 1
    told = r"disagree on the step: its number is 2 on rank 0, 1 on ranks? 1"
    with pytest.raises(RankMismatchError, match=told):
        train(model, optimizer, 1)
    compressor.step = 1
    give_up(optimizer)
    hvd.barrier()
    train(model, optimizer, 2)
    assert compressor.step == 3
    assert_same_everywhere(model)


def test_a_failing_fit_fails_everywhere():
    """The first rank's exception must not leave the others waiting for its table."""
    model, compressor = make_model(), ALQ(seed=next(SEEDS), bucket_size=512)

    def broken(collected):
        raise FloatingPointError("made to fail")

    compressor.parts.default.refit = broken
    with pytest.raises(RuntimeError, match="could not fit the level table"):
        train(model, distributed(model, compressor), 1)


def test_the_right_compressors_after_a_mismatch():
    """Ranks that differed in bits count no optimizer that never had a step."""
    draws = [torch.Generator().manual_seed(rank) for rank in range(hvd.size())]
    own = [torch.randn(4096, generator=draw) for draw in draws]
    exact = torch.stack(own).double().mean(0)

    def take_steps(bits: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(4096))
        optimizer = distributed({"weight": weight}, QSGD(bits=bits, norm="linf", seed=7))
        for _ in range(2):
            take_step(optimizer, (weight * own[hvd.rank()]).sum())
            assert (weight.grad - exact).norm() <= 0.03 * exact.norm()
            assert_same_everywhere(weight)

    with pytest.raises(RankMismatchError, match="bits is"):
        take_steps(8 - (hvd.rank() == 1))
    for _ in range(2):
        take_steps(8)
