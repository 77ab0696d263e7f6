"""Define OrderedStep, a step whose ranks submit collectives in one order, a Course.

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

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING

from hvd_adaptive.feedback import Residuals
from hvd_adaptive.layout import Layout
from hvd_adaptive.run.step import Step
from hvd_adaptive.run.trip import Flight

if TYPE_CHECKING:
    from hvd_adaptive.run.rank_context import RankContext
    from hvd_adaptive.run.worker import Worker


LAG, WINDOW = 1, 3


class Course:
    """Begin and advance groups in one order on all ranks.

    Args:
        begin: Function that encodes the next complete group, submits its first collective, and
            returns it; None if no group is complete.
        advance: Function that waits for a group's collective, and submits its next one, if any.
        is_there: Function that returns whether ``advance`` would not wait.
        lag: Groups that begin before a group's next collective.
        window: Most groups in flight, at least 2.

    Attributes:
        all_arrived: No further group becomes complete.
        is_over: All groups have been received.
    """

    def __init__(
        self,
        begin: Callable[[], Flight | None],
        advance: Callable[[Flight], None],
        is_there: Callable[[Flight], bool],
        lag: int = LAG,
        window: int = WINDOW,
    ) -> None:
        self._begin, self._advance, self._is_there = begin, advance, is_there
        self._lag, self._window = lag, max(2, window)
        self._legs: list[Flight] = []
        self.all_arrived = False
        self._events = self._run()
        self._waits_for: Flight | None = None
        self.is_over = False

    def turn(self, wait: bool) -> bool:
        """Do what comes next: begin a group or advance one, and ``wait`` for its collective, if
        wanted.

        Returns:
            Whether anything was done. If not, and ``wait``, a group must be complete first, or the
            course is over.
        """
        leg, begun = self._waits_for, len(self._legs)
        if self.is_over or (leg is not None and not wait and not self._is_there(leg)):
            return False
        self._waits_for = next(self._events, None)
        return leg is not None or self._waits_for is not None or len(self._legs) > begun

    def _run(self) -> Generator[Flight | None, None, None]:
        """Yield the group whose collective comes next, or None if a group must be complete."""
        legs, longest = self._legs, 0
        while True:
            if len(legs) >= self._window:
                yield from self._up_to(legs[-self._window], legs[-self._window].plan.collectives)
            leg = self._begin()
            if leg is None:
                if self.all_arrived:
                    break
                yield None
                continue
            legs.append(leg)
            longest = max(longest, leg.plan.collectives)
            yield from self._next_stages(len(legs))
        for late in range(1, self._lag * (longest - 1) + 1):
            yield from self._next_stages(len(legs) + late)
        for leg in legs:
            yield from self._up_to(leg, leg.plan.collectives)
        self.is_over = True

    def _next_stages(self, begun: int) -> Generator[Flight, None, None]:
        """Submit what follows the beginning of group number ``begun``, counted from 1."""
        for stage in range(1, begun):
            place = begun - 1 - stage * self._lag
            if place < 0:
                return
            if place < len(self._legs) and stage < self._legs[place].plan.collectives:
                yield from self._up_to(self._legs[place], stage)

    def _up_to(self, leg: Flight, stage: int) -> Generator[Flight, None, None]:
        while leg.stage < stage and not leg.is_over:
            yield leg
            if not leg.is_over:  # a last collective may have been received meanwhile
                self._advance(leg)


class OrderedStep(Step):
    """A step whose collectives follow a Course.

    Its gradients are final when they arrive (DDP's buckets, differences of models), so averages
    replace them at once, and the groups of an arrived gradient need not wait for others.
    Collectives are received once ``may_receive``: ranks are known to agree.
    """

    def __init__(
        self,
        binding: RankContext,
        layout: Layout,
        number: int,
        attempt: int = 0,
        residuals: Residuals | None = None,
        worker: Worker | None = None,
        on_cpu: bool = True,
    ) -> None:
        super().__init__(binding, layout, number, attempt, residuals, worker, disjoint=True)
        self.arrivals.is_early = False  # from now on averages replace gradients at once
        self.may_receive = False
        # All ranks follow one course, also if a rank gives the step up before its first gradient.
        self._on_cpu = on_cpu
        self._course: Course | None = None  # until the exchange is known
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
            lacking = enumerate(self.arrivals.lacking)
            self._trips.incomplete = {index for index, count in lacking if count}
            self._all_arrived = True
            self._known_course().all_arrived = True
            self.receive_all()

    def _known_course(self) -> Course:
        if self._course is None:
            lag, window = LAG, WINDOW
            plans, most = self.binding.plans(self.layout), 1
            for plan in plans:
                most = max(most, plan.most)
            fitting = self.binding.settings.tuning.in_flight_bytes // most
            if not self._on_cpu:
                # To receive in a hook would make the host wait: send all that fits, receive later.
                lag, window = len(plans), fitting
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
        """Begin the next group in the layout's order, if it is complete, or if all have arrived."""
        arrivals, incomplete = self.arrivals, self._trips.incomplete
        while self._all_arrived and (index := self._next - 1) >= 0:
            if arrivals.lacking[index] < self.layout.counts[index] or index in incomplete:
                break
            self._next = index
        index = self._next - 1
        if index < 0 or not (self._all_arrived or not arrivals.lacking[index]):
            return None
        self._next = index
        return self._start(index, self.binding.plans(self.layout)[index])

    def _is_there(self, flight: Flight) -> bool:
        return flight.is_over or (self.may_receive and self.binding.world.poll(flight.handle))

    def _launch(self) -> None:
        if self._is_on_course:
            return
        if self.arrivals.mail:
            self.arrivals.read()
        if self._all_arrived:
            self._known_course().all_arrived = True
        while self._turn(wait=False):
            pass

    def _submit_second_stages(self) -> None:
        """Do nothing: the course submits them."""

    def _receive(self) -> None:
        """Decode groups whose last collective has been received; none follows, so no order."""
        if not self.may_receive or self.arrivals.device.type != "cpu":
            return
        for flight in tuple(self._flying):  # one's end may take the course further
            is_last = flight.stage == flight.plan.collectives - 1
            if is_last and self.binding.world.poll(flight.handle):
                self._advance(flight)

    def _advance_oldest(self) -> None:
        if not self._turn(wait=True):
            raise RuntimeError("this gradient's step was given up: backward has run again since")
