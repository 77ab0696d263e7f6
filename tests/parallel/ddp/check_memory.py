"""What DDP's hook sends is not overwritten; what one rank alone cannot read fails on every rank."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ddp_oracles import backward, gathered, make_net, own_gradients, wrap

from hvd_adaptive import QSGD, Hierarchical, PayloadError, ScatterReduce
from hvd_adaptive.transport.collectives import AllGather, AllToAll

RANK, RANKS = dist.get_rank(), dist.get_world_size()
EXCHANGES = {
    "allgather": {"exchange": "allgather"},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=8)},
    "nodes of one": {"exchange": Hierarchical(ranks_per_node=1, second_stage_bits=8)},
    "one node": {"exchange": Hierarchical(ranks_per_node=RANKS, second_stage_bits=8)},
}
KEYWORDS = {"bits": 8, "norm": "linf", "bucket_size": 512}
# DDP's buckets, and groups, of about two layers.
SMALL = {"bucket_cap_mb": 0.1}


@pytest.mark.parametrize("own", [{}, {"warmup_steps": 2}, {"min_numel": 0}], ids=str)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_averages_are_exact(exchange, own):
    """Of every gradient, within two stages' steps of 8 bits."""
    net = make_net()
    model, _ = wrap(net, QSGD(**KEYWORDS | EXCHANGES[exchange] | own), **SMALL)
    for step in range(4):
        exact = {
            name: torch.stack(gathered(g.double())).mean(0)
            for name, g in own_gradients(net, step).items()
        }
        backward(model, step)
        largest = max(float(g.abs().max()) for g in exact.values())
        for name, p in net.named_parameters():
            # A rank's largest gradient may be twice the average's.
            assert (p.grad.double() - exact[name]).abs().max() < 4.1 / 127 * largest, (step, name)


def damage_once(monkeypatch, rank, turn):
    """Cut what ``rank`` receives in its collective number ``turn``."""
    turns = itertools.count()

    def cutting(receive):
        def received(self, world, handle):
            parts = receive(self, world, handle)
            if world.rank == rank and next(turns) == turn:
                place = next(i for i, part in enumerate(parts) if part.numel())
                parts[place] = parts[place][:-9].clone()
            return parts

        return received

    for kind in (AllGather, AllToAll):
        monkeypatch.setattr(kind, "receive", cutting(kind.receive))


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_rank_raises_the_same(exchange, turn, monkeypatch):
    """DDP itself cannot go on after an exception from its hook."""
    net, rank = make_net(), turn % RANKS
    compressor = QSGD(**KEYWORDS | EXCHANGES[exchange])
    model, state = wrap(net, compressor, gradient_as_bucket_view=True, **SMALL)
    for step in range(2):
        backward(model, step)
    damage_once(monkeypatch, rank, turn)
    with pytest.raises(PayloadError) as raised:
        backward(model, 2)
    assert f"corrupt at rank {rank} (group" in str(raised.value)
    told: list = [None] * RANKS
    dist.all_gather_object(told, str(raised.value))
    assert len(set(told)) == 1
    assert all(bool(p.grad.isnan().all()) for p in net.parameters())
    assert compressor.step == 2 and state.session.is_idle
