"""Define Drive, one step on its way: what a worker, or the program's thread without one, does."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_adaptive.run.rank_context import RankContext
    from hvd_adaptive.run.worker import Worker

# Seconds between two looks at collectives in flight.
PAUSE = 0.0005

# Yields where the step waits: whether anything was done, or None to wait for ``Worker.wake``.
Road = Generator[bool | None, None, None]


class Drive(ABC):
    """One step, whose ``road`` a worker or the program's thread follows.

    Args:
        binding: The ranks and the exchange.
        lock: Held by the thread that takes the step further.
        worker: The thread that takes the step further; None if the program's thread does.

    Attributes:
        flushed: No further gradient will arrive, and averages may replace gradients.
        left: Set when the step is given up, so that nothing waits for other ranks any more.
        over: Set when all is done, or ``error`` is.
        is_done: All is done.
        begun: When the first gradients arrived.
    """

    step: Any

    def __init__(self, binding: RankContext, lock: Any, worker: Worker | None) -> None:
        self.binding, self.lock, self.worker = binding, lock, worker
        self.flushed = self.is_done = False
        self.left, self.over = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.begun = time.perf_counter()
        self._road = self.road()

    @abstractmethod
    def road(self) -> Road:
        """Take the step to its end; raise what ends it early."""

    @abstractmethod
    def give_up(self) -> None:
        """Give the step up, so that ranks remain in one order of collectives."""

    def go_on(self) -> bool | None:
        """Take the step to where it must wait; see ``Road``."""
        with self.lock:
            if self.over.is_set():
                return None
            try:
                return next(self._road)
            except StopIteration:
                self.is_done = True
                self.over.set()
            except BaseException as error:
                self.fail(error)
            return None

    advance = go_on  # on the worker thread; see ``worker.Work.advance``

    def complete(self) -> None:
        """Take the step to its end in the program's thread."""
        while not self.over.is_set():
            if not self.go_on() and not self.over.is_set():
                time.sleep(PAUSE)

    def fail(self, error: BaseException) -> None:
        """End the step with an error."""
        self.error = error
        self.over.set()
