"""A payload damaged on its way to one rank alone: no rank ends the step, none is left waiting."""

from __future__ import annotations

import copy
import itertools

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, learn, make_model, train
from damage import flipped, gone, truncated
from rank_optimizers import distributed, restart

from hvd_adaptive import ECDQ, QSGD, Hierarchical, PayloadError, Tuning
from hvd_adaptive.run.draws import Draws
from hvd_adaptive.transport.collectives import AllGather, AllToAll

pytestmark = [pytest.mark.ranks, pytest.mark.gloo]

SEEDS = itertools.count(19_000)
EXCHANGES = {
    "allgather": {"exchange": "allgather"},
    "scatter_reduce": {"exchange": "scatter_reduce"},
    "nodes of one": {"exchange": Hierarchical(ranks_per_node=1)},
    "nodes of two": {"exchange": Hierarchical(ranks_per_node=2)},
    "auto": {"exchange": "auto"},
}
MAKE = {
    "ecdq": lambda **k: ECDQ(bits=2, bucket_size=512, **k),
    "qsgd": lambda **k: QSGD(
        bits=4, bucket_size=512, tuning=Tuning(in_flight_bytes=3_000_000), **k
    ),
}


def inject(monkeypatch, damage, rank, turn) -> list:
    """Damage what ``rank`` receives in its collective number ``turn``; returns what was done.

    Samples of a node's mean, which fits alone see, do not count.
    """
    done, turns, samples = [], itertools.count(), []
    swapped = Draws.among_members

    def apart(self, *arguments):
        samples.append(True)
        try:
            return swapped(self, *arguments)
        finally:
            samples.pop()

    monkeypatch.setattr(Draws, "among_members", apart)

    def damaging(receive):
        def received(self, world, handle):
            parts = receive(self, world, handle)
            if not samples and world.rank == rank and next(turns) == turn:
                own = world.rank if len(parts) > 1 else None  # one tensor of all ranks
                others = (i for i, part in enumerate(parts) if i != own and part.numel())
                place = next(others)
                parts[place] = damage(parts[place].clone())
                done.append(place)
            return parts

        return received

    for kind in (AllGather, AllToAll):
        monkeypatch.setattr(kind, "receive", damaging(kind.receive))
    return done


def failing_step(model, optimizer) -> str:
    """The error of a step, which every rank must raise."""
    x, y = batches(hvd.rank())()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(PayloadError) as raised:
        optimizer.step()
    return str(raised.value)


@pytest.mark.parametrize("scheme", MAKE)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_rank_raises_the_same(exchange, scheme, monkeypatch):
    keywords = EXCHANGES[exchange] | {"seed": next(SEEDS), "fusion_bytes": 60_000}
    if hvd.size() % getattr(keywords["exchange"], "ranks_per_node", 1):
        pytest.skip("ranks do not fill nodes")
    model = make_model()
    optimizer = distributed(model, MAKE[scheme](**keywords))
    train(model, optimizer, 2)
    # Plain floats inside a node have no checksum: only their length tells.
    damages = (truncated, gone) if exchange in ("nodes of two", "auto") else (flipped, gone)
    for number, (damage, turn) in enumerate(zip((*damages, damages[0]), (1, 0, 3), strict=True)):
        before, rank = flat_parameters(model), number % hvd.size()
        with monkeypatch.context() as patch:
            done = inject(patch, damage, rank, turn)
            told = failing_step(model, optimizer)
            assert bool(done) == (hvd.rank() == rank)
        assert f"corrupt at rank {rank} (group" in told
        assert len(set(hvd.allgather_object(told))) == 1
        assert torch.equal(flat_parameters(model), before)
        assert all(bool(p.grad.isnan().all()) for p in model.parameters())
        restart(optimizer)
    train(model, optimizer, 2)
    assert_same_everywhere(flat_parameters(model), "after damage")


def test_as_the_page_says(monkeypatch):
    """docs/failures.md: how to go on."""
    model = make_model()
    compressor = QSGD(bits=8, norm="linf", seed=next(SEEDS), error_feedback=0.5)
    optimizer = distributed(model, compressor)
    train(model, optimizer, 1)
    with monkeypatch.context() as patch:
        inject(patch, gone, 0, 0)
        failing_step(model, optimizer)
    exact = copy.deepcopy(model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    left = learn(model, optimizer)
    without = learn(exact, distributed(exact, hvd.Compression.none))
    assert without < 0.97 and abs(left - without) < 0.01
    assert_same_everywhere(flat_parameters(model), "gone on")
