"""Payloads damaged on their way between ranks: every rank is told, none hangs or goes on."""

from __future__ import annotations

import contextlib
import copy

import corrupt_alone
import horovod.torch as hvd
import pytest
import torch
from corrupt_alone import *  # noqa: F403
from damage import flipped, gone, truncated
from training import (
    assert_same_everywhere,
    distributed,
    flat_parameters,
    learn,
    restart,
    train,
    trained,
)

from hvd_adaptive import ALQ, QSGD, PayloadError, Tuning
from hvd_adaptive.coding.payload import OwnedBuffer
from hvd_adaptive.transport.collectives import AllGather

pytestmark = pytest.mark.gloo


def replace(request: AllGather, data: torch.Tensor) -> None:
    """Before it is sent: a rank's own copy is damaged, too."""
    object.__setattr__(request, "data", OwnedBuffer.copy_of(data))


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
def test_damage_without_a_checksum(exchange, monkeypatch):
    """What no decoder notices is averaged, the same on every rank."""
    compressor = ALQ(bucket_size=512, exchange=exchange, tuning=Tuning(checksum=False))
    model, optimizer = trained(compressor, 1)
    submit = AllGather.submit
    for damage in (flipped, truncated, gone):
        is_told, before, once = damage is not flipped, flat_parameters(model), iter([True])

        def damaged(self, world, name, damage=damage, once=once):
            if world.rank == 0 and next(once, False):
                replace(self, damage(self.data.bytes.clone()))
            return submit(self, world, name)

        monkeypatch.setattr(AllGather, "submit", damaged)
        with pytest.raises(PayloadError) if is_told else contextlib.nullcontext():
            train(model, optimizer, 1)
        restart(optimizer)
        assert torch.equal(flat_parameters(model), before) == is_told, damage.__name__
        assert_same_everywhere(model)


def test_payloads_of_another_group_are_refused(monkeypatch):
    """Two groups' payloads in each other's place: whole, checksums right."""
    model, optimizer = trained(ALQ(bucket_size=512, fusion_bytes=60_000), 1)
    submit, first = AllGather.submit, []

    def late(self, world, name):
        if world.rank == 0:
            first.append(self.data.bytes)
            replace(self, first[-2] if len(first) == 2 else self.data.bytes)
        return submit(self, world, name)

    monkeypatch.setattr(AllGather, "submit", late)
    with pytest.raises(PayloadError):
        train(model, optimizer, 1)
    monkeypatch.undo()
    restart(optimizer)


def test_as_the_page_says(monkeypatch):
    """docs/failures.md: how to go on."""
    model, optimizer = trained(QSGD(bits=8, norm="linf", error_feedback=0.5), 1)
    with monkeypatch.context() as patch:
        corrupt_alone.inject(patch, gone, 0, 0)
        with pytest.raises(PayloadError):
            train(model, optimizer, 1)
    exact = copy.deepcopy(model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    left = learn(model, optimizer)
    without = learn(exact, distributed(exact, hvd.Compression.none))
    assert without < 0.97 and abs(left - without) < 0.01
    assert_same_everywhere(model)
