"""What is still in flight of steps that were given up before they had ended.

Groups set out as soon as a rank knows that all ranks take part, so one rank may have sent a group
of such a step that another one had not reached. Horovod waits for the other one's; it would warn of
that for good, and take what is sent next under the same name for it. So each attempt at a step has
names of its own and, once all ranks are known to be there and to have given up as often, each
submits something in place of what it had not sent. The step ends when all of that has, and then
its names may be used again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.exchange.collectives import AllGather, AllToAll, Collective

if TYPE_CHECKING:
    from hvd_adaptive.exchange.world import World


class GivenUp:
    """Of one compressor among the same ranks."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._owed: list[tuple[str, type[Collective]]] = []
        self._settled: list[Any] = []

    def take(self, step: Any) -> None:
        """A Step or a JoinedStep that is given up now."""
        self._owed += step.unsent()
        self._handles += step.abandon()

    def settle(self, world: World, device: torch.device) -> None:
        """All ranks are there and have given up as often as this one: nothing is owed any longer.

        device: where their gradients are.
        """
        owed, self._owed = self._owed, []
        self._settled += self._handles
        self._handles = []
        nothing = torch.zeros(1, dtype=torch.uint8, device=device)
        for name, kind in owed:
            to_each = AllToAll([nothing] * world.size)
            request = AllGather(nothing) if kind is AllGather else to_each
            self._settled.append(request.submit(world, name))

    def end(self, world: World) -> None:
        """The step that settled has ended: so has, or soon will, what is in flight."""
        handles, self._settled = self._settled, []
        for handle in handles:
            with suppress(RuntimeError):  # of the collective, which nobody reads
                world.hvd.synchronize(handle)

    def excuse(self) -> None:
        """Some ranks have called hvd.join(): they may not know of what is owed."""
        self._owed, self._handles = [], []
