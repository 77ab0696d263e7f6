"""Decide at which steps tables are refitted."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterable
from typing import Any

from hvd_adaptive import states


def paper_steps(step: int) -> bool:
    """Return True at steps 100, 2,000 and every 10,000 (ALQ paper, App. K), and at step 0.

    Step 0 is included because an unfitted table adds noise of many times the gradient's norm if
    buckets are large.
    """
    return step in (0, 100, 2000) or (step > 0 and step % 10_000 == 0)


LONGEST_WAIT = 1024


class UpdateSchedule:
    """Schedule of the steps that refit the table.

    An update with insufficient samples (coverage.py) is retried at the next step, then after 2, 4,
    8, ... and finally every 1,024 further steps, until it succeeds.

    Args:
        steps: A collection of steps, an ascending iterable or a callable; ``paper_steps`` if None.

    Attributes:
        planned: Callable that returns whether a step is planned, regardless of earlier updates.

    Raises:
        ValueError: ``steps`` is something else.
    """

    def __init__(self, steps: Iterable[int] | Callable[[int], bool] | None = None) -> None:
        if steps is None:
            steps = paper_steps
        self.planned: Callable[[int], bool]
        if callable(steps):
            self.planned = steps
        elif isinstance(steps, Iterable) and not isinstance(steps, str | bytes):
            self.planned = _Planned(steps)
            self.planned(0)  # raises at once if the first step is invalid
        else:
            raise ValueError(
                f"update_steps={steps!r}: must be an iterable of ascending steps or a callable"
            )
        self._retry_at: int | None = None
        self._wait = 1
        self._again = False  # whether the update at that step is a retry rather than a request
        self._answer = (-1, False)  # the last step that ``planned`` was called for, and its result

    def is_due(self, step: int) -> bool:
        """Return whether the table is refitted at ``step``."""
        return self._is_planned(step) or step == self._retry_at

    def retries(self, step: int) -> bool:
        """Return whether ``step`` is due only because an earlier update was incomplete."""
        return self._again and step == self._retry_at and not self._is_planned(step)

    def _is_planned(self, step: int) -> bool:
        """Return ``planned(step)``; a user's function may have a state, so call it once a step."""
        if self._answer[0] != step:
            self._answer = step, bool(self.planned(step))
        return self._answer[1]

    def request(self, step: int) -> None:
        """Request an update at ``step``, in addition to the planned ones."""
        self._retry_at, self._wait, self._again = step, 1, False

    def done(self, step: int, complete: bool) -> None:
        """Record whether the update at ``step`` was complete; an incomplete one is retried."""
        if complete or step != self._retry_at:
            self._wait = 1  # a planned update starts a new sequence of retries
        self._again = not complete
        if complete:
            self._retry_at = None
        else:
            self._retry_at, self._wait = step + self._wait, min(2 * self._wait, LONGEST_WAIT)

    def state_dict(self) -> dict[str, Any]:
        """Return the pending retry as numbers (-1 for none)."""
        return {
            "retry_at": -1 if self._retry_at is None else self._retry_at,
            "wait": self._wait,
            "again": int(self._again),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a ``state_dict``; the schedule itself comes from the constructor.

        Raises:
            ValueError: The state is invalid; nothing is changed then.
        """
        self._retry_at, self._wait, self._again = self.checked(state)

    @staticmethod
    def checked(state: Any) -> tuple[int | None, int, bool]:
        """Return the contents of a state; raise ValueError if it is invalid.

        Returns:
            The step of the retry or None, the wait after it, and whether it retries an incomplete
            update.
        """
        retry_at = states.whole(state, "retry_at", -1, of="state: schedule")
        wait = states.whole(state, "wait", 1, LONGEST_WAIT, of="state: schedule")
        again = states.whole({"again": 0} | dict(state), "again", 0, 1, of="state: schedule")
        return (None if retry_at < 0 else retry_at), wait, bool(again)


class _Planned:
    """Membership in a collection of steps, or in an ascending, possibly endless iterable.

    An iterable is read no further than needed. Steps that were read are kept, so that returning to
    an earlier step (a loaded checkpoint) works. A copy shares the iterable and the steps read,
    since generators cannot be copied.
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
