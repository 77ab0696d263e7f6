"""Define OrderedStep, a step whose ranks submit collectives in one order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_adaptive.feedback import Residuals
from hvd_adaptive.layout import Layout
from hvd_adaptive.run.course import LAG, WINDOW, Course
from hvd_adaptive.run.step import Step

if TYPE_CHECKING:
    from hvd_adaptive.run.rank_context import RankContext
    from hvd_adaptive.run.worker import Worker


@dataclass
class _Leg:
    """See course.Leg."""

    step: OrderedStep
    flight: Any
    stages: int

    @property
    def stage(self) -> int:
        return self.flight.stage

    @property
    def is_over(self) -> bool:
        return self.flight.index in self.step.returned


class OrderedStep(Step):
    """A step whose collectives follow a Course (course.py).

    Its gradients are final when they arrive (DDP's buckets, differences of models), so averages
    replace them at once, and the groups of an arrived gradient need not wait for others.

    Attributes:
        may_receive: Whether collectives may be received: ranks are known to agree.
    """

    def __init__(
        self,
        binding: RankContext,
        layout: Layout,
        number: int,
        attempt: int = 0,
        residuals: Residuals | None = None,
        worker: Worker | None = None,
    ) -> None:
        super().__init__(binding, layout, number, attempt, residuals, worker, disjoint=True)
        self._results.write_early()  # from now on averages replace gradients at once
        self.may_receive = False
        self._course: Course | None = None  # until the device is known
        self._is_on_course = False

    @property
    def returned(self) -> set[int]:
        """Return the groups that have been received, or could not be read."""
        return self._returned

    def receive_all(self) -> None:
        """Complete the exchange of all groups, after ``launch_all``."""
        while self._turn(wait=True):
            pass

    def is_back(self, slot: int) -> bool:
        """Return whether ``result`` would return the average of a member without waiting."""
        return all(group in self._returned for group, _ in self.layout.pieces_of[slot])

    def send_the_rest(self) -> None:
        """Complete the exchange of a step that is given up.

        Ranks may give it up after different gradients, so each sends all groups. Other ranks refuse
        payloads of groups that were not complete, except within a node (exchange="hierarchical").
        """
        with self.lock:
            self.arrivals.read()
            groups = range(len(self.layout.groups))
            self._trips.incomplete = {index for index in groups if not self.arrivals.all_of(index)}
            self._all_arrived = True
            self._known_course().all_arrived()
            self.receive_all()

    def _known_course(self) -> Course:
        if self._course is None:
            lag, window = LAG, WINDOW
            sizes = [self.binding.in_flight_bytes(group) for group in self.layout.groups]
            fitting = self.binding.settings.tuning.in_flight_bytes // max(1, *sizes)
            if self.device.type != "cpu":
                # To receive in a hook would make the host wait: send all that fits, receive later.
                lag, window = len(sizes), fitting
            self._course = Course(
                self._begin_next, self._advance_leg, self._is_there, lag, min(window, fitting)
            )
        return self._course

    def _turn(self, wait: bool) -> bool:
        self._is_on_course = True
        try:
            return self._known_course().turn(wait)
        finally:
            self._is_on_course = False

    def _begin_next(self) -> _Leg | None:
        """Begin the next group in the layout's order, if it is complete or all have arrived.

        Groups without any gradient are left out, unless the step is given up.
        """
        while self._all_arrived and self._next > 0 and self._is_left_out(self._next - 1):
            self._next -= 1
        index = self._next - 1
        if index < 0 or not (self._all_arrived or self.arrivals.all_of(index)):
            return None
        self._next = index
        self._start(index)
        stages = self.binding.exchange.collectives(self.layout.groups[index].coordinates)
        return _Leg(self, self._flying[-1], stages)

    def _is_left_out(self, index: int) -> bool:
        return not self.arrivals.any_of(index) and index not in self._trips.incomplete

    def _advance_leg(self, leg: _Leg) -> None:
        self._advance(leg.flight)

    def _is_there(self, leg: _Leg) -> bool:
        return leg.is_over or (self.may_receive and self._is_back(leg.flight))

    def _launch(self) -> None:
        if self._is_on_course:
            return
        if self._all_arrived:
            self._known_course().all_arrived()
        while self._turn(wait=False):
            pass

    def _submit_second_stages(self) -> None:
        """Do nothing: the course submits them."""

    def _receive_last_stages(self) -> None:
        """Decode groups whose last collective has been received; none follows, so no order."""
        if not self.may_receive or self.device.type != "cpu":
            return
        stages = self.binding.exchange.collectives
        for flight in list(self._flying):
            last = stages(self.layout.groups[flight.index].coordinates) - 1
            back = flight.stage == last and self._is_back(flight)
            if back and flight in self._flying:  # another's end may have taken the course further
                self._advance(flight)

    def _advance_oldest(self) -> None:
        if not self._turn(wait=True):
            raise RuntimeError("this gradient's step was given up: backward has run again since")
