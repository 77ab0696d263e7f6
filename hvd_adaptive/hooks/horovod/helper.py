"""Steps whose gradients are all there come to their end while the program does something else.

Stock Horovod's allreduces end once the hooks of all ranks have fired, whatever the programs do
next. Here a step needs work of each rank: statistics, payloads, second stages. Its first
``decompress`` does that. But where a process has several optimizers, ranks may call them in
different orders, and each waits in one for what the others would send in another. So a thread
watches the sessions of a process that has several, and a step that has been ready for ``PATIENCE``
gets a thread that does what ``decompress`` would.

No rank waits for ever where stock Horovod would not:

1. A step is ready once all its placeholders have come back reduced: every rank has submitted all
   of them. That is true on all ranks or on none, and needs no further call of any program.
2. On each rank a ready step is brought to its end by a thread that waits for nothing else: the
   program's in ``decompress``, or a helper. Each holds the lock of one session alone.
3. All that they wait for are collectives of this step, which the same threads of the other ranks
   submit. Horovod pairs them by name, and names differ between sessions.

So steps end independently of each other. One that is not ready is waited for inside Horovod, as in
stock Horovod.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

# A program that calls ``step`` by itself is seldom slower.
PATIENCE = 0.05


class Helped(Protocol):
    """What a watch looks at."""

    def wants_watch(self) -> bool:
        """Begin to help with a step that has been ready for long; whether to look again soon."""


class Watch:
    """A thread that looks after the sessions of this process, as soon as there are several."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, session: Helped) -> None:
        """Look after a session from now on."""
        with self._lock:
            self._sessions.add(session)
            if len(self._sessions) > 1 and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(
                    target=self._run, name="hvd_adaptive.watch", daemon=True
                )
                self._thread.start()

    def wake(self) -> None:
        """A step has begun."""
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._look():
                time.sleep(PATIENCE)

    def _look(self) -> bool:
        with self._lock:
            sessions = list(self._sessions)
        wanted = [session.wants_watch() for session in sessions if len(sessions) > 1]
        return any(wanted)


WATCH = Watch()


@contextmanager
def finished_on(device: torch.device) -> Iterator[None]:
    """Work on ``device``, all of which is done at the end, whatever streams others use."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield
        torch.cuda.current_stream(device).synchronize()
