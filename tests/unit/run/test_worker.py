"""A worker's thread: when it looks for work, and when it ends."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from types import SimpleNamespace

from hvd_adaptive.run import driver as driver_module
from hvd_adaptive.run.driver import Worker

SECONDS = 20.0


class Counting:
    """Work of so many turns."""

    flushed = False

    def __init__(self, turns: int) -> None:
        self.left, self.done = turns, threading.Event()

    def advance(self):
        if not self.left:
            self.done.set()
            return None
        self.left -= 1
        return self.left % 2 == 0


def test_a_worker_sleeps_when_there_is_nothing_to_do_and_ends_with_its_owner():
    work = Counting(20)
    worker = Worker(lambda: SimpleNamespace(drive=work))
    worker.wake()
    assert work.done.wait(SECONDS)
    thread = worker._thread
    time.sleep(0.05)
    work.left = 5
    time.sleep(0.05)
    assert work.left == 5, "nobody has woken it"
    found = weakref.ref(worker)
    del worker
    gc.collect()
    thread.join(SECONDS)
    assert found() is None and not thread.is_alive()


def test_a_long_wait_is_told_again_and_again(monkeypatch):
    monkeypatch.setattr("hvd_adaptive.run.driver.STALL", 0.02)
    event, calls = threading.Event(), []

    def is_late():
        calls.append(1)
        if len(calls) == 3:
            event.set()

    Worker(lambda: None).wait_for(event, is_late)
    assert len(calls) == 3


def test_a_worker_starts_again_after_a_fork():
    work = Counting(1)
    worker = Worker(lambda: SimpleNamespace(drive=work))
    worker.wake()
    assert work.done.wait(SECONDS)
    child = os.fork()
    if child == 0:
        work.done.clear()
        work.left = 1
        worker.wake()
        os._exit(0 if work.done.wait(SECONDS) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_end_before_the_interpreter(monkeypatch):
    """A thread of torch's that runs while the interpreter ends may crash."""
    monkeypatch.setattr(driver_module, "_running", weakref.WeakSet())
    work = Counting(1)
    worker = Worker(lambda: SimpleNamespace(drive=work))
    worker.wake()
    assert work.done.wait(SECONDS)
    driver_module.stop_all()
    assert not worker._thread.is_alive()
