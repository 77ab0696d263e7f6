"""Complete the collectives in flight of steps that were given up before they had ended.

A rank sends groups as soon as it knows that all ranks take part. It may have sent a group of such a
step before another rank reached that group. Horovod then waits for the other rank. It would warn of
that from then on, and pair the collective with the next one of the same name. Each attempt at a
step therefore has its own names. Once all ranks are known to take part in the same attempt, they
exchange lists of what is in flight, and each submits a substitute for what it had not sent. The
step ends after all of these collectives; then its names may be used again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.coding.payload import OwnedBuffer
from hvd_adaptive.transport.collectives import AllGather, AllToAll, InFlight

if TYPE_CHECKING:
    from hvd_adaptive.transport.horovod_world import HorovodWorld


# Substitutes, by kind, for collectives that a rank never sent. Horovod pairs them by name and
# operation. If tensors then differ in dtype or shape, both end with an error, which is enough.
KINDS: dict[str, Callable[[HorovodWorld, str, OwnedBuffer], Any]] = {
    "payloads": lambda world, name, nothing: AllGather(nothing).submit(world, name),
    "parts": lambda world, name, nothing: AllToAll([nothing] * world.size).submit(world, name),
    "allgather": lambda world, name, nothing: world.allgather(nothing.bytes, name),
    "broadcast": lambda world, name, nothing: world.broadcast_from_root(nothing.bytes, name),
}


class AbandonedSteps:
    """The given-up collectives of one compressor among the same ranks.

    ``attempt`` is the number of the attempt at the step in progress, from 0; ``flying`` is in
    flight.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self._names: set[str] = set()
        self.flying: list[InFlight] = []
        self._substitutes: list[Any] = []
        self._generation: Any = None

    def add_step(self, step: Any, generation: Any) -> None:
        """Add a step that is given up, and that began in ``generation`` of Horovod."""
        self._bury(generation)
        self.flying += step.abandon()  # its worker then adds no more names
        self._names |= step.names
        self.attempt += 1

    def add(self, sent: InFlight, generation: Any) -> None:
        """Add a collective for which this rank no longer waits."""
        self._bury(generation)
        self._names.add(sent.name)
        self.flying.append(sent)

    def _bury(self, generation: Any) -> None:
        """Forget what was in flight in an earlier generation of Horovod."""
        if generation is not self._generation:
            self._generation, self.flying, self._substitutes = generation, [], []

    def complete(self, world: HorovodWorld, label: str, device: torch.device) -> None:
        """Complete what is in flight on any rank. All ranks call this at the same attempt.

        A rank may give this attempt up before it has read the other ranks' lists. A collective
        therefore remains in its list until it ends. ``label`` ends the names of this method's
        collectives.
        """
        self._bury(world.generation)
        nothing = OwnedBuffer.copy_of(torch.zeros(4, dtype=torch.uint8, device=device))
        flying = [sent for sent in self.flying if not world.poll(sent.handle)]
        own = [(sent.name, sent.kind) for sent in flying]
        everyone = world.gather_objects(own, f"hvd_adaptive.abandoned.{label}")
        # In one order on all ranks.
        for name, kind in sorted({(name, kind) for of_rank in everyone for name, kind in of_rank}):
            if name not in self._names:
                self._substitutes.append(KINDS[kind](world, name, nothing))
                self._names.add(name)

    def end(self, world: HorovodWorld) -> None:
        """End the step, after what was in flight when it drained."""
        self._bury(world.generation)
        for handle in [sent.handle for sent in self.flying] + self._substitutes:
            with suppress(RuntimeError):  # no rank reads the result
                world.synchronize(handle)
        self.attempt, self._names, self.flying, self._substitutes = 0, set(), [], []
