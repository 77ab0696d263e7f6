"""Define the one error that this package raises on purpose, and its exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

BUILD_FAILED = 1
MISSING = 3
NOT_WORKING = 4
INTERRUPTED = 130


class InstallError(Exception):
    """Report that installing Horovod stopped, with what a person needs to go on.

    Args:
        message: what went wrong, in one sentence.
        exit_code: one of this module's codes.
        hints: what to install or change, one sentence each.
        log: the whole output, if there is one.
        tail: the last lines of the output that say something.
    """

    def __init__(
        self,
        message: str,
        *,
        exit_code: int,
        hints: Sequence[str] = (),
        log: Path | None = None,
        tail: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.hints = tuple(hints)
        self.log = log
        self.tail = tuple(tail)
