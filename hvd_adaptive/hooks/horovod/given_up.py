"""What is still in flight of steps that were given up before they had ended.

Groups set out as soon as a rank knows that all ranks take part, so one rank may have sent a group
of such a step that another one had not reached. Horovod waits for the other one's; it would warn of
that for good, and take what is sent next under the same name for it. So each attempt at a step has
names of its own and, once all ranks are known to be there and to be at the same attempt, they tell
each other what is in flight, and each submits something in place of what it had not sent. The step
ends when all of that has, and then its names may be used again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.coding.sendable import Sendable
from hvd_adaptive.transport.collectives import AllGather, AllToAll, Sent

if TYPE_CHECKING:
    from hvd_adaptive.transport.horovod_world import HorovodWorld


# In place of a collective of this kind that a rank never sent. Horovod pairs them by name and
# operation; if tensors then differ in dtype or shape it ends both with an error, which is enough.
KINDS: dict[str, Callable[[HorovodWorld, str, Sendable], Any]] = {
    "payloads": lambda world, name, nothing: AllGather(nothing).submit(world, name),
    "parts": lambda world, name, nothing: AllToAll([nothing] * world.size).submit(world, name),
    "allgather": lambda world, name, nothing: world.hvd.allgather_async(
        nothing.bytes, name=name, process_set=world.process_set
    ),
    "broadcast": lambda world, name, nothing: world.hvd.broadcast_async(
        nothing.bytes, world.root, name=name, process_set=world.process_set
    ),
}


class GivenUp:
    """Of one compressor among the same ranks.

    attempt: at the step in progress, the first one being 0.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self._names: set[str] = set()
        self._flying: list[Sent] = []
        self._drained: list[Any] = []
        self._life: Any = None

    def take(self, step: Any, life: Any) -> None:
        """A Step or a JoinedStep that is given up now. life: HorovodWorld.life when it began."""
        self._bury(life)
        self._names |= step.names
        self._flying += step.abandon()
        self.attempt += 1

    def leave(self, sent: Sent, life: Any) -> None:
        """A collective that this rank waits for no longer."""
        self._bury(life)
        self._names.add(sent.name)
        self._flying.append(sent)

    def _bury(self, life: Any) -> None:
        """Nothing is in flight of a life of Horovod that is over."""
        if life is not self._life:
            self._life, self._flying, self._drained = life, [], []

    def drain(self, world: HorovodWorld, label: str, device: torch.device) -> None:
        """All ranks are at this attempt, and here: what is in flight anywhere comes to its end.

        label: ends the names of its collectives.  device: where gradients are.
        """
        self._bury(world.life)
        hvd, nothing = world.hvd, Sendable.copy_of(torch.zeros(4, dtype=torch.uint8, device=device))
        flying = [sent for sent in self._flying if not hvd.poll(sent.handle)]
        self._drained += [sent.handle for sent in self._flying]
        self._flying = []
        for name, kind in _told(world, flying, f"hvd_adaptive.given_up.{label}"):
            if name not in self._names:
                self._drained.append(KINDS[kind](world, name, nothing))
                self._names.add(name)

    def end(self, world: HorovodWorld) -> None:
        """The step has ended; wait for what was in flight when it drained."""
        self._bury(world.life)
        for handle in self._drained:
            with suppress(RuntimeError):  # of a collective that nobody reads
                world.hvd.synchronize(handle)
        self.attempt, self._names, self._flying, self._drained = 0, set(), [], []


def _told(world: HorovodWorld, own: list[Sent], name: str) -> list[tuple[str, str]]:
    """Name and kind of all that is in flight on some rank, in the same order on all of them."""
    text = json.dumps([(sent.name, sent.kind) for sent in own]).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    lengths = world.gather_equal(
        torch.tensor([data.numel()], device="cpu"), f"{name}.lengths"
    ).view(-1)
    everyone = world.hvd.allgather(data, name=name, process_set=world.process_set)
    told = [json.loads(bytes(part.tolist())) for part in everyone.split(lengths.tolist())]
    return sorted({(name, kind) for of_rank in told for name, kind in of_rank})
