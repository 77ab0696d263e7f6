"""What elastic Horovod's handler keeps, gives back and shares, without Horovod."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from feedback_steps import OneRank, gradients

from hvd_adaptive import ALQ, ECDQ
from hvd_adaptive.changes import begin_step
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.hooks.horovod import binding
from hvd_adaptive.hooks.horovod.elastic import CompressorStateHandler, with_own, without_own

SIZES = [700, 30, 450]


def make(**keywords) -> ALQ:
    return ALQ(bucket_size=64, min_numel=100, error_feedback=0.5, **keywords)


@pytest.fixture
def horovod(monkeypatch):
    """A stand-in for Horovod with one broadcast: what rank 0 sends is set by the test."""
    hvd = SimpleNamespace(sent=None)
    hvd.broadcast_object = lambda own, root, name: own if hvd.sent is None else hvd.sent
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=hvd))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    return hvd


def test_a_compressor_registers_its_handler_once(monkeypatch):
    registry = [("model", "handler")]

    def replace(entries):
        registry[:] = entries

    module = SimpleNamespace(get_handler_registry=lambda: registry, set_handler_registry=replace)
    monkeypatch.setitem(sys.modules, "horovod.torch.elastic.state", module)
    ALQ(), ECDQ(bits=2)
    assert registry == [(GradientCompressor, CompressorStateHandler), ("model", "handler")]


def test_restore_goes_back_to_what_was_saved(caplog):
    """Residuals are this process's own, whatever its rank will be."""
    rank = OneRank(make(schedule={3: {"bits": 4}}.get), SIZES, rank_info=(1, 4))
    rank.compressor.fit(gradients(SIZES, 9))
    for step in range(2):
        rank.step(gradients(SIZES, step))
    handler = CompressorStateHandler(rank.compressor)
    levels, kept = rank.compressor.levels, rank.residuals()
    rank.step(gradients(SIZES, 2))
    begin_step(rank.compressor)
    rank.compressor.fit(gradients(SIZES, 10))
    assert rank.compressor.parts.default.table.bits == 4
    handler.restore()
    assert rank.compressor.step == 2 and torch.equal(rank.compressor.levels, levels)
    handler.save()
    handler.restore()
    moved = OneRank(rank.compressor, SIZES, rank_info=(0, 3))
    moved.begin()
    assert all(torch.equal(moved.residuals()[name], kept[name]) for name in "ac")
    assert not caplog.messages
    other = make(bits=2)
    other.step = 4
    handler.set_value(other)
    other.step = 5
    handler.restore()
    assert handler.value is other and other.step == 4


@pytest.mark.parametrize("change", ["load", "set"])
def test_residuals_are_kept_before_the_next_step_too(change, caplog):
    """Their rank is not known then."""
    rank = OneRank(make(bits=3), SIZES, rank_info=(1, 4))
    rank.step(gradients(SIZES, 0))
    kept, handler = rank.residuals(), CompressorStateHandler(rank.compressor)
    handler.restore()
    compressor = rank.compressor
    if change == "set":
        compressor.set(bits=4)
    else:
        compressor = make(bits=3)
        compressor.load_state_dict(rank.compressor.state_dict())
    moved = OneRank(compressor, SIZES, rank_info=(0, 3))
    moved.begin()
    assert all(torch.equal(moved.residuals()[name], kept[name]) for name in "ac")
    assert not caplog.messages


def test_sync_takes_the_first_ranks_tables_and_keeps_its_own_residuals(horovod):
    of_first, own = OneRank(make(), SIZES), OneRank(make(), SIZES)
    of_first.step(gradients(SIZES, 1))
    first, newcomer = of_first.compressor, make()
    first.fit(gradients(SIZES, 3))
    first.step = 7
    first.set(bits=4)
    own.step(gradients(SIZES, 0))
    kept, taken = own.residuals(), dict(binding._taken)
    binding._taken["some name"] = 3
    handler = CompressorStateHandler(own.compressor)
    horovod.sent = without_own(first.state_dict())
    CompressorStateHandler(newcomer).sync()
    assert newcomer.step == 7 and "residuals" not in newcomer.state_dict()
    handler.sync()
    assert not binding._taken, "newcomers count from zero"
    binding._taken.update(taken)
    assert repr(own.compressor) == repr(first) and own.compressor.step == 7
    assert torch.equal(own.compressor.levels, first.levels)
    assert all(torch.equal(own.residuals()[name], kept[name]) for name in "ac")
    own.compressor.step = 99
    handler.restore()
    assert own.compressor.step == 7, "what was synchronised is saved"


def test_what_was_sent_is_each_ranks_own():
    states = []
    for rank in range(2):
        scheme = ECDQ(bits=2, bucket_size=64, parameter_bits={"a": 4})
        for codec in scheme.parts.values():
            codec.count(codec.payloads.encode(torch.ones(100 * (1 + rank)), 100, 5))
        states.append(scheme.state_dict())
    shared = without_own(states[0])
    merged, fresh = with_own(shared, states[1]), with_own(shared, {})
    parts = [merged, merged["parts"]["bits=4"]]
    for part, own in zip(parts, [states[1], states[1]["parts"]["bits=4"]], strict=True):
        assert torch.equal(part["sent"], own["sent"]) and part["sent"][1] > 0
    assert not fresh["sent"].any() and not fresh["parts"]["bits=4"]["sent"].any()
    assert states[0]["sent"].any(), "the state itself is left alone"
