"""Predict which parameter's gradient comes next."""

from __future__ import annotations

from collections.abc import Callable


class Prediction:
    """Find slots: in the order of the previous step first, then among all."""

    def __init__(self, count: int) -> None:
        self._order = list(range(count - 1, -1, -1))
        self._seen: list[int] = []
        self._next = 0

    def restart(self) -> None:
        """Begin a new step; the slot found last is its first."""
        self._seen = self._seen[-1:]

    @property
    def likely(self) -> int:
        """Return the slot that comes next if the order is that of the previous step."""
        return self._order[self._next]

    def confirm(self) -> None:
        """Note that ``likely`` has come."""
        self._seen.append(self._order[self._next])
        self._next = (self._next + 1) % len(self._order)

    def find(self, matches: Callable[[int], bool]) -> int | None:
        """Return the slot for which ``matches(slot)`` holds, or None."""
        count = len(self._order)
        for offset in range(count):
            position = (self._next + offset) % count
            slot = self._order[position]
            if matches(slot):
                self._next = position
                self.confirm()
                return slot
        return None

    def learn(self) -> None:
        """End a step; its order predicts that of the next one."""
        rest = set(self._order) - set(self._seen)
        self._order = list(dict.fromkeys(self._seen)) + [s for s in self._order if s in rest]
        self._seen, self._next = [], 0
