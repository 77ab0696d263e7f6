"""What ranks have in flight of steps that were given up is completed, over a simulated network."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from named_ranks import NamedWorld, run_ranks

from hvd_adaptive.coding.payload import OwnedBuffer
from hvd_adaptive.hooks.horovod.unfinished import AbandonedSteps
from hvd_adaptive.transport.collectives import AllGather, AllToAll, InFlight

CPU = torch.device("cpu")
KINDS = ("payloads", "parts", "allgather", "broadcast")


def submitted(world: NamedWorld, kind: str, name: str) -> InFlight:
    """As a step submits it."""
    buffer = OwnedBuffer.copy_of(torch.zeros(4))
    if kind == "allgather":
        handle = world.allgather(buffer.bytes, name)
    elif kind == "broadcast":
        handle = world.broadcast_from_root(buffer.bytes, name)
    else:
        request = AllGather(buffer) if kind == "payloads" else AllToAll([buffer] * 2)
        handle = request.submit(world, name)
    return InFlight(name, kind, handle)


@pytest.mark.parametrize("direct", [False, True])
def test_each_rank_submits_once_what_another_one_has_in_flight(direct):
    """By the same operation: Horovod pairs by name and operation, and few ranks send payloads by
    alltoall. Some are of the last attempt, and one ended, and is received, on all ranks."""

    def program(world: NamedWorld) -> None:
        abandoned = AbandonedSteps()
        ended = submitted(world, "payloads", "ended")
        world.wait(ended.handle, "ended")
        names = {"ended", *(f"{kind} of {world.rank}" for kind in KINDS)}
        own = [submitted(world, kind, f"{kind} of {world.rank}") for kind in KINDS]
        own.append(submitted(world, "parts", "of both"))
        step = SimpleNamespace(names=names, abandon=lambda: own[:2])
        abandoned.add_step(step, world.generation)
        for sent in own[2:]:
            abandoned.add(sent, world.generation)
        assert abandoned.attempt == 1
        abandoned.complete(world, "here", CPU)
        abandoned.end(world)
        assert abandoned.attempt == 0
        for sent in own:
            assert world.hvd.poll(sent.handle)

    network = run_ranks(2, program, direct)
    assert all(len(by_rank) == 2 for by_rank in network.sent)
    found = [name for name in network.names if not name.startswith("hvd_adaptive.abandoned")]
    every = ["ended", "of both", *(f"{kind} of {rank}" for kind in KINDS for rank in range(2))]
    assert sorted(found) == sorted(every)


def test_nothing_is_in_flight_of_a_life_that_is_over():
    """Horovod numbers handles anew after its shutdown: those of before are somebody else's."""

    def program(world: NamedWorld) -> None:
        abandoned = AbandonedSteps()
        abandoned.add(InFlight(f"of {world.rank}", "payloads", 0), object())
        abandoned.complete(world, "here", CPU)
        abandoned.end(world)

    assert all("abandoned" in name for name in run_ranks(2, program).names)
