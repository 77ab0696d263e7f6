"""Ranks in threads of this process, and a World that reads what it was given as late as may be.

A rank's real steps (run/step.py) run over it. What a rank sends is read when that rank waits for
the collective, not before: memory that it has used again meanwhile arrives changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from hvd_adaptive.layout import Member
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.run.unordered import UnorderedStep
from hvd_adaptive.transport.world import World

SECONDS = 20.0


class Wire:
    """What ranks have sent, by name and rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._sent: dict[str, dict[int, list[torch.Tensor]]] = {}
        self._there = threading.Condition()

    def put(self, name: str, rank: int, parts: Sequence[torch.Tensor]) -> None:
        """To each rank its part."""
        with self._there:
            of_name = self._sent.setdefault(name, {})
            assert rank not in of_name, f"{name} was sent twice"
            of_name[rank] = [part.clone() for part in parts]
            self._there.notify_all()

    def take(self, name: str, rank: int) -> list[torch.Tensor]:
        """What each rank has sent to this one."""
        with self._there:
            if not self._there.wait_for(lambda: len(self._sent[name]) == self.size, SECONDS):
                raise TimeoutError(f"{name}: ranks {sorted(self._sent[name])} wait for the others")
            return [self._sent[name][sender][rank] for sender in range(self.size)]


class LateWorld(World):
    """One rank's world. damage: changes what another rank's message is, as this one gets it."""

    def __init__(self, wire: Wire, rank: int, direct: bool, damage: Callable) -> None:
        self.wire, self.rank, self.damage = wire, rank, damage
        self.size, self.sends_directly = wire.size, direct
        self._pending: dict[str, tuple[list[torch.Tensor], bool]] = {}

    def allgather(self, data, name):
        return self._submit(name, [data] * self.wire.size, True)

    def alltoall(self, data, splits, name):
        return self._submit(name, data.split(splits.tolist()), False)

    def synchronize(self, name):
        parts, gathers = self._pending.pop(name)
        self.wire.put(name, self.rank, parts)
        received = self.wire.take(name, self.rank)
        received = [
            part if sender == self.rank else self.damage(name, sender, self.rank, part)
            for sender, part in enumerate(received)
        ]
        splits = torch.tensor([part.numel() for part in received], dtype=torch.int32)
        return torch.cat(received) if gathers else (torch.cat(received), splits)

    def gather_equal(self, values, name):
        self.wire.put(name, self.rank, [values] * self.size)
        return torch.stack(self.wire.take(name, self.rank))

    def is_current(self):
        return True

    def node(self):
        raise NotImplementedError

    broadcast = poll = node

    def flush(self):
        """A rank that waits no more has still submitted what it has."""
        for name, (parts, _) in self._pending.items():
            self.wire.put(name, self.rank, parts)

    def _submit(self, name, parts, gathers):
        self._pending[name] = list(parts), gathers
        return name


class LateBinding(RankContext):
    """Of parameters that no optimizer holds."""

    def __init__(self, compressor, world, shapes, dtype):
        super().__init__(compressor, world, "late")
        members = [
            Member(f"w{i}", shape, dtype, compressor.parts.label_of(f"w{i}"))
            for i, shape in enumerate(shapes)
        ]
        self.layout = self.build_layout(members)


class LateRank:
    """One rank; ``step`` averages its gradients in their own memory, or raises."""

    def __init__(self, wire, rank, compressor, shapes, dtype, direct, damage):
        self.compressor, self.world = compressor, LateWorld(wire, rank, direct, damage)
        self.binding = LateBinding(compressor, self.world, shapes, dtype)

    def step(self, gradients: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
        self.compressor.step = number
        self.binding.name = f"late{number}"
        self.binding.prepare(number)
        step = UnorderedStep(self.binding, self.binding.layout, number)
        step.release(1.0 / self.world.size)
        slots = [int(member.name[1:]) for member in self.binding.layout.members]
        for slot in reversed(range(len(slots))):
            step.arrive(slot, gradients[slots[slot]])
        step.launch_all(1.0 / self.world.size)
        step.write_back()
        results = {slots[slot]: step.result(slot) for slot in range(len(slots))}
        assert not step.arrived
        step.check_everywhere()
        return [results[slot] for slot in range(len(slots))]


def intact(name, sender, receiver, part):
    return part


def run(make, shapes, gradients, *, dtype=torch.float32, direct=False, damage=intact):
    """For each rank its result of each step, or the error that ended it.

    make: a compressor.  gradients: [step][rank], a list by parameter; results take their place.
    """
    size = len(gradients[0])
    wire, outcomes = Wire(size), [[] for _ in range(size)]

    def work(rank):
        one = LateRank(wire, rank, make(), shapes, dtype, direct, damage)
        for number, of_step in enumerate(gradients):
            try:
                outcomes[rank].append(one.step(of_step[rank], number))
            except Exception as error:
                outcomes[rank].append(error)
                break
        one.world.flush()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes
