"""Payloads of a step that arrived corrupt, and how every rank comes to know of them.

1. A rank that cannot read a payload notes it and takes part in all that is left of the step: the
   others, who may have read theirs, would wait for it for ever.
2. When all groups have come back, and before the last gradient is handed out, ranks send each other
   one number (``everywhere``). Either every rank ends the step or none does.

That number is the step's last message. Should it be damaged itself, ranks may read it differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.errors import PayloadError
from hvd_adaptive.exchange.exchange import FailedElsewhereError

if TYPE_CHECKING:
    from hvd_adaptive.transport.world import World

# Of the ranks that could not read a payload so many are named.
MOST_NAMED = 8


class Failures:
    """Of one rank in one step.

    first: the error to be told.
    """

    def __init__(self) -> None:
        self.first: PayloadError | None = None
        self._number = 0

    def note(self, index: int, error: PayloadError) -> None:
        """This rank could not read a payload of group ``index``, or was told that another one could
        not. Its own come first."""
        told = isinstance(error, FailedElsewhereError)
        if self.first is None or (self._number < 0 and not told):
            self.first, self._number = error, -1 - index if told else 1 + index

    def everywhere(self, world: World | Any, name: str) -> dict[int, int]:
        """Groups that could not be read, by rank; every rank must ask. Nothing if all is well."""
        own = torch.tensor([self._number], device="cpu")
        everyone = [self._number]
        if world.size > 1:
            everyone = world.gather_equal(own, name).view(-1).tolist()
        failed = {rank: number for rank, number in enumerate(everyone) if number}
        # Those that were told by others are named only if nobody else is.
        origins = {rank: number for rank, number in failed.items() if number > 0} or failed
        return {rank: abs(number) - 1 for rank, number in origins.items()}


def step_failed(number: int, failed: Mapping[int, int], labels: list[str]) -> PayloadError:
    """The error that every rank raises. labels: of the groups."""
    named = [
        f"rank {rank} ({labels[group] if group < len(labels) else f'group {group}'})"
        for rank, group in failed.items()
    ]
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return PayloadError(
        f"step {number}: a payload arrived corrupt at {', '.join(named[:MOST_NAMED])}{more}. The "
        "step is given up on every rank; its gradients are lost, and are NaN now. No parameter has "
        "changed"
    )
