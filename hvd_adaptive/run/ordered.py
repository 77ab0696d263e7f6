"""Define OrderedStep, a step whose ranks submit collectives in one order.

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

from collections.abc import Generator, Iterable

from hvd_adaptive.base.errors import given_up
from hvd_adaptive.layout import Layout
from hvd_adaptive.run.driver import Worker
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.run.step import Step
from hvd_adaptive.run.trip import Flight

LAG, WINDOW = 1, 3


class OrderedStep(Step):
    """A step whose groups begin and advance in one order on all ranks.

    Its gradients are final when they arrive (DDP's buckets, differences of models), so averages
    replace them at once, and the groups of an arrived gradient need not wait for others.
    Collectives are received once ``may_receive``: ranks are known to agree.
    """

    def __init__(
        self,
        binding: RankContext,
        layout: Layout,
        attempt: int,
        worker: Worker | None,
        on_cpu: bool,
    ) -> None:
        super().__init__(binding, layout, attempt, worker, disjoint=True)
        self.arrivals.is_early = False  # from now on averages replace gradients at once
        self.may_receive = False
        # All ranks follow one course, also if a rank gives the step up before its first gradient.
        self._on_cpu = on_cpu
        self._begun: list[Flight] = []  # in their order
        self._course = self._run()
        self._waits_for: Flight | None = None
        self._is_on_course = self._is_over = False

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
            self.receive_all()

    def _turn(self, wait: bool) -> bool:
        """Do what comes next: begin a group or advance one, and ``wait`` for its collective, if
        wanted.

        Returns:
            Whether anything was done. If not, and ``wait``, a group must be complete first, or all
            groups have been received.
        """
        due, count = self._waits_for, len(self._begun)
        if self._is_over or (
            due is not None
            and not (wait or due.is_over)
            and not (self.may_receive and self.binding.world.poll(due.handle))
        ):
            return False
        self._is_on_course = True
        try:
            self._waits_for = next(self._course, None)
        finally:
            self._is_on_course = False
        return due is not None or self._waits_for is not None or len(self._begun) > count

    def _run(self) -> Generator[Flight | None, None, None]:
        """Yield the group whose collective comes next, or None if a group must be complete."""
        plans, begun, longest = self.binding.plans(self.layout), self._begun, 0
        most = max((plan.most for plan in plans), default=1)
        fitting = max(2, self.binding.settings.tuning.in_flight_bytes // max(1, most))
        lag, window = LAG, min(WINDOW, fitting)
        if not self._on_cpu:
            # To receive in a hook would make the host wait: send all that fits, receive later.
            lag, window = len(plans), fitting
        while True:
            if len(begun) >= window:
                yield from self._up_to(begun[-window], begun[-window].plan.collectives)
            flight = self._begin_next()
            if flight is None:
                if self._all_arrived:
                    break
                yield None
                continue
            begun.append(flight)
            longest = max(longest, flight.plan.collectives)
            yield from self._next_stages(len(begun), lag)
        for late in range(1, lag * (longest - 1) + 1):
            yield from self._next_stages(len(begun) + late, lag)
        for flight in begun:
            yield from self._up_to(flight, flight.plan.collectives)
        self._is_over = True

    def _next_stages(self, number: int, lag: int) -> Generator[Flight, None, None]:
        """Submit what follows the beginning of group ``number``, counted from 1: a group's next
        collective after the beginning of ``lag`` others.
        """
        for stage in range(1, number):
            place = number - 1 - stage * lag
            if place < 0:
                return
            if place < len(self._begun) and stage < self._begun[place].plan.collectives:
                yield from self._up_to(self._begun[place], stage)

    def _up_to(self, flight: Flight, stage: int) -> Generator[Flight, None, None]:
        while flight.stage < stage and not flight.is_over:
            yield flight
            if not flight.is_over:  # a last collective may have been received meanwhile
                self._advance(flight)

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

    def _launch(self) -> None:
        if self._is_on_course:
            return
        if self.arrivals.mail:
            self.arrivals.read()
        while self._turn(wait=False):
            pass

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
            raise given_up()
