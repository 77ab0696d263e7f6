"""Warnings that are given once."""

from __future__ import annotations

import logging
from typing import Any


class WarnOnce:
    """The first message is a warning, the others are told to those who debug."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._told = False

    def __call__(self, message: str, *args: Any) -> None:
        self._logger.log(logging.DEBUG if self._told else logging.WARNING, message, *args)
        self._told = True
