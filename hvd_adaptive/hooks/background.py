"""Define Background, work on a thread of its own while the program goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Work that begins at once, on the CUDA stream of whoever constructs this, if ``device`` is
    one.
    """

    def __init__(self, work: Callable[[], Result], device: torch.device, name: str) -> None:
        self._work: Callable[[], Result] | None = work
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._begin(name)

    def _begin(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Return whether ``wait`` would return or raise at once."""
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Return whether the work has ended with an error."""
        return self._error is not None

    def join(self) -> None:
        """Wait until the work has ended, in whatever way."""
        self._thread.join()

    def wait(self) -> Result:
        """Return the result, or raise the error."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                self._results.append(work())
        except BaseException as error:
            self._error = error
