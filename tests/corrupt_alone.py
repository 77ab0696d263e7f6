"""A payload damaged on its way to one rank alone: no rank ends the step, none is left waiting, by
each door (see tests/nets.py)."""

from __future__ import annotations

import itertools

import pytest
import torch
from damage import flipped, gone, truncated
from nets import flat_parameters, is_same, make_net, train

from hvd_adaptive import ECDQ, QSGD, Hierarchical, PayloadError, Tuning
from hvd_adaptive.transport.collectives import AllGather, AllToAll

__all__ = ["test_every_rank_raises_the_same"]
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
    "qsgd": lambda **k: QSGD(bits=4, bucket_size=512, tuning=Tuning(in_flight_bytes=3 << 20), **k),
}


def inject(monkeypatch, damage, rank, turn) -> list:
    """Damage what ``rank`` receives in number ``turn`` of the collectives that bring it something;
    returns what was done.
    """
    done, turns = [], itertools.count()

    def damaging(receive):
        def received(self, world, handle):
            parts = receive(self, world, handle)
            own = world.rank if len(parts) > 1 else None  # one tensor of all ranks
            others = [i for i, part in enumerate(parts) if i != own and part.numel()]
            if others and world.rank == rank and next(turns) == turn:
                parts[others[0]] = damage(parts[others[0]].clone())
                done.append(others[0])
            return parts

        return received

    for kind in (AllGather, AllToAll):
        monkeypatch.setattr(kind, "receive", damaging(kind.receive))
    return done


@pytest.mark.ranks
@pytest.mark.gloo
@pytest.mark.parametrize("turn", [1, 0, 3])
@pytest.mark.parametrize("scheme", MAKE)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_rank_raises_the_same(door, rank, ranks, gather, exchange, scheme, turn, monkeypatch):
    keywords = EXCHANGES[exchange] | {"seed": next(SEEDS), "fusion_bytes": 20_000}
    if ranks % getattr(keywords["exchange"], "ranks_per_node", 1):
        pytest.skip("ranks do not fill nodes")
    net, compressor, broken = make_net(), MAKE[scheme](**keywords), turn % ranks
    training = door(net, compressor, gradient_as_bucket_view=True)
    train(training, rank, [0, 1])
    # Plain floats inside a node have no checksum: only their length tells.
    plain = exchange in ("nodes of two", "auto")
    damage = gone if turn == 0 else truncated if plain else flipped
    before = flat_parameters(net)
    with monkeypatch.context() as patch:
        done = inject(patch, damage, broken, turn)
        with pytest.raises(PayloadError) as raised:
            train(training, rank, [2])
        assert bool(done) == (rank == broken)
    told = str(raised.value)
    assert f"corrupt at rank {broken} (group" in told and compressor.step == 2
    assert is_same(gather, told)
    assert torch.equal(flat_parameters(net), before)
    assert all(bool(p.grad.isnan().all()) for p in net.parameters())
    if training.restart():
        train(training, rank, [3, 4])
        assert is_same(gather, flat_parameters(net))
