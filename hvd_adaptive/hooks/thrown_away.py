"""Warn, once, of a loop that constructs a new compressor for each call of ``average``."""

from __future__ import annotations

import gc
import logging
import weakref

from hvd_adaptive.base.errors import WarnOnce
from hvd_adaptive.hooks.connected import is_first_rank

MANY = 10
REMEDY = (
    "average() was called with a new compressor each time, %d times in a row: construct one before "
    "the loop, and give it to every call; a new one has no fitted table and no residuals"
)
logger = logging.getLogger("hvd_adaptive")


class ThrownAway:
    """Compressors in a row that did one call each, and of which some do not exist any more.

    A program with a compressor for each of many lists keeps all of them, and calls them again.
    """

    def __init__(self) -> None:
        self._row = 0
        self._alive: weakref.WeakSet[object] = weakref.WeakSet()
        self._warn: WarnOnce | None = None

    def begins(self, session: object) -> None:
        """Note the first call with a compressor, whose connection is ``session``."""
        self._row += 1
        self._alive.add(session)
        if self._row == MANY:
            gc.collect()  # once: compressors and their connections refer to each other
            if len(self._alive) <= MANY // 2:
                self._warn = self._warn or WarnOnce(logger, is_first_rank())
                self._warn(REMEDY, self._row)

    def goes_on(self) -> None:
        """Note a later call with a compressor."""
        if self._row:
            self._row = 0
            self._alive.clear()
