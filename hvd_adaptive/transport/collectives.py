"""Define collectives, which exchanges yield, and two ways to perform them.

Over a World a rank ``submit``s a collective and ``receive``s its result. In a simulation,
``hand_over`` performs those of all ranks in one process. Collectives send ``OwnedBuffer`` memory,
because they read it while other groups are encoded and decoded. They receive uint8 tensors, 1-D, of
any lengths.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from hvd_adaptive.base.tensors import taken_over
from hvd_adaptive.coding.payload import OwnedBuffer, check_owned
from hvd_adaptive.transport.world import MOST_DIRECT, World

# Horovod counts the bytes of a collective's result in 32-bit signed displacements.
LARGEST_COLLECTIVE = 2**31 - 1


class Collective(ABC):
    """One rank's part in a collective."""

    @abstractmethod
    def submit(self, world: World, name: str) -> Any:
        """Submit, and return a handle; every rank must submit under this name."""

    @abstractmethod
    def receive(self, world: World, handle: Any) -> list[torch.Tensor]:
        """Wait, and return what each rank sent to this one, in rank order."""

    @abstractmethod
    def waiting(self) -> Collective:
        """Return what ``receive`` needs after ``submit``, without the memory that is sent, which
        Horovod keeps as long as needed.
        """

    @abstractmethod
    def held_bytes(self, world: World) -> int:
        """Return the bytes held from ``submit`` to ``receive``, including the result, if other
        ranks send as much as this one.
        """

    @abstractmethod
    def sent_bytes(self, rank: int, ranks: int) -> int:
        """Return the bytes that this rank sends."""

    @staticmethod
    @abstractmethod
    def hand_over(requests: Sequence[Any]) -> list[list[torch.Tensor]]:
        """Return what each rank receives, given all ranks' collectives."""


@dataclass(frozen=True)
class AllGather(Collective):
    """Send ``data`` to every rank.

    Horovod's result is one tensor, because it does not return the ranks' lengths; payloads contain
    them (``coding.payload.payloads_in``). A few of its ranks on the CPU send to each other directly
    (``World.sends_directly``); then the result has a tensor for each rank.
    """

    data: OwnedBuffer

    def __post_init__(self) -> None:
        check_owned("data", self.data)

    def submit(self, world: World, name: str) -> Any:
        data = self.data.bytes
        if not world.sends_directly or not data.is_cpu:
            return world.allgather(data, name)
        splits = torch.full((world.size,), self.data.size, dtype=torch.int32, device="cpu")
        splits[world.rank] = 0
        others = world.size - 1
        return world.alltoall(data if others == 1 else data.repeat(others), splits, name)

    def receive(self, world: World, handle: Any) -> list[torch.Tensor]:
        result = world.synchronize(handle)
        if isinstance(result, list):
            return result
        if not world.sends_directly or not self.data.bytes.is_cpu:
            return [taken_over(result)]
        data, splits = result
        received = list(data.split(splits.tolist()))
        received[world.rank] = self.data.bytes
        return received

    def waiting(self) -> AllGather:
        return self

    def held_bytes(self, world: World) -> int:
        # All ranks' data and this rank's, of which direct sending needs a copy for each other rank.
        direct = world.sends_directly and self.data.bytes.is_cpu
        copies = world.size - 1 if direct else 1
        return (copies + world.size) * self.data.size

    def sent_bytes(self, rank: int, ranks: int) -> int:
        return self.data.size * (ranks - 1)

    @staticmethod
    def hand_over(requests: Sequence[AllGather]) -> list[list[torch.Tensor]]:
        gathered = torch.cat([request.data.bytes for request in requests])
        return [[gathered] for _ in requests]


def copies_sent(ranks: int) -> int:
    """Return the most copies of a rank's data that an allgather holds besides its result."""
    return ranks - 1 if 1 < ranks <= MOST_DIRECT else 1


@dataclass(frozen=True)
class AllToAll(Collective):
    """Send ``parts[r]`` to rank r; empty parts are not sent."""

    parts: Sequence[OwnedBuffer]

    def __post_init__(self) -> None:
        check_owned("parts", *self.parts)

    @functools.cached_property
    def sizes(self) -> list[int]:
        return [part.size for part in self.parts]

    def submit(self, world: World, name: str) -> Any:
        splits = torch.tensor(self.sizes, dtype=torch.int32, device="cpu")
        return world.alltoall(_joined(self.parts), splits, name)

    def receive(self, world: World, handle: Any) -> list[torch.Tensor]:
        result = world.synchronize(handle)
        if isinstance(result, list):
            return result
        data, splits = result
        return list(taken_over(data).split(splits.tolist()))

    def waiting(self) -> AllToAll:
        return _SENT

    def held_bytes(self, world: World) -> int:
        # Either the parts and a copy, if they are not contiguous, or one of both and the result.
        return 2 * sum(self.sizes)

    def sent_bytes(self, rank: int, ranks: int) -> int:
        return sum(self.sizes) - self.sizes[rank]

    @staticmethod
    def hand_over(requests: Sequence[AllToAll]) -> list[list[torch.Tensor]]:
        return [
            [request.parts[rank].bytes for request in requests] for rank in range(len(requests))
        ]


_SENT = AllToAll(())  # what receives, of any alltoall


class EqualParts(AllToAll):
    """An alltoall of parts of one length, which all ranks know; it is complete once submitted."""

    def submit(self, world: World, name: str) -> Any:
        return world.alltoall_equal(_joined(self.parts))

    def receive(self, world: World, handle: Any) -> list[torch.Tensor]:
        return list(handle.chunk(world.size))

    def waiting(self) -> EqualParts:
        return EqualParts(())


def _joined(parts: Sequence[OwnedBuffer]) -> torch.Tensor:
    """Return the parts concatenated, without a copy if they are contiguous."""
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
    """A collective of some ranks, performed as an alltoall of all ranks, each with its own members.

    Attributes:
        members: The ranks, in the order of ``request``.
        request: Their collective.
        local: The members share a node, so that nothing is sent over the network.
    """

    members: Sequence[int]
    request: AllGather | AllToAll
    ranks: int
    local: bool = False

    def submit(self, world: World, name: str) -> Any:
        return self._spread().submit(world, name)

    def receive(self, world: World, handle: Any) -> list[torch.Tensor]:
        return self._found(_SENT.receive(world, handle))

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
        """Return the alltoall of all ranks."""
        if isinstance(self.request, AllGather):
            own: Sequence[OwnedBuffer] = [self.request.data] * len(self.members)
        else:
            own = self.request.parts
        parts = [own[0].part(0, 0)] * self.ranks
        for member, part in zip(self.members, own, strict=True):
            parts[member] = part
        return AllToAll(parts)

    def _found(self, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = [received[member] for member in self.members]
        return [torch.cat(own)] if isinstance(self.request, AllGather) else own


class InFlight(NamedTuple):
    """A collective in flight whose step was given up.

    ``kind`` is "payloads" (an AllGather), "parts" (an AllToAll), or Horovod's "allgather" or
    "broadcast".
    """

    name: str
    kind: str
    handle: Any
