"""Number the compressors of a process, so that no two draw the same random numbers."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from hvd_adaptive.base.checks import check_integer
from hvd_adaptive.kernels.random import key_of, stream_key

MOST = 2**62  # numbers travel as int64


class Instance:
    """Number of a compressor in the keys of its random streams.

    Compressors are numbered in the order in which they first need one. The program determines this
    order, so it is usually the same on all ranks; if it is not, they agree on a new number.
    """

    def __init__(self, number: int | None = None) -> None:
        self.number = number  # None until it is needed

    def bind(self) -> int:
        """Return the number, the next free one if there is none."""
        with _lock:
            if self.number is None:
                self._use(_free[0])
            return self.number or 0

    def offer(self) -> tuple[int, int]:
        """Return the number, or the next free one, and the latter; for ``agree``."""
        return _free[0] if self.number is None else self.number, _free[0]

    def agree(self, offers: Iterable[tuple[int, int]], name: str = "") -> None:
        """Adopt a number, given all ranks' offers: the one that all have, or one that is free on
        all ranks. Of compressors that agree at the same time each needs a ``name`` of its own, the
        same on all ranks.
        """
        numbers, free = zip(*offers, strict=True)
        new = stream_key(max(free), zlib.crc32(name.encode())) >> 2
        with _lock:
            self._use(numbers[0] if len(set(numbers)) == 1 else new)

    def key(self, seed: int, rank: int, step: int, group: int) -> int:
        """Return the key of a stream; in a simulation the compressor may have no number."""
        return key_of(self.number or 0, seed, rank, step, group)

    def state_dict(self) -> dict[str, int]:
        """Return {"instance": the number}, or {} if there is none."""
        return {} if self.number is None else {"instance": self.number}

    def loaded(self, state: Mapping[str, Any]) -> Instance:
        """Return an instance with the number of a ``state_dict``, or with this one's if that has
        none; raise ValueError if it is invalid. Compressors that need one later get other numbers.
        """
        new = Instance(self.number)
        if "instance" in state:
            with _lock:
                new._use(check_integer("state: instance", state["instance"], 0, MOST))
        return new

    def _use(self, number: int) -> None:
        self.number, _free[0] = number, max(_free[0], number + 1)


_free = [0]  # the next number
_lock = threading.Lock()  # workers of several compressors agree


def start_over() -> None:
    """Number compressors from zero again, as a new process does, to repeat a run in one process."""
    _free[0] = 0
