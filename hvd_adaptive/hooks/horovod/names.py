"""Choose names of collectives, which no two optimizers of a process share."""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any

logger = logging.getLogger("hvd_adaptive")

_taken: Counter[str] = Counter()
_taken_in: list[Any] = [None]  # World.generation


def forget_names() -> None:
    """Count from zero again, as ranks that join do: Horovod has been initialised anew."""
    _taken.clear()


def claim_name(fingerprint: int, generation: Any) -> str:
    """Return a collective name that no other binding has in this generation of Horovod.

    Bindings of equal layouts and settings are counted in the order in which optimizers first call
    their compressors. The program determines this order, so it is the same on all ranks. (The
    lowest unused number would depend on when each rank collects its garbage.)
    """
    if _taken_in[0] is not generation:
        forget_names()
        _taken_in[0] = generation
    base = f"hvd_adaptive.{fingerprint:016x}"
    _taken[base] += 1
    return f"{base}.{_taken[base] - 1}"


class ClaimedNames:
    """Claim names of the groups of one compressor, by fingerprint."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def of(self, fingerprint: int, generation: Any) -> str:
        """Return the name of these groups in a generation of Horovod.

        Settings that return have their earlier name again, because new names would fill Horovod's
        response cache.
        """
        if fingerprint not in self._names:
            self._names[fingerprint] = claim_name(fingerprint, generation)
        return self._names[fingerprint]


def warn_of_many(count: int) -> None:
    """Warn if placeholders and groups have more names than Horovod's response cache holds."""
    cached = os.environ.get("HOROVOD_CACHE_CAPACITY", "1024")
    if cached.isdecimal() and 0 < int(cached) < count:
        logger.warning(
            "%d gradients and groups are more than the %s names of Horovod's response cache: "
            "raise HOROVOD_CACHE_CAPACITY, or each step negotiates them anew",
            count,
            cached,
        )
