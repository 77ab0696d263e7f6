"""Define Driver, which takes gradients through the steps of one compressor, and Drive, one step.

A session (hooks/) finds the parameters' slots and calls, for each step,

    start    when the step's first gradients are there; others join the drive as they arrive
    wait     when no further gradient will arrive
    end      after averages were returned

Everything that needs no user code runs on a worker thread meanwhile: ranks compare their positions
in training, groups are encoded, sent, received and decoded, tables are fitted. ``wait`` raises the
worker's error. With ``Tuning(worker=False)``, and on a GPU, hooks send what they can, and ``wait``
does the rest, in the program's thread.

There are two kinds of drives. Those of ordered_drive.py are for ranks that pair collectives by
their order (torch.distributed). Horovod pairs them by name, and calls optimizers in any order
(hooks/horovod/drive.py).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from hvd_adaptive.run.worker import FIND_IT, Worker

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.run.rank_context import RankContext

logger = logging.getLogger("hvd_adaptive")


# Seconds between two looks at collectives in flight.
PAUSE = 0.0005

# Yields where the step waits: whether anything was done, or None to wait for ``Worker.wake``.
Road = Generator[bool | None, None, None]


class Drive(ABC):
    """One step, whose ``road`` a worker or the program's thread follows.

    Args:
        lock: Held by the thread that takes the step further.
        worker: The thread that takes the step further; None if the program's thread does.

    Attributes:
        flushed: No further gradient will arrive, and averages may replace gradients.
        left: Set when the step is given up, so that nothing waits for other ranks any more.
        over: Set when all is done, or ``error`` is.
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

    advance = go_on  # on the worker thread

    def complete(self) -> None:
        """Take the step to its end in the program's thread."""
        while not self.over.is_set():
            if not self.go_on() and not self.over.is_set():
                time.sleep(PAUSE)

    def fail(self, error: BaseException) -> None:
        """End the step with an error."""
        self.error = error
        self.over.set()


class Driver:
    """Take gradients through the steps of one compressor.

    Attributes:
        drive: The step in progress, a Drive, or None.
        wake: Function that has the worker thread look at the step in progress.
    """

    make_lock = threading.RLock  # tests replace it

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self._attempt = 0
        self.drive: Any = None
        self._worker = Worker(weakref.ref(self))
        self.wake = self._worker.wake

    @property
    def is_idle(self) -> bool:
        """Return whether no step is in progress."""
        return self.drive is None

    def start(self, make: Callable[[int, Any, Worker | None], Drive], on_cpu: bool) -> None:
        """Begin a step; one in progress is given up. ``make`` returns the step, given the attempt
        at it, a lock, and the worker or None.
        """
        if self.drive is not None:
            self.give_up()
        works = on_cpu and self.compressor.settings.tuning.worker
        self.drive = make(self._attempt, self.make_lock(), self._worker if works else None)

    def wait(self) -> None:
        """Wait until averages have replaced all gradients, none of which will arrive any more.

        RankMismatchError and PayloadError are raised on all ranks.
        """
        drive = self.drive
        self.compressor._training.meter.add(arrival_s=time.perf_counter() - drive.begun)
        drive.flushed = True
        if drive.worker is not None:
            warn = functools.partial(self.warn_of_stall, drive.binding.world.rank)
            self._worker.wait_for(drive.over, warn)
        else:
            drive.complete()
        if drive.error is not None:
            self.give_up()
            raise drive.error

    def end(self) -> None:
        """End the step, whose averages have been returned."""
        drive, compressor = self.drive, self.compressor
        step, binding = drive.step, drive.binding
        if step.counts:
            compressor.step = step.number + 1
        self._attempt, self.drive = 0, None
        compressor._training.meter.finish()
        step.commit()
        if binding.settings.monitor is not None:
            binding.monitored.step_ended(binding, step.number, step.layout, step.device)

    def give_up(self) -> None:
        """Give up the step in progress, if there is one. Payloads of the next attempt differ, so
        ranks detect that they gave up different attempts.
        """
        drive, self.drive = self.drive, None
        if drive is None:
            return
        drive.left.set()
        with drive.lock:
            drive.over.set()
            drive.give_up()
        self._attempt += 1
        self.compressor._training.meter.give_up()

    def describe(self) -> str:
        """Return what the step in progress waits for, in lines; "" if there is none."""
        drive = self.drive
        return "" if drive is None or drive.step is None else drive.step.describe()

    def warn_of_stall(self, rank: int) -> None:
        """Log that ``rank``, this one, waits for others, for what, and how to find them."""
        waits = self.describe() or "it has sent nothing yet"
        logger.warning("rank %d still waits for other ranks: %s\n%s", rank, waits, FIND_IT)
