"""Steps that were given up before they had ended, and what of them is still in flight.

Groups set out as soon as a rank knows that all ranks take part, so one rank may have sent a group
of such a step that another one had not reached, and Horovod waits for the other one's. Hence

- no name of a collective is used again: each attempt at a step has a number of its own;
- once all ranks are known to be there and to have given up as often, each submits something in
  place of what it had not sent, so that Horovod's collectives end (or its stall check would warn of
  them for good, and end the job where it was told to).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.exchange.collectives import AllGather, Collective

if TYPE_CHECKING:
    from hvd_adaptive.exchange.world import World
    from hvd_adaptive.fusion.step import Step


class GivenUp:
    """Of one binding, and of those that replace it among the same ranks.

    attempts: given up at steps that have ended since; the same on all ranks.
    """

    def __init__(self) -> None:
        self.attempts = 0
        self._handles: list[Any] = []
        self._owed: list[tuple[str, Collective]] = []

    def take(self, step: Any) -> None:
        """A Step or a JoinedStep that is given up now."""
        unsent = list(step.unsent())
        self._handles += step.abandon()
        self._owed += unsent

    def settle(self, world: World) -> None:
        """All ranks are there, and agree on how many attempts they have given up."""
        self._handles += [request.submit(world, name) for name, request in self._owed]
        self._owed = []

    def excuse(self) -> None:
        """Some ranks have called hvd.join(): they know of nothing that is owed."""
        self._owed = []

    def sweep(self, world: World) -> None:
        """Clear away collectives that have ended meanwhile, be it in an error (of a Horovod that
        was shut down); wait for none."""
        for handle in list(self._handles):
            if world.hvd.poll(handle):
                self._handles.remove(handle)
                with suppress(RuntimeError):
                    world.hvd.synchronize(handle)


def unsent(step: Step) -> Iterator[tuple[str, Collective]]:
    """What ``step`` has not sent, of all that another rank may have: names, and something to send
    that nobody reads."""
    exchange, ranks = step.binding.exchange, step.binding.world.size
    if not exchange.settled:
        return
    nothing = torch.zeros(1, dtype=torch.uint8, device=step.device)
    for index in range(len(step.layout.groups)):
        for stage, kind in enumerate(step.opening(index)):
            if stage >= step.stages_sent(index):
                data = nothing if kind is AllGather else [nothing] * ranks
                yield step.collective_name(index, stage), kind(data)
