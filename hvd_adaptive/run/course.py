"""Define Course: the order in which a rank submits its groups' collectives, alike on all ranks.

Where the transport pairs collectives by their order (torch.distributed), no rank may decide by
timing what it submits next. With n groups of two collectives the order is

    A1, A2, B1, A3, B2, ..., An, Bn-1, Bn

Groups begin in the layout's order, each when it is complete. A group's next collective follows the
beginning of the next group, so one message travels while another is encoded or decoded. A group
ends before the one WINDOW places later begins, which bounds the memory in flight.

A rank therefore waits only for what all ranks submit before whatever they submit next: the rank
that is behind all others never waits for them, so there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

LAG, WINDOW = 1, 3


class Leg(Protocol):
    """A group in flight, as a course sees it.

    Attributes:
        stage: The collective that it waits for, from 0.
        stages: The number of its collectives.
        is_over: Whether its last collective has been received.
    """

    stage: int
    stages: int
    is_over: bool


class Course:
    """Begin and advance groups in one order on all ranks.

    Args:
        begin: Function that encodes the next complete group, submits its first collective, and
            returns it; None if no group is complete.
        advance: Function that waits for a group's collective, and submits its next one, if any.
        is_there: Function that returns whether a group's collective has been received, so that
            ``advance`` would not wait.
        lag: Groups that begin before a group's next collective.
        window: Most groups in flight, at least 2.
    """

    def __init__(
        self,
        begin: Callable[[], Any],
        advance: Callable[[Any], None],
        is_there: Callable[[Any], bool],
        lag: int = LAG,
        window: int = WINDOW,
    ) -> None:
        self._begin, self._advance, self._is_there = begin, advance, is_there
        self._lag, self._window = lag, max(2, window)
        self._legs: list[Leg] = []
        self._all_arrived = False
        self._events = self._run()
        self._waits_for: Leg | None = None
        self.is_over = False

    def all_arrived(self) -> None:
        """Note that no further group becomes complete."""
        self._all_arrived = True

    def turn(self, wait: bool) -> bool:
        """Do what comes next: begin a group or advance one.

        Args:
            wait: Whether to wait for the group's collective if it has not been received.

        Returns:
            Whether anything was done. If not, and ``wait``, a group must be complete first, or the
            course is over.
        """
        leg, begun = self._waits_for, len(self._legs)
        if self.is_over or (leg is not None and not wait and not self._is_there(leg)):
            return False
        self._waits_for = next(self._events, None)
        return leg is not None or self._waits_for is not None or len(self._legs) > begun

    def _run(self) -> Generator[Leg | None, None, None]:
        """Yield the group whose collective comes next, or None if a group must be complete."""
        legs = self._legs
        while True:
            if len(legs) >= self._window:
                yield from self._up_to(legs[-self._window], legs[-self._window].stages)
            leg = self._begin()
            if leg is None:
                if self._all_arrived:
                    break
                yield None
                continue
            legs.append(leg)
            yield from self._next_stages(len(legs))
        longest = max((leg.stages for leg in legs), default=0)
        for late in range(1, self._lag * (longest - 1) + 1):
            yield from self._next_stages(len(legs) + late)
        for leg in legs:
            yield from self._up_to(leg, leg.stages)
        self.is_over = True

    def _next_stages(self, begun: int) -> Generator[Leg, None, None]:
        """Submit what follows the beginning of group number ``begun``, counted from 1."""
        for stage in range(1, begun):
            place = begun - 1 - stage * self._lag
            if place < 0:
                return
            if place < len(self._legs) and stage < self._legs[place].stages:
                yield from self._up_to(self._legs[place], stage)

    def _up_to(self, leg: Leg, stage: int) -> Generator[Leg, None, None]:
        while leg.stage < stage and not leg.is_over:
            yield leg
            if not leg.is_over:  # a last collective may have been received meanwhile
                self._advance(leg)
