"""Define OrderedStep, a step whose ranks submit collectives in one order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hvd_adaptive.feedback import Residuals
from hvd_adaptive.layout import Layout
from hvd_adaptive.run.course import LAG, WINDOW, Course
from hvd_adaptive.run.step import Flight, Step

if TYPE_CHECKING:
    from hvd_adaptive.run.rank_context import RankContext
    from hvd_adaptive.run.worker import Worker


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
        self.arrivals.write_early()  # from now on averages replace gradients at once
        self.may_receive = False
        self._course: Course | None = None  # until the device is known
        self._is_on_course = False

    def receive_all(self) -> None:
        """Complete the exchange of all groups, after ``launch_all``."""
        while self._turn(wait=True):
            pass

    def is_back(self, slots: Iterable[int]) -> bool:
        """Return whether ``result`` would return the averages of members without waiting."""
        for slot in slots:
            for group, _ in self.layout.pieces_of[slot]:
                if group not in self._returned:
                    return False
        return True

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
            sizes = self.binding.in_flight_bytes(self.layout)
            fitting = self.binding.settings.tuning.in_flight_bytes // max(1, *sizes)
            if self.device.type != "cpu":
                # To receive in a hook would make the host wait: send all that fits, receive later.
                lag, window = len(sizes), fitting
            self._course = Course(
                self._begin_next, self._advance, self._is_there, lag, min(window, fitting)
            )
        return self._course

    def _turn(self, wait: bool) -> bool:
        self._is_on_course = True
        try:
            return (self._course or self._known_course()).turn(wait)
        finally:
            self._is_on_course = False

    def _begin_next(self) -> Flight | None:
        """Begin the next group in the layout's order, if it is complete or all have arrived.

        Groups without any gradient are left out, unless the step is given up.
        """
        arrivals, incomplete = self.arrivals, self._trips.incomplete
        while self._all_arrived and (index := self._next - 1) >= 0:
            if arrivals.any_of(index) or index in incomplete:
                break
            self._next = index
        index = self._next - 1
        if index < 0 or not (self._all_arrived or arrivals.all_of(index)):
            return None
        self._next = index
        flight = self._start(index, self.binding.in_flight_bytes(self.layout)[index])
        coordinates = self.layout.groups[index].coordinates
        flight.stages = self.binding.exchange.collectives(coordinates)
        return flight

    def _is_there(self, flight: Flight) -> bool:
        return flight.is_over or (self.may_receive and self.binding.world.poll(flight.handle))

    def _launch(self) -> None:
        if self._is_on_course:
            return
        if self.arrivals.mail:
            self.arrivals.read()
        if self._all_arrived:
            self._known_course().all_arrived()
        while self._turn(wait=False):
            pass

    def _submit_second_stages(self) -> None:
        """Do nothing: the course submits them."""

    def _receive(self) -> None:
        """Decode groups whose last collective has been received; none follows, so no order."""
        if not self.may_receive or self.device.type != "cpu":
            return
        for flight in tuple(self._flying):  # one's end may take the course further
            is_last = flight.stage == flight.stages - 1
            if is_last and self.binding.world.poll(flight.handle):
                self._advance(flight)

    def _advance_oldest(self) -> None:
        if not self._turn(wait=True):
            raise RuntimeError("this gradient's step was given up: backward has run again since")
