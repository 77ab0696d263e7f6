"""Ranks in threads of this process, and a Horovod that reads what it was given as late as may be.

A rank's real steps (fusion/step.py) run over it. What a rank sends is read when that rank waits for
the collective, not before: memory that it has used again meanwhile arrives changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from hvd_adaptive.fusion.binding import Binding
from hvd_adaptive.fusion.failures import Endings
from hvd_adaptive.fusion.layout import Member
from hvd_adaptive.fusion.step import Step

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


class LateHorovod:
    """One rank's Horovod. damage: changes what another rank's message is, as this one gets it."""

    def __init__(self, wire: Wire, rank: int, damage: Callable, late: bool = True) -> None:
        self.wire, self.rank, self.damage, self.late = wire, rank, damage, late
        self._pending: dict[str, tuple[list[torch.Tensor], bool]] = {}

    def allgather_async(self, data, name, process_set):
        return self._submit(name, [data] * self.wire.size, True)

    def alltoall_async(self, data, splits, name, process_set):
        return self._submit(name, data.split(splits.tolist()), False)

    def synchronize(self, name):
        parts, gathers = self._pending.pop(name)
        if self.late:
            self.wire.put(name, self.rank, parts)
        received = self.wire.take(name, self.rank)
        received = [
            part if sender == self.rank else self.damage(name, sender, self.rank, part)
            for sender, part in enumerate(received)
        ]
        splits = torch.tensor([part.numel() for part in received], dtype=torch.int32)
        return torch.cat(received) if gathers else (torch.cat(received), splits)

    def flush(self):
        """A rank that waits no more has still submitted what it has."""
        for name, (parts, _) in self._pending.items() if self.late else ():
            self.wire.put(name, self.rank, parts)

    def _submit(self, name, parts, gathers):
        self._pending[name] = list(parts), gathers
        if not self.late:
            self.wire.put(name, self.rank, parts)
        return name


class LateWorld(SimpleNamespace):
    """As exchange.world.World."""

    orders_collectives = False
    process_set = life = None

    def begin_gather(self, values: torch.Tensor, name: str) -> str:
        self.hvd.wire.put(name, self.rank, [values] * self.size)
        return name

    def end_gather(self, name: str) -> torch.Tensor:
        return torch.stack(self.hvd.wire.take(name, self.rank))

    def is_current(self) -> bool:
        return True


class LateBinding(Binding):
    """Of parameters that no optimizer holds."""

    def __init__(self, compressor, world, shapes, dtype):
        self.compressor, self.settings, self.owner = compressor, compressor.settings, None
        self.world = world
        self._set_up()
        self.name = "late"
        members = [
            Member(f"w{i}", shape, dtype, compressor.part_of(f"w{i}"))
            for i, shape in enumerate(shapes)
        ]
        self.layout = self.build_layout(members)

    def is_gradient(self, slot, tensor):
        return True


class LateRank:
    """One rank; ``step`` averages its gradients in their own memory, or raises."""

    def __init__(self, wire, rank, compressor, shapes, dtype, direct, damage, late=True):
        hvd = LateHorovod(wire, rank, damage, late)
        world = LateWorld(hvd=hvd, rank=rank, size=wire.size, sends_directly=direct)
        self.compressor, self.hvd = compressor, hvd
        self.name, self.endings = "late", Endings()
        self.binding = LateBinding(compressor, world, shapes, dtype)

    def step(self, gradients: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
        """A whole step."""
        return self.end(self.begin(gradients, number))

    def begin(self, gradients: Sequence[torch.Tensor], number: int) -> Step:
        """As the backward pass does."""
        self.compressor.step = number
        self.binding.name = f"{self.name}{number}"
        self.binding.prepare(number)
        step = Step(self.binding, self.binding.layout, number)
        step.endings = self.endings
        step.release(1.0 / self.hvd.wire.size)
        for slot, place in reversed(list(enumerate(self._places))):
            step.arrive(slot, gradients[place])
        return step

    def end(self, step: Step) -> list[torch.Tensor]:
        """As the optimizer does."""
        step.factor = 1.0 / self.hvd.wire.size
        step.launch_all()
        results = {place: step.result(slot) for slot, place in enumerate(self._places)}
        assert step.finished
        return [results[place] for place in range(len(results))]

    @property
    def _places(self) -> list[int]:
        """Which parameter each slot is."""
        return [int(member.name[1:]) for member in self.binding.layout.members]


def intact(name, sender, receiver, part):
    return part


def run(make, shapes, gradients, *, dtype=torch.float32, direct=False, damage=intact):
    """For each rank its result of each step, or the error that ended it.

    make: a compressor.  gradients: [step][rank], a list by parameter; results take their place.
    """
    outcomes: list[list] = [[] for _ in gradients[0]]

    def work(rank, wire):
        one = LateRank(wire, rank, make(), shapes, dtype, direct, damage)
        for number, of_step in enumerate(gradients):
            try:
                outcomes[rank].append(one.step(of_step[rank], number))
            except Exception as error:
                outcomes[rank].append(error)
                break
        one.hvd.flush()

    in_threads(work, len(outcomes))
    return outcomes


def in_threads(work: Callable[[int, Wire], None], ranks: int) -> None:
    """``work(rank, wire)`` of every rank at once."""
    wire = Wire(ranks)
    threads = [threading.Thread(target=work, args=(rank, wire)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert not any(thread.is_alive() for thread in threads)
