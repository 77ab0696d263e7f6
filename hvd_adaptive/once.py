"""Log a warning once."""

from __future__ import annotations

import logging
from typing import Any


class WarnOnce:
    """Logger of a first message as a warning, and of all later ones at level DEBUG."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._warned = False

    def __call__(self, message: str, *args: Any) -> None:
        self._logger.log(logging.DEBUG if self._warned else logging.WARNING, message, *args)
        self._warned = True
