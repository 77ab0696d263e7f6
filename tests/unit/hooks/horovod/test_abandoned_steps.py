"""What is told and sent of steps that were given up, as one of two ranks, without Horovod."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import torch

from hvd_adaptive.hooks.horovod.unfinished import AbandonedSteps
from hvd_adaptive.transport.collectives import InFlight
from hvd_adaptive.transport.horovod_world import HorovodWorld

CPU = torch.device("cpu")


class Hvd:
    """Horovod, where the other rank tells ``others``; it raises where it knows no such handle."""

    def __init__(self, others, done=()):
        self.others, self.done, self.known = others, set(done), set(done)
        self.told, self.sent = None, []

    def poll(self, handle):
        if handle not in self.known:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        return handle in self.done

    def submit(self, data, *splits_and_name):
        name = splits_and_name[-1]
        if not name.startswith("hvd_adaptive.abandoned"):
            return self._submitted(name)
        self.told = json.loads(bytes(data.tolist()))
        return torch.cat([data, torch.tensor(list(_text(self.others)), dtype=torch.uint8)])

    def synchronize(self, handle):
        if isinstance(handle, torch.Tensor):
            return handle
        self.known.remove(handle)

    def _submitted(self, name):
        self.sent.append(name)
        self.known.add(name)
        return name


def _text(told) -> bytes:
    return json.dumps(told).encode()


def world_of(hvd, generation):
    length = len(_text(hvd.others))
    world = SimpleNamespace(
        hvd=hvd,
        size=2,
        generation=generation,
        process_set=None,
        sends_directly=False,
        allgather=hvd.submit,
        alltoall=hvd.submit,
        poll=hvd.poll,
        synchronize=hvd.synchronize,
        wait=lambda handle, name: hvd.synchronize(handle),
        gather_equal=lambda own, name: torch.tensor([[int(own)], [length]]),
    )
    world.gather_objects = partial(HorovodWorld.gather_objects, world)
    return world


def step_of(*sent):
    names = {one.name for one in sent} | {"received"}
    return SimpleNamespace(names=names, abandon=lambda: list(sent))


def test_what_others_have_in_flight_is_filled():
    """What this rank has sent in both steps that it gave up, be it long received, is not sent
    again."""
    hvd = Hvd(
        [("a", "payloads"), ("b", "parts"), ("c", "payloads"), ("received", "payloads")],
        done=["of a"],
    )
    hvd.known.add("of b")
    abandoned, generation = AbandonedSteps(), {}
    for sent in (InFlight("b", "parts", "of b"), InFlight("a", "payloads", "of a")):
        abandoned.add_step(step_of(sent), generation)
    assert abandoned.attempt == 2
    abandoned.complete(world_of(hvd, generation), "here", CPU)
    assert hvd.told == [["b", "parts"]] and hvd.sent == ["c"]
    abandoned.end(world_of(hvd, generation))
    assert abandoned.attempt == 0 and not hvd.known  # all of it was waited for


def test_what_takes_a_collectives_place_is_the_same_operation():
    """Horovod pairs by name and operation. Few ranks send payloads by alltoall."""
    kinds = ["allgather", "broadcast", "parts", "payloads"]
    hvd, operations = Hvd([(kind, kind) for kind in kinds]), {}

    def submitted(operation):
        def submit(*data_and_name):
            if data_and_name[-1] in kinds:
                operations[data_and_name[-1]] = operation
            return hvd.submit(*data_and_name)

        return submit

    abandoned, generation = AbandonedSteps(), {}
    world = world_of(hvd, generation)
    world.allgather, world.alltoall = submitted("allgather"), submitted("alltoall")
    world.broadcast_from_root = submitted("broadcast")
    world.sends_directly, world.rank = True, 0
    abandoned.complete(world, "here", CPU)
    wanted = {"allgather": "allgather", "broadcast": "broadcast"}
    assert operations == wanted | {"parts": "alltoall", "payloads": "alltoall"}
    abandoned.end(world)
    assert not hvd.known


def test_nothing_is_in_flight_of_a_life_that_is_over():
    """Horovod numbers handles anew after its shutdown: those of before are somebody else's."""
    hvd, abandoned, generation, next_generation = Hvd([]), AbandonedSteps(), {}, {}
    abandoned.add_step(step_of(InFlight("a", "payloads", 0)), generation)
    abandoned.complete(world_of(hvd, next_generation), "here", CPU)
    assert hvd.told == [] and hvd.sent == []
    abandoned.end(world_of(hvd, next_generation))
    assert abandoned.attempt == 0
