"""Ranks of Horovod in one process: real drives, workers and agreements, over a network that pairs
collectives by name, under schedules that chance picks (tests/scheduler.py)."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from scheduler import Network, Schedule, work_in_schedule

from hvd_adaptive.hooks.horovod.agreement import Agreement
from hvd_adaptive.hooks.horovod.drive import HorovodDrive
from hvd_adaptive.hooks.horovod.owner import Owner
from hvd_adaptive.hooks.horovod.placeholder import Placeholders
from hvd_adaptive.hooks.horovod.unfinished import AbandonedSteps
from hvd_adaptive.layout import Member, build_layout
from hvd_adaptive.run.driver import Driver
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.transport.horovod_world import Abandoned, HorovodWorld


class NamedNetwork(Network):
    """Pairs the ranks' collectives by name; a rank has a name in flight once.

    direct: payloads are sent to each rank by itself, as by a few ranks of MPI.
    """

    def __init__(self, size: int, damage: Callable[..., torch.Tensor], direct: bool) -> None:
        super().__init__(size, damage)
        self.direct = direct
        self.names: list[str] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._used: list[Counter[str]] = [Counter() for _ in range(size)]

    def post_named(self, rank: int, name: str, kind: str, parts: list[torch.Tensor]) -> int:
        if rank in self.dead:
            raise RuntimeError("this rank is dead")
        last = self._numbers.get((name, self._used[rank][name] - 1))
        if last is not None and not self.has_ended(last, rank):
            raise ValueError(f"{name} is in flight")
        key = name, self._used[rank][name]
        self._used[rank][name] += 1
        number = self._numbers.setdefault(key, len(self.sent))
        if number == len(self.sent):
            self.names.append(name)
        return self._submit(number, rank, kind, parts)


class Horovod:
    """As much of ``horovod.torch`` as a HorovodWorld needs, on one rank."""

    Average, Sum = "Average", "Sum"

    def __init__(self, schedule: Schedule, network: NamedNetwork, rank: int) -> None:
        self.schedule, self.network, self.rank = schedule, network, rank
        self.mpi_ops = SimpleNamespace(_handle_map={})

    def mpi_enabled(self):
        return False

    def allgather_async(self, data, name, process_set):
        return self._post(name, "allgather", [data] * self.network.size)

    def alltoall_async(self, data, splits, name, process_set):
        return self._post(name, "alltoall", list(data.split(splits.tolist())))

    def broadcast_async(self, data, root, name, process_set):
        return self._post(name, "broadcast", [data] * self.network.size)

    def allreduce_async(self, data, name, op, process_set, **factors):
        return self._post(name, "allreduce", [data] * self.network.size)

    def _post(self, name, kind, parts):
        number = self.network.post_named(self.rank, name, kind, parts)
        self.mpi_ops._handle_map[number] = tuple(parts)
        self.schedule.pause()
        return number

    def poll(self, number):
        self.schedule.pause("its turn after a look")
        return self.network.has_ended(number, self.rank)

    def synchronize(self, number):
        done = lambda: self.network.has_ended(number, self.rank)  # noqa: E731
        self.schedule.pause(self.network.names[number], done)
        kind = self.network.sent[number][self.rank][0]
        parts = self.network.received(number, self.rank)
        if kind == "allreduce":
            return sum(parts[1:], parts[0])
        if kind == "broadcast":
            return parts[0]
        splits = torch.tensor([part.shape[0] for part in parts], dtype=torch.int32)
        return (torch.cat(parts), splits) if kind == "alltoall" else torch.cat(parts)


class NamedWorld(HorovodWorld):
    """One rank."""

    def __init__(self, schedule: Schedule, network: NamedNetwork, rank: int) -> None:
        self.hvd: Any = Horovod(schedule, network, rank)
        self.size, self.rank, self.sends_directly = network.size, rank, network.direct
        self.process_set = SimpleNamespace(ranks=list(range(network.size)))

    def is_current(self):
        return True

    def node(self):
        return self.rank, 1

    def wait(self, handle, name, operation="allgather"):
        network, left = self.hvd.network, self.left
        ended = lambda: network.has_ended(handle, self.rank)  # noqa: E731
        self.hvd.schedule.pause(name, lambda: ended() or (left is not None and left.is_set()))
        if left is not None and left.is_set() and not ended():
            raise Abandoned(name, handle, operation)
        return self.synchronize(handle)


def run_ranks(size: int, program: Callable[[NamedWorld], None]) -> NamedNetwork:
    """The network after ``program`` on each rank."""
    schedule = Schedule(random.Random(0).choice)
    network = NamedNetwork(size, lambda number, sender, receiver, part: part, direct=False)
    schedule.events = network.events
    for rank in range(size):
        world = NamedWorld(schedule, network, rank)
        schedule.add(f"rank {rank}", functools.partial(program, world))
    schedule.run()
    return network


class NamedBinding(RankContext):
    """A compressor's groups for parameters of one optimizer."""

    def __init__(
        self, compressor, world, name: str, sizes: Sequence[int], op: str, dtype: torch.dtype
    ) -> None:
        super().__init__(compressor, world, f"hvd_adaptive.{name}")
        named = {
            f"{name}.{index}": torch.nn.Parameter(torch.zeros(size, dtype=dtype))
            for index, size in enumerate(sizes)
        }
        self.owner = Owner(list(named.items()), op, None, lambda: self)
        self.agreement = Agreement(compressor, self.owner, world)
        self.abandoned, self.has_optimizer = AbandonedSteps(), True
        self.parameters = SimpleNamespace(is_sparse=lambda slot: False)
        members = [
            Member(n, tuple(p.shape), dtype, compressor.parts.label_of(n)) for n, p in named.items()
        ]
        self.layout = self.build_layout(functools.partial(build_layout, members))


class Optimizer:
    """One optimizer of a rank: ``backward`` brings its gradients, ``step`` the averages."""

    def __init__(self, schedule, network, rank, name, sizes, compressor, op, dtype) -> None:
        self.schedule, self.name, self.compressor = schedule, name, compressor
        compressor._training.instance.number = 0  # as in a process of its own
        self.world = NamedWorld(schedule, network, rank)
        self.binding = NamedBinding(compressor, self.world, name, sizes, op, dtype)
        self.driver = Driver(compressor)
        work_in_schedule(self.driver, schedule, network, f"worker of {name} on {rank}")
        self._handles: dict[int, Any] = {}

    def begin(self) -> None:
        """As ``Session._begin``; a step in progress is given up."""
        make = functools.partial(HorovodDrive, self.binding, layout=self.binding.layout)
        self.driver.start(make, on_cpu=True)
        self.placeholders = Placeholders(len(self.binding.layout.members))
        self.driver.wake()

    def arrive(self, slot: int, gradient: torch.Tensor) -> None:
        """As ``Session.compress``, and Horovod's allreduce of the placeholder."""
        drive: HorovodDrive = self.driver.drive
        drive.step.arrive(slot, gradient)
        drive.send_what_is_complete()
        number = self.placeholders.tensors[slot]
        self._handles[slot] = self.world.allreduce(number, f"{self.name}.{slot}", "Sum")

    def forget_handles(self) -> None:
        """Horovod drops the gradients; their allreduces end."""
        for slot in list(self._handles):
            self.world.synchronize(self._handles.pop(slot))

    def step(self) -> list[torch.Tensor]:
        """As the optimizer's ``synchronize``, in which each decompress returns an average."""
        for slot in list(self._handles):
            self.world.synchronize(self._handles.pop(slot))
        drive: HorovodDrive = self.driver.drive
        self.driver.wait()
        averages = [drive.step.result(slot) for slot in range(len(self.binding.layout.members))]
        assert not drive.step.arrived
        self.world.left = None
        self.driver.end()
        self.binding.abandoned.end(self.world)
        return averages
