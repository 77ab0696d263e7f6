"""What ranks do together: requests that an exchange makes, and two ways to carry them out.

Over Horovod a rank ``submit``s a request and ``receive``s what comes of it; in a simulation all
ranks' requests are handed over in one process. What is sent is Sendable: a collective reads it
while other groups are encoded and decoded. What is received are uint8 tensors, 1-D, of any lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from hvd_adaptive.coding.sendable import Sendable, check_sendable
from hvd_adaptive.device import taken_over
from hvd_adaptive.transport.world import MOST_DIRECT, World

# Horovod counts the bytes of a collective's result in 32-bit signed displacements.
LARGEST_COLLECTIVE = 2**31 - 1


class Collective(ABC):
    """One rank's part in a collective."""

    @abstractmethod
    def submit(self, world: World, name: str) -> Any:
        """A handle; every rank must submit under this name."""

    @abstractmethod
    def receive(self, world: World, handle: Any) -> list[torch.Tensor]:
        """Wait; what each rank sent to this one, in rank order."""

    @abstractmethod
    def waiting(self) -> Collective:
        """What ``receive`` needs of a request once it is submitted, without copies of what is sent:
        Horovod keeps that for as long as it must."""

    @abstractmethod
    def held_bytes(self, world: World) -> int:
        """Memory that it takes from ``submit`` to ``receive``, what is received included, where
        others send as much as this rank."""

    @abstractmethod
    def sent_bytes(self, rank: int, ranks: int) -> int:
        """Bytes that leave this rank."""

    @staticmethod
    @abstractmethod
    def hand_over(requests: Sequence[Any]) -> list[list[torch.Tensor]]:
        """What each rank receives, from all ranks' requests."""


@dataclass(frozen=True)
class AllGather(Collective):
    """Every rank gets what every rank sends.

    The result comes as one tensor, since Horovod does not tell where a rank's bytes end: payloads
    do (``coding.payload.Row``). A few ranks on the CPU send to each other directly, see
    ``World.sends_directly``; then each has a tensor, and what is a rank's own never leaves it.
    """

    data: Sendable

    def __post_init__(self) -> None:
        check_sendable("data", self.data)

    def submit(self, world: World, name: str) -> Any:
        if self._is_direct(world):
            parts = [self.data] * world.size
            parts[world.rank] = self.data.part(0, 0)
            return AllToAll(parts).submit(world, name)
        return world.allgather(self.data.bytes, name)

    def receive(self, world: World, handle: Any) -> list[torch.Tensor]:
        if not self._is_direct(world):
            return [taken_over(world.synchronize(handle))]
        received = AllToAll(()).receive(world, handle)
        received[world.rank] = self.data.bytes
        return received

    def _is_direct(self, world: World) -> bool:
        return world.sends_directly and self.data.device.type == "cpu"

    def waiting(self) -> AllGather:
        return self

    def held_bytes(self, world: World) -> int:
        # It, all ranks' and, sent directly, a copy for each of the others; its own then comes free.
        copies = world.size - 1 if self._is_direct(world) else 1
        return (copies + world.size) * self.data.size

    def sent_bytes(self, rank: int, ranks: int) -> int:
        return self.data.size * (ranks - 1)

    @staticmethod
    def hand_over(requests: Sequence[AllGather]) -> list[list[torch.Tensor]]:
        gathered = torch.cat([request.data.bytes for request in requests])
        return [[gathered] for _ in requests]


def copies_sent(ranks: int) -> int:
    """How often an allgather holds what a rank sends besides its result, at most: see
    ``World.sends_directly``."""
    return ranks - 1 if 1 < ranks <= MOST_DIRECT else 1


@dataclass(frozen=True)
class AllToAll(Collective):
    """Rank r gets ``parts[r]``; empty ones need not travel."""

    parts: Sequence[Sendable]

    def __post_init__(self) -> None:
        check_sendable("parts", *self.parts)

    def submit(self, world: World, name: str) -> Any:
        sizes = [part.size for part in self.parts]
        splits = torch.tensor(sizes, dtype=torch.int32, device="cpu")
        return world.alltoall(_joined(self.parts), splits, name)

    def receive(self, world: World, handle: Any) -> list[torch.Tensor]:
        data, splits = world.synchronize(handle)
        return list(taken_over(data).split(splits.tolist()))

    def waiting(self) -> AllToAll:
        return AllToAll(())

    def held_bytes(self, world: World) -> int:
        # Parts, and a copy of them where they do not lie end to end; then one of the two, and as
        # much received.
        return 2 * sum(part.size for part in self.parts)

    def sent_bytes(self, rank: int, ranks: int) -> int:
        return sum(part.size for r, part in enumerate(self.parts) if r != rank)

    @staticmethod
    def hand_over(requests: Sequence[AllToAll]) -> list[list[torch.Tensor]]:
        return [
            [request.parts[rank].bytes for request in requests] for rank in range(len(requests))
        ]


def _joined(parts: Sequence[Sendable]) -> torch.Tensor:
    """The parts end to end, without a copy where they lie like that."""
    there = [part.bytes for part in parts if part.size]
    if not there:
        return parts[0].bytes
    storage, at = there[0].untyped_storage().data_ptr(), there[0].data_ptr()
    for part in there:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != storage:
            return torch.cat(there)
        at += part.numel()
    return there[0].as_strided((at - there[0].data_ptr(),), (1,))


@dataclass(frozen=True)
class Among(Collective):
    """A request of some ranks, ``members``, numbered in their order: an alltoall of all ``ranks``.

    All ranks must take part at the same time, each with members of its own.
    local: these share a node, so that nothing leaves it.
    """

    members: Sequence[int]
    request: AllGather | AllToAll
    ranks: int
    local: bool = False

    def submit(self, world: World, name: str) -> Any:
        return self._spread().submit(world, name)

    def receive(self, world: World, handle: Any) -> list[torch.Tensor]:
        return self._found(AllToAll(()).receive(world, handle))

    def waiting(self) -> Among:
        return replace(self, request=self.request.waiting())

    def held_bytes(self, world: World) -> int:
        return self._spread().held_bytes(world)

    def sent_bytes(self, rank: int, ranks: int) -> int:
        return 0 if self.local else self._spread().sent_bytes(rank, ranks)

    @staticmethod
    def hand_over(requests: Sequence[Among]) -> list[list[torch.Tensor]]:
        received = AllToAll.hand_over([request._spread() for request in requests])
        return [own._found(parts) for own, parts in zip(requests, received, strict=True)]

    def _spread(self) -> AllToAll:
        """What each of all ranks gets."""
        if isinstance(self.request, AllGather):
            own: Sequence[Sendable] = [self.request.data] * len(self.members)
        else:
            own = self.request.parts
        parts = [own[0].part(0, 0)] * self.ranks
        for member, part in zip(self.members, own, strict=True):
            parts[member] = part
        return AllToAll(parts)

    def _found(self, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = [received[member] for member in self.members]
        return [torch.cat(own)] if isinstance(self.request, AllGather) else own


class Sent(NamedTuple):
    """A collective in flight that its step waits for no longer.

    kind: "payloads" (an AllGather), "parts" (an AllToAll), or Horovod's "allgather", "broadcast".
    """

    name: str
    kind: str
    handle: Any
