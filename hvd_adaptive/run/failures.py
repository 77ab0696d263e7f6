"""Make every rank fail if a payload of a step arrived corrupt at one of them.

1. A rank that cannot read a payload records it and takes part in the rest of the step, because the
   other ranks wait for it.
2. After all groups are received and before the last gradient is returned, ranks exchange one number
   (``everywhere``), and what else they must know of each other. Either every rank completes the
   step or none does.

These numbers are the step's last message. If it is corrupted itself, ranks may read it differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.exchange.exchange import FailedElsewhereError

if TYPE_CHECKING:
    from hvd_adaptive.transport.world import World

# Most ranks that the error names.
MOST_NAMED = 8


class Failures:
    """Failures of one rank in one step.

    Attributes:
        first: The error to raise.
    """

    def __init__(self) -> None:
        self.first: PayloadError | None = None
        self._number = 0

    def note(self, index: int, error: PayloadError) -> None:
        """Record that this rank, or another one, could not read a payload of group ``index``.

        Failures of this rank take precedence.
        """
        elsewhere = isinstance(error, FailedElsewhereError)
        if self.first is None or (self._number < 0 and not elsewhere):
            self.first, self._number = error, -1 - index if elsewhere else 1 + index

    def everywhere(
        self, world: World | Any, name: str, more: Sequence[float] = ()
    ) -> tuple[dict[int, int], list[list[float]]]:
        """Return the groups that could not be read, by rank, and all ranks' ``more``; a collective.

        Args:
            world: The ranks.
            name: Name of the collective.
            more: Numbers of this rank, as many on all ranks.
        """
        numbers = torch.tensor(list(more), dtype=torch.float64, device="cpu")
        own = torch.cat([torch.tensor([self._number], device="cpu"), numbers.view(torch.int64)])
        everyone = world.gather_equal(own, name) if world.size > 1 else own[None]
        rows = everyone[:, 1:].contiguous().view(torch.float64).tolist()
        of_ranks = everyone[:, 0].tolist()
        if not any(of_ranks):
            return {}, rows
        failed = {rank: number for rank, number in enumerate(of_ranks) if number}
        # Ranks that failed because of another rank are named only if no other rank is.
        origins = {rank: number for rank, number in failed.items() if number > 0} or failed
        return {rank: abs(number) - 1 for rank, number in origins.items()}, rows


def step_failed(number: int, failed: Mapping[int, int], labels: list[str]) -> PayloadError:
    """Return the error that every rank raises; ``labels`` are those of the groups."""
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
