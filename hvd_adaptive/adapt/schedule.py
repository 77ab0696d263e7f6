"""Decide at which steps tables are refitted, and which steps are sampled for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from hvd_adaptive import states
from hvd_adaptive.base.checks import is_whole

LONGEST_WAIT = 1024
# Steps that a fit is based on: its own and those before it. If gradients of several kinds take
# turns, as in a GAN or in SAM, this many steps in a row hold each kind in its proportion.
WINDOW = 8
_EARLY, _EVERY = (0, 1, WINDOW - 1, 100, 2000), 10_000


def default_steps(step: int) -> bool:
    """Return True at steps 0, 1, 7, 100, 2,000 and every 10,000.

    The ALQ paper has 100, 2,000 and every 10,000 (App. K). Step 0 is included because no unfitted
    table is good. It has seen one step alone, so steps 1 and 7 follow: the first two, and the first
    ``WINDOW`` steps.
    """
    return step in _EARLY or (step > 0 and step % _EVERY == 0)


class UpdateSchedule:
    """Schedule of the steps that refit the table, and of those that are sampled for it.

    A fit is based on samples of ``WINDOW`` steps, of which it is the last. So a schedule is
    evaluated up to ``WINDOW`` - 1 steps ahead.

    An update with insufficient samples (coverage.py) is retried at the next step, then after 2, 4,
    8, ... and finally every 1,024 further steps, until it succeeds.

    Args:
        steps: A collection of steps, an ascending iterable or a callable, which is called once for
            each step, in order; ``default_steps`` if None. Anything else raises ValueError.

    Attributes:
        planned: Callable that returns whether a step is planned, regardless of earlier updates.
        retry_at: A step at which the table is refitted even if it is not planned, or None.
    """

    def __init__(self, steps: Iterable[int] | Callable[[int], bool] | None = None) -> None:
        if steps is None:
            steps = default_steps
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
        self.retry_at: int | None = None
        self._wait = 1
        self._again = False  # whether the update at that step is a retry rather than a request
        self._answers: dict[int, bool] = {}  # of ``planned``, from the current step on

    def is_due(self, step: int) -> bool:
        """Return whether the table is refitted at ``step``."""
        return self._is_planned(step) or step == self.retry_at

    def precedes_fit(self, step: int) -> bool:
        """Return whether ``step`` is sampled for a fit at one of the steps after it."""
        self._plan(step, WINDOW)
        later = range(step + 1, step + WINDOW)
        return any(map(self._is_planned, later)) or self.retry_at in later

    def quiet_from(self, step: int) -> range:
        """Return known steps from ``step`` on for which, and soon after, nothing is planned."""
        if self.planned is not default_steps:
            return range(0)  # a user's function is called for each step
        following = next((s for s in _EARLY if s >= step), -(-step // _EVERY) * _EVERY)
        return range(step, following - WINDOW + 1)

    def retries(self, step: int) -> bool:
        """Return whether ``step`` is due only because an earlier update was incomplete."""
        return self._again and step == self.retry_at and not self._is_planned(step)

    def _is_planned(self, step: int) -> bool:
        if step not in self._answers:
            self._plan(step, 1)
        return self._answers[step]

    def _plan(self, step: int, count: int) -> None:
        """Make the answers those of ``count`` steps from ``step`` on, called once each."""
        known, answers = self._answers if step in self._answers else {}, {}
        for later in range(step, step + count):
            answers[later] = known[later] if later in known else bool(self.planned(later))
        self._answers = answers

    def request(self, step: int) -> None:
        """Request an update at ``step``, in addition to the planned ones."""
        self.retry_at, self._wait, self._again = step, 1, False

    def done(self, step: int, complete: bool) -> None:
        """Record whether the update at ``step`` was complete; an incomplete one is retried."""
        if complete or step != self.retry_at:
            self._wait = 1  # a planned update starts a new sequence of retries
        self._again = not complete
        if complete:
            self.retry_at = None
        else:
            self.retry_at, self._wait = step + self._wait, min(2 * self._wait, LONGEST_WAIT)

    def go_on(self, old: UpdateSchedule) -> None:
        """Continue a schedule of the same steps."""
        self.load_state_dict(old.state_dict())
        self._answers = dict(old._answers)

    def state_dict(self) -> dict[str, Any]:
        """Return the pending retry as numbers (-1 for none)."""
        return {
            "retry_at": -1 if self.retry_at is None else self.retry_at,
            "wait": self._wait,
            "again": int(self._again),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a ``state_dict``, or raise ValueError; planned steps come from the constructor."""
        self.retry_at, self._wait, self._again = self.checked(state)

    @staticmethod
    def checked(state: Any) -> tuple[int | None, int, bool]:
        """Return the step of the retry or None, the wait after it, and whether it retries an
        incomplete update, from a state; raise ValueError if it is invalid.
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
    if not is_whole(step) or step < 0:
        raise ValueError(f"update_steps: must give ascending steps >= 0, not {step!r}")
    return int(step)
