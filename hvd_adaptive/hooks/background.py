"""Define Background, the future of work on a thread of its own while the program goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Background(Future[Result]):
    """Work that begins at once, on the CUDA stream of whoever constructs this, if ``device`` is
    one.
    """

    def __init__(self, work: Callable[[], Result], device: torch.device, name: str) -> None:
        super().__init__()
        self._work: Callable[[], Result] | None = work
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._begin(name)

    def _begin(self, name: str) -> None:
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def join(self) -> None:
        """Wait until the work has ended, in whatever way."""
        wait([self])

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                self.set_result(work())
        except BaseException as error:
            self.set_exception(error)
