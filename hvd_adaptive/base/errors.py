"""Define exceptions that users may catch, and warnings that are given once."""

from __future__ import annotations

import logging
from typing import Any


class PayloadError(ValueError):
    """The payload is short, foreign, corrupt, or encoded with another table or settings.

    Examples:
        >>> from hvd_adaptive import ALQ, PayloadError
        >>> compressor = ALQ(bits=3)
        >>> payload = compressor.encode(torch.randn(8192))
        >>> payload[-1] ^= 1  # damage it
        >>> try:
        ...     compressor.decode(payload)
        ... except PayloadError:
        ...     print("refused")
        refused
    """


class RankMismatchError(RuntimeError):
    """Ranks differ in settings, parameters, step or order; raised on every rank alike.

    The message names the difference and the ranks (docs/failures.md).

    Examples:
        >>> from hvd_adaptive import RankMismatchError
        >>> try:
        ...     optimizer.step()
        ... except RankMismatchError as error:
        ...     print(error)
        ...     raise
    """


class ResidualError(RuntimeError):
    """Residuals of error feedback have outgrown the gradients; raised on every rank alike.

    ``error_feedback="auto"`` prevents it (docs/choosing.md).

    Examples:
        >>> from hvd_adaptive import ResidualError
        >>> try:
        ...     optimizer.step()
        ... except ResidualError as error:
        ...     print(error)
        ...     raise
    """


def given_up() -> RuntimeError:
    """Return the error for a gradient whose step was given up."""
    return RuntimeError(
        "this gradient's step was given up: since then backward has run again, or another call, "
        "such as hvd.allreduce, has used its compressor"
    )


class WarnOnce:
    """Logger of a first message as a warning, and of all later ones at level DEBUG.

    Args:
        logger: The logger.
        is_heard: Whether the first message is a warning, too; False on ranks that would repeat it.
    """

    def __init__(self, logger: logging.Logger, is_heard: bool = True) -> None:
        self._logger = logger
        self._warned = not is_heard

    def __call__(self, message: str, *args: Any) -> None:
        self._logger.log(logging.DEBUG if self._warned else logging.WARNING, message, *args)
        self._warned = True
