"""Payloads damaged on their way between ranks: every rank is told, none hangs or goes on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model, train
from damage import flipped, gone, truncated
from rank_optimizers import distributed, restart

from hvd_adaptive import ALQ, ECDQ, ORQ, PayloadError, Tuning
from hvd_adaptive.coding.header import SIZE
from hvd_adaptive.coding.payload import OwnedBuffer
from hvd_adaptive.transport.collectives import AllGather, AllToAll

pytestmark = pytest.mark.gloo

SEEDS = itertools.count(9000)
MAKE = {
    "alq": lambda **k: ALQ(bucket_size=512, **k),
    "ecdq": lambda **k: ECDQ(bits=2, bucket_size=512, **k),
    "orq": lambda **k: ORQ(levels=5, bucket_size=512, **k),
}
STAGES = {
    "allgather": ("allgather", AllGather),
    "first": ("scatter_reduce", AllToAll),
    "second": ("scatter_reduce", AllGather),
}


def header_flipped(data: torch.Tensor) -> torch.Tensor:
    data[64] ^= 1  # the key
    return data


def doubled(data: torch.Tensor) -> torch.Tensor:
    return torch.cat([data, data])


def swapped(data: torch.Tensor) -> torch.Tensor:
    words = data[SIZE : data.numel() // 4 * 4].view(torch.int32)
    other = int((words != words[0]).nonzero()[0])
    words[[0, other]] = words[[other, 0]]
    return data


DAMAGE = (flipped, header_flipped, truncated, gone, doubled, swapped)


def replace(request: AllGather, data: torch.Tensor) -> None:
    """Before it is sent: a rank's own copy is damaged, too."""
    object.__setattr__(request, "data", OwnedBuffer.copy_of(data))


def inject(monkeypatch, stage: type, damage: Callable, rank: int) -> None:
    """Damage what ``rank`` sends to the last rank, in one collective."""
    submit, once = stage.submit, iter([True])

    def damaged(self, world, name):
        if world.rank == rank and next(once, False):
            if stage is AllGather:
                replace(self, damage(self.data.bytes.clone()))
            else:
                damaged_part = OwnedBuffer.copy_of(damage(self.parts[-1].bytes.clone()))
                self = AllToAll([*self.parts[:-1], damaged_part])
        return submit(self, world, name)

    monkeypatch.setattr(stage, "submit", damaged)


@pytest.mark.parametrize(
    ("scheme", "stage"),
    [*(("alq", stage) for stage in STAGES), ("ecdq", "second"), ("orq", "first")],
)
def test_damage_is_told_on_every_rank(scheme, stage, monkeypatch):
    exchange, kind = STAGES[stage]
    model = make_model()
    compressor = MAKE[scheme](seed=next(SEEDS), exchange=exchange)
    optimizer = distributed(model, compressor)
    train(model, optimizer, 1)
    before = flat_parameters(model)
    for damage in DAMAGE:
        with monkeypatch.context() as patch:
            inject(patch, kind, damage, rank=0)
            with pytest.raises(PayloadError):
                train(model, optimizer, 1)
        restart(optimizer)
        assert torch.equal(flat_parameters(model), before), damage.__name__
    train(model, optimizer, 1)
    assert_same_everywhere(flat_parameters(model), "after damage")


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_checksum_nobody_crashes(stage, monkeypatch):
    """What no decoder notices is averaged, the same on every rank."""
    exchange, kind = STAGES[stage]
    model = make_model()
    compressor = ALQ(
        bucket_size=512, seed=next(SEEDS), exchange=exchange, tuning=Tuning(checksum=False)
    )
    optimizer = distributed(model, compressor)
    train(model, optimizer, 1)
    for damage in DAMAGE:
        with monkeypatch.context() as patch:
            inject(patch, kind, damage, rank=0)
            told = pytest.raises(PayloadError)
            with told if damage not in (flipped, swapped) else contextlib.nullcontext():
                train(model, optimizer, 1)
        restart(optimizer)
        assert_same_everywhere(flat_parameters(model).nan_to_num(), damage.__name__)


def test_payloads_of_another_group_are_refused(monkeypatch):
    """Two groups' payloads in each other's place: whole, checksums right."""
    model = make_model()
    compressor = ALQ(bucket_size=512, seed=next(SEEDS), fusion_bytes=60_000)
    optimizer = distributed(model, compressor)
    train(model, optimizer, 1)
    submit, first = AllGather.submit, []

    def late(self, world, name):
        if world.rank == 0:
            first.append(self.data.bytes)
            replace(self, first[-2] if len(first) == 2 else self.data.bytes)
        return submit(self, world, name)

    monkeypatch.setattr(AllGather, "submit", late)
    x, y = batches(hvd.rank())()
    optimizer.zero_grad()
    with pytest.raises(PayloadError):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    monkeypatch.undo()
    restart(optimizer)
