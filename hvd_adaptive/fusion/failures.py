"""Payloads of a step that arrived corrupt, and how every rank comes to know of them.

1. A rank that cannot read a payload notes it and takes part in all that is left of the step: the
   others, who may have read theirs, would wait for it for ever.
2. When all groups have come back, and before the last gradient is handed out, each rank sends the
   others one number: whether it could read all. Either every rank ends the step or none does.
3. Ranks may end the steps of several optimizers in different orders, if the backward passes came
   before. So a rank does not wait for the others' numbers while another optimizer's step is in
   progress here; it waits for them at the end of the last one. What it learns then comes too late
   for parameters that have been changed meanwhile, and the error says so.

That number is the step's last message. Should it be damaged itself, ranks may read it differently.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_adaptive.errors import PayloadError
from hvd_adaptive.exchange.exchange import FailedElsewhereError

# Of the ranks that could not read a payload so many are named.
MOST_NAMED = 8
VOID = (
    "The step is given up on every rank; its gradients are lost, and are NaN now. No parameter has "
    "changed"
)
LATE = (
    "Another optimizer's step was in progress, so ranks may have changed parameters before they "
    "knew: restore them on every rank"
)


@dataclass(eq=False)
class Ending:
    """The end of one step on this rank.

    number: the step's.  labels: of its groups.  first: the error of this rank that is to be told,
    if there is one.  name: of the collective.
    """

    world: Any
    number: int
    labels: Sequence[str]
    first: PayloadError | None = None
    name: str = ""
    _own: int = 0
    _sent: Any = None
    _life: Any = None

    def note(self, index: int, error: PayloadError) -> None:
        """This rank could not read a payload of group ``index``, or was told that another one could
        not. Its own come first."""
        told = isinstance(error, FailedElsewhereError)
        if self.first is None or (self._own < 0 and not told):
            self.first, self._own = error, -1 - index if told else 1 + index

    def send(self) -> None:
        """What this rank knows; every rank must."""
        if self.world.size > 1:
            self._life = self.world.life
            own = torch.tensor([self._own], device="cpu")
            self._sent = self.world.begin_gather(own, self.name)

    @property
    def is_current(self) -> bool:
        """Whether what was sent can still be waited for: not after Horovod's next start."""
        return self.world.is_current() and self.world.life is self._life

    def check(self, consequence: str) -> None:
        """Wait for the other ranks; PayloadError if one of them could not read a payload."""
        everyone = [self._own]
        if self._sent is not None:
            everyone = self.world.end_gather(self._sent).view(-1).tolist()
        failed = {rank: number for rank, number in enumerate(everyone) if number}
        # Those that were told by others are named only if nobody else is.
        failed = {rank: number for rank, number in failed.items() if number > 0} or failed
        if failed:
            raise self._error(failed, consequence) from self.first

    def check_own(self, consequence: str) -> None:
        """PayloadError if this rank could not read a payload; waits for nobody."""
        if self.first is not None:
            raise self._error({self.world.rank: self._own}, consequence) from self.first

    def _error(self, failed: Mapping[int, int], consequence: str) -> PayloadError:
        named = [f"rank {r} ({self._label(abs(n) - 1)})" for r, n in failed.items()]
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        return PayloadError(
            f"step {self.number}: a payload arrived corrupt at {', '.join(named[:MOST_NAMED])}"
            f"{more}. {consequence}"
        )

    def _label(self, index: int) -> str:
        return self.labels[index] if index < len(self.labels) else f"group {index}"


class Endings:
    """Steps of this process that are in progress, and ends that were sent and not waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_progress: weakref.WeakSet[Any] = weakref.WeakSet()
        self._sent: list[Ending] = []

    def begin(self, step: Any) -> None:
        """A first gradient of ``step`` has arrived."""
        with self._lock:
            self._in_progress.add(step)

    def give_up(self, step: Any) -> None:
        """It will not end."""
        with self._lock:
            self._in_progress.discard(step)

    def end(self, step: Any, own: Ending) -> None:
        """All groups of ``step`` have come back: see above. PayloadError if a rank could not read
        one."""
        # Every rank has ended the last step that had this name, or this one could not have come.
        for before in self._taken(own.name):
            before.check(LATE)
        own.send()
        with self._lock:
            self._in_progress.discard(step)
            waits = not self._in_progress or own.world.size == 1
            if not waits:
                self._sent.append(own)
        if not waits:
            own.check_own(LATE)
            return
        own.check(VOID)
        for before in self._taken():
            before.check(LATE)

    def _taken(self, name: str | None = None) -> list[Ending]:
        """Ends that are to be waited for now: all, or those of this name."""
        with self._lock:
            taken = [one for one in self._sent if name in (None, one.name)]
            self._sent = [one for one in self._sent if one not in taken]
        return [one for one in taken if one.is_current]


ENDINGS = Endings()
