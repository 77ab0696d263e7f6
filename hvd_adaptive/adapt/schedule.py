"""When tables are refitted."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterable
from typing import Any

from hvd_adaptive import states


def paper_steps(step: int) -> bool:
    """Steps 100, 2,000 and every 10,000 (ALQ paper, App. K), and step 0: an unfitted table at a
    large bucket adds noise of many times the gradient's norm."""
    return step in (0, 100, 2000) or (step > 0 and step % 10_000 == 0)


LONGEST_WAIT = 1024


class UpdateSchedule:
    """Which steps refit the table: a collection of steps, an ascending iterable or a callable.

    An update that found too little (coverage.py) is retried at the next step, then after 2, 4, 8,
    ... and at last 1,024 more steps, until it succeeds.

    planned: whether a step is one of these, whatever has become of earlier ones.
    """

    def __init__(self, steps: Iterable[int] | Callable[[int], bool] | None = None) -> None:
        if steps is None:
            steps = paper_steps
        self.planned: Callable[[int], bool]
        if callable(steps):
            self.planned = steps
        elif isinstance(steps, Iterable) and not isinstance(steps, str | bytes):
            self.planned = _Planned(steps)
            self.planned(0)  # a first step of the wrong kind is told at once
        else:
            raise ValueError(
                f"update_steps={steps!r}: must be an iterable of ascending steps or a callable"
            )
        self._retry_at: int | None = None
        self._wait = 1
        self._again = False  # what comes at that step is a retry, not what was requested
        self._was_planned = False

    def is_due(self, step: int) -> bool:
        """Whether the table is refitted at ``step``."""
        self._was_planned = bool(self.planned(step))
        return self._was_planned or step == self._retry_at

    def retries(self, step: int) -> bool:
        """Whether the update at ``step``, which ``is_due`` was asked about last, is due for no
        other reason than an incomplete one."""
        return self._again and step == self._retry_at and not self._was_planned

    def request(self, step: int) -> None:
        """Ask for an update at ``step``, besides the planned ones."""
        self._retry_at, self._wait, self._again = step, 1, False

    def done(self, step: int, complete: bool) -> None:
        """Tell how the update at ``step`` went; an incomplete one is retried."""
        if complete or step != self._retry_at:
            self._wait = 1  # a planned update begins a new row of retries
        self._again = not complete
        if complete:
            self._retry_at = None
        else:
            self._retry_at, self._wait = step + self._wait, min(2 * self._wait, LONGEST_WAIT)

    def state_dict(self) -> dict[str, Any]:
        """The retry in progress, as numbers (-1 for none)."""
        return {
            "retry_at": -1 if self._retry_at is None else self._retry_at,
            "wait": self._wait,
            "again": int(self._again),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``; the schedule itself comes from the constructor. ValueError
        where the state is of no schedule, and then nothing has been changed."""
        self._retry_at, self._wait, self._again = self.checked(state)

    @staticmethod
    def checked(state: Any) -> tuple[int | None, int, bool]:
        """What a state says: the step of the retry, or None, the wait after it, and whether it is a
        retry of something incomplete; ValueError where it is of no schedule."""
        retry_at = states.whole(state, "retry_at", -1, of="state: schedule")
        wait = states.whole(state, "wait", 1, LONGEST_WAIT, of="state: schedule")
        again = states.whole({"again": 0} | dict(state), "again", 0, 1, of="state: schedule")
        return (None if retry_at < 0 else retry_at), wait, bool(again)


class _Planned:
    """Membership in a collection of steps, or in an ascending, possibly endless iterable.

    An iterable is read no further than needed; what was read is kept, so that going back to an
    earlier step (a loaded checkpoint) works. A copy reads the same iterable, and shares what was
    read: generators cannot be copied.
    """

    def __init__(self, steps: Iterable[int]) -> None:
        if isinstance(steps, Collection) and not isinstance(steps, range):
            steps = sorted(_whole(step) for step in steps)
        self._source = iter(steps)
        self._last = -1
        self._seen: set[int] = set()

    def __call__(self, step: int) -> bool:
        while self._last < step:
            try:
                following = _whole(next(self._source))
            except StopIteration:
                break
            if following < self._last:
                raise ValueError(
                    "update_steps: must give ascending steps >= 0, "
                    f"but {following} follows {self._last}"
                )
            self._last = following
            self._seen.add(following)
        return step in self._seen

    def __deepcopy__(self, memo: dict[int, Any]) -> _Planned:
        return self


def _whole(step: Any) -> int:
    if not isinstance(step, numbers.Integral) or isinstance(step, bool) or step < 0:
        raise ValueError(f"update_steps: must give ascending steps >= 0, not {step!r}")
    return int(step)
