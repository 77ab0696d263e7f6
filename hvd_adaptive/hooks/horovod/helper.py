"""Complete steps whose gradients have all arrived while the program does something else.

Stock Horovod's allreduces end once the hooks of all ranks have fired, whatever the programs do
next. In this package a step needs work of each rank: statistics, payloads, second stages. The first
``decompress`` of the step does it. But if a process has several optimizers, ranks may call them in
different orders, and each rank waits in one for what the others would send in another. A thread
therefore watches the sessions of a process that has several. If a step has been ready for
``PATIENCE``, a helper thread does what ``decompress`` would.

No rank waits for ever unless stock Horovod would, too:

1. A step is ready once all its placeholders have come back reduced: every rank has submitted all
   of them. That is true on all ranks or on none, and needs no further call of any program.
2. On each rank a thread that waits for nothing else completes a ready step: the program's thread in
   ``decompress``, or a helper. Each holds the lock of one session only.
3. These threads wait only for collectives of this step, which the same threads of the other ranks
   submit. Horovod pairs collectives by name, and names differ between sessions.

So steps end independently of each other. For a step that is not ready, ranks wait inside Horovod,
as in stock Horovod.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

# In seconds. A program is seldom slower to call ``step``.
PATIENCE = 0.05


class Helped(Protocol):
    """A session, as a watch sees it."""

    def wants_watch(self) -> bool:
        """Start a helper if a step has been ready for ``PATIENCE``.

        Returns:
            Whether the watch must look again soon.
        """


class Watch:
    """A thread that watches the sessions of this process, as soon as there are several."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, session: Helped) -> None:
        """Watch a session from now on."""
        with self._lock:
            self._sessions.add(session)
            if len(self._sessions) > 1 and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(
                    target=self._run, name="hvd_adaptive.watch", daemon=True
                )
                self._thread.start()

    def wake(self) -> None:
        """Look at the sessions: a step has begun."""
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
    """Run a block on ``device``, and wait at its end for all of its work there."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield
        torch.cuda.current_stream(device).synchronize()
