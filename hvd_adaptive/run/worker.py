"""Define Worker, a thread that exchanges groups while the backward pass goes on.

The program's thread hands gradients over (``Step.arrive``) and, after the backward pass, requests
averages (``Step.result``). In between the worker encodes and submits groups, submits their second
stages, and decodes what has been received. It never waits for another rank: it polls, and leaves
what is not there to the program's thread. A step without a worker is therefore the same step, only
later, and both compute the same bits.

Who owns what: the program's thread owns what has arrived; the thread that holds ``Step.lock`` owns
what flies and what has been received. After ``Step.launch_all`` the worker does nothing for the
step, so that ``Step.result`` needs no lock. The worker holds no reference to a step while it
sleeps.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

# Seconds between two looks at collectives in flight, and the same if the program waits for the end.
PAUSE, LAST_PAUSE = 0.001, 0.00025
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


class Worker:
    """A thread that advances the step of one session.

    Args:
        find: Function that returns the Driver while it exists, to which nothing here may refer
            strongly. ``advance`` of its step in progress does what can be done without waiting (see
            ``driver.Road``).
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
