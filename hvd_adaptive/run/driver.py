"""Define Driver, which takes gradients through the steps of one compressor; Drive, one step; and
Worker, the thread that follows it during the backward pass.

A session (hooks/) finds the parameters' slots and calls, for each step,

    start    when the step's first gradients are there; others join the drive as they arrive
    wait     when no further gradient will arrive
    end      after averages were returned

Everything that needs no user code runs on the worker thread meanwhile: ranks compare their
positions in training, groups are encoded, sent, received and decoded, tables are fitted. ``wait``
raises the worker's error. With ``Tuning(worker=False)``, and on a GPU, hooks send what they can,
and ``wait`` does the rest, in the program's thread: the same step, only later, with the same bits.

The program's thread owns what has arrived. Whoever holds the drive's lock owns what flies and what
has been received.

There are two kinds of drives. Those of ordered_drive.py are for ranks that pair collectives by
their order (torch.distributed). Horovod pairs them by name, and calls optimizers in any order
(hooks/horovod/drive.py).
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

import torch

from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.run.rank_context import RankContext

logger = logging.getLogger("hvd_adaptive")

# Seconds between two looks at collectives in flight: of the worker during the backward pass, of the
# worker for which the program waits, and of the program's thread.
PAUSE, LAST_PAUSE, OWN_PAUSE = 0.001, 0.00025, 0.0005
# On Linux, threads have priorities of their own. If threads share a core, the program's thread goes
# first: the backward pass determines when gradients arrive.
NICENESS = 10
# Seconds of a wait after which a warning is logged, and again after as many.
STALL = 60.0
# No rank knows which one is missing: a collective of torch.distributed does not say it.
FIND_IT = (
    "a rank that logs no such line has not come this far, or has stopped: `py-spy dump --pid PID` "
    "on its machine shows where; if every rank logs one, the rank that lacks a collective which "
    "others list is behind"
)

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

    def fail(self, error: BaseException) -> None:
        """End the step with an error."""
        self.error = error
        self.over.set()


class Driver:
    """Take gradients through the steps of one compressor.

    Attributes:
        drive: The step in progress, a Drive, or None.
        attempt: Number of the attempt at it.
        wake: Function that has the worker thread look at the step in progress.
    """

    make_lock = threading.RLock  # tests replace it

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self.attempt = 0
        self.drive: Any = None
        self._worker = Worker(weakref.ref(self))
        self.wake = self._worker.wake

    def start(self, make: Callable[[Any, Worker | None], Drive], on_cpu: bool) -> None:
        """Begin a step, which ``make`` returns, given a lock, and the worker or None. One that is
        in progress is given up before.
        """
        if self.drive is not None:
            self.give_up()
        works = on_cpu and self.compressor.settings.tuning.worker
        self.drive = make(self.make_lock(), self._worker if works else None)

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
            while not drive.over.is_set():
                if not drive.go_on() and not drive.over.is_set():
                    time.sleep(OWN_PAUSE)
        if drive.error is not None:
            self.give_up()
            raise drive.error

    def end(self) -> None:
        """End the step, whose averages have been returned."""
        drive, compressor = self.drive, self.compressor
        step, binding = drive.step, drive.binding
        if step.counts:
            compressor.step = step.number + 1
        self.attempt, self.drive = 0, None
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
        self.attempt += 1
        self.compressor._training.meter.give_up()

    def describe(self) -> str:
        """Return what the step in progress waits for, in lines; "" if there is none."""
        drive = self.drive
        return "" if drive is None or drive.step is None else drive.step.describe()

    def warn_of_stall(self, rank: int) -> None:
        """Log that ``rank``, this one, waits for others, for what, and how to find them."""
        waits = self.describe() or "it has sent nothing yet"
        logger.warning("rank %d still waits for other ranks: %s\n%s", rank, waits, FIND_IT)


class Worker:
    """A thread that advances the step of one session.

    Args:
        find: Function that returns the Driver while it exists, to which nothing here may refer
            strongly. ``advance`` of its drive does what can be done without waiting (see
            ``Road``).
    """

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = -1
        self._stopped = False

    def wake(self) -> None:
        """Look for work: something has arrived, or may be sent."""
        if self._thread is None or self._process != os.getpid():
            self._start()  # threads do not survive a fork
        self._wake.set()

    def wait_for(self, event: threading.Event, is_late: Callable[[], None]) -> None:
        """Wait until the thread has set an event; call ``is_late`` every STALL seconds."""
        self.wake()
        while not event.wait(STALL):
            is_late()

    def stop(self) -> None:
        """End the thread; what is in progress stays with the program's thread."""
        self._stopped = True
        self._wake.set()

    def _start(self) -> None:
        self._wake, self._process = threading.Event(), os.getpid()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(self), self._wake),
            name="hvd_adaptive.worker",
            daemon=True,
        )
        _running.add(self)
        weakref.finalize(self, self._wake.set)
        self._thread.start()


def gather_patiently(world: Any, values: torch.Tensor, warn: Callable[[], None]) -> torch.Tensor:
    """Return all ranks' tensors of equal shape, stacked; call ``warn`` every STALL seconds."""
    begun, pause = world.begin_gather(values), PAUSE / 8
    late = time.monotonic() + STALL
    while not world.is_gathered(begun):
        if time.monotonic() >= late:
            warn()
            late += STALL
        time.sleep(pause)
        pause = min(2 * pause, PAUSE)
    return world.end_gather(begun)


def _run(find_worker: weakref.ref[Worker], wake: threading.Event) -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    with torch.no_grad():
        while True:
            wake.wait()
            wake.clear()
            done: bool | None = True
            pause = PAUSE
            while done is not None:
                if not done:
                    wake.wait(pause)
                    wake.clear()
                worker = find_worker()
                if worker is None or worker._stopped:
                    return
                driver, done = worker._find(), None
                step = None if driver is None else driver.drive
                if step is not None:
                    done, pause = step.advance(), LAST_PAUSE if step.flushed else PAUSE
                del worker, driver, step  # the thread keeps none while it sleeps


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


def stop_all() -> None:
    """End the threads of all workers, before the interpreter ends."""
    for worker in list(_running):
        worker.stop()
        thread = worker._thread
        if thread is not None and worker._process == os.getpid():
            thread.join(timeout=5.0)


atexit.register(stop_all)
