"""Define Step, which exchanges one step's gradients in groups, and is the base of two kinds."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import cast

import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.exchange.exchange import Failures, step_failed
from hvd_adaptive.layout import Group, Layout
from hvd_adaptive.run.arrivals import Arrivals
from hvd_adaptive.run.driver import Worker
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.run.trip import Flight, Plan, Trips
from hvd_adaptive.transport.collectives import AllGather, InFlight


class Step(ABC):
    """Exchange the gradients of one step.

    The order of collectives is that of an UnorderedStep (unordered.py), whose ranks pair them by
    name, or of an OrderedStep (ordered.py).

    1. ``arrive`` accepts a member's gradient. After ``release``, complete groups are launched in
       the layout's reverse order on every rank (roughly the order of the backward pass), within the
       bound on memory. Update steps are not released.
    2. Groups whose first stage has been received submit their second stage. A worker (driver.py)
       also decodes what has been received; averages stay in memory of their own meanwhile.
    3. ``launch_all`` launches the rest; every gradient has arrived. From the first ``write_next``
       on, averages replace gradients.
    4. ``result`` waits for the groups of a member, and for what was submitted before them.
    5. ``check_everywhere`` raises PayloadError on every rank if a payload arrived corrupt at any of
       them, and ResidualError if residuals have outgrown the gradients. Averages have replaced the
       gradients by then; all become NaN.
    """

    counts = True
    make_lock = threading.RLock  # tests replace it

    def __init__(
        self,
        binding: RankContext,
        layout: Layout,
        attempt: int = 0,
        worker: Worker | None = None,
        disjoint: bool = False,
    ) -> None:
        self.binding, self.layout = binding, layout
        self.number, self.attempt = binding.compressor.step, attempt
        self.lock = self.make_lock()
        self.names: set[str] = set()
        # A weak reference: gradients are freed with their step.
        no_worker = functools.partial(_go_on, weakref.ref(self))
        on_news = no_worker if worker is None else worker.wake
        self.arrivals = Arrivals(binding, layout, on_news, worker is None, disjoint)
        self.arrive = self.arrivals.arrive
        self._meter = binding.compressor._training.meter
        self._factor = 0.0  # until release or launch_all
        self._trips = Trips(
            binding.compressor,
            binding.exchange,
            layout,
            self.number,
            self.arrivals,
            meter=self._meter,
            attempt=attempt,
            name=binding.name,
            residuals=binding.compressor._training.residuals,
        )
        self.commit = self._trips.commit
        self._worker = worker
        self._hold, self._all_arrived = True, False
        self._next = len(layout.groups)
        self._flying: deque[Flight] = deque()
        self._held = 0
        self._returned: set[int] = set()  # groups that have been received, or could not be read
        self._failures = Failures()
        self._failed: dict[int, int] | None = None

    def release(self, factor: float) -> None:
        """Launch complete groups from now on, and second stages; ``factor`` scales sums."""
        with self.lock:
            self._hold, self._factor = False, factor
            if self._worker is None:
                self._launch()

    def advance(self) -> bool | None:
        """Do what can be done without waiting.

        Returns:
            Whether anything was done; None if there is nothing to do until a gradient arrives.
        """
        with self.lock:
            if self._hold:
                return None
            before = self._next, len(self.names), len(self._returned)
            self._launch()
            if self._flying:
                self._receive()
            if before != (self._next, len(self.names), len(self._returned)):
                return True
            return False if self._flying else None

    def launch_all(self, factor: float) -> None:
        """Submit every group, within the bound on memory; ``factor`` scales sums over ranks.

        Every dense gradient has arrived, on every rank. A group without any gradient (sparse
        parameters, which Horovod exchanges itself) is omitted.
        """
        with self.lock:
            self._hold, self._all_arrived, self._factor = False, True, factor
            self._launch()

    def write_next(self) -> bool:
        """Replace the gradients of one more group that came early by their averages, and those of
        later ones at once; return False if there is none.
        """
        with self.lock:
            if self.arrivals.is_early:
                self.arrivals.read()
                self.arrivals.is_early = False
            if not self.arrivals.early:
                return False
            index, average = self.arrivals.early.popitem()
            self.arrivals.deliver(index, average)
            self._hold_nothing_but_kept(index)
            return True

    def result(self, slot: int, absent: bool = False) -> torch.Tensor:
        """Return the reduced gradient of a member, in its own shape and dtype.

        It is zero if no rank has the gradient (``absent``); quantisation could turn the zeros of a
        bucket into other values.
        """
        for group, _ in self.layout.pieces_of[slot]:
            while group not in self._returned:
                self._advance_oldest()
        arrivals = self.arrivals
        tensor, arrivals.tensors[slot] = arrivals.tensors[slot], None
        if tensor is None:
            raise RuntimeError(
                f"{self.layout.members[slot].name}: no gradient is in this step; it has not "
                "arrived, or its result was read before"
            )
        if not arrivals.in_place[slot] and self._failures.first is None:
            tensor = arrivals.of(slot, tensor)
        if absent:
            self._trips.hold(slot)
            tensor.detach().zero_()
        return tensor

    def check_everywhere(self) -> None:
        """Raise an error, on every rank, if a rank could not read what it received, or residuals
        have outgrown the gradients.
        """
        failed, error = self.failed_everywhere(), cast(Exception | None, self._trips.error)
        if failed:
            error = step_failed(self.number, failed, self.layout.labels)
        if error is not None:
            for gradient in self.arrivals.replaced:
                gradient.detach().fill_(float("nan"))
            raise error from self._failures.first

    def failed_everywhere(self) -> dict[int, int]:
        """Return the groups that could not be read, by rank, after all were received."""
        if self._failed is None:
            trips, residuals = self._trips, self._trips.residuals
            row = [] if residuals is None else residuals.row(self._meter.errors())
            ranks = self.binding.world.size
            self._failed, rows = self._failures.everywhere(ranks, self._from_all, row)
            if residuals is not None:
                trips.weights, trips.error = residuals.agreed(self.number, rows)
        return self._failed

    def _from_all(self, own: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors of equal shape, the last ones of a step, stacked."""
        return self.binding.world.gather_equal(own, self._trips.name("corrupt"))

    def describe(self) -> str:
        """Return what the step waits for, in lines."""
        lines = [f"step {self.number}, attempt {self.attempt}: {self.arrivals.describe()}"]
        now = time.perf_counter()
        lines += [
            f"{self.layout.labels[f.index]}: collective {f.stage + 1}, for {now - f.begun:.1f} s"
            for f in list(self._flying)
        ]
        return "\n".join(lines)

    def abandon(self) -> list[InFlight]:
        """Give up an unfinished step, and return the collectives in flight."""
        with self.lock:
            self._hold = True
            flying = [
                InFlight(
                    self._trips.name(self.layout.labels[f.index], f.stage),
                    "payloads" if isinstance(f.request, AllGather) else "parts",
                    f.handle,
                )
                for f in self._flying
            ]
            self._flying.clear()
            self._trips.abandon()
            self.arrivals.early.clear()
            self._held = self._next = 0
            return flying

    @property
    def parts(self) -> list[str]:
        """Return the parts that are sent, alike on all ranks once every dense gradient is there."""
        self.arrivals.read()
        return self.binding.exchange.parts_among(self._groups_here())

    def _groups_here(self) -> list[Group]:
        """Return the groups of which any gradient has arrived."""
        groups, lacking = enumerate(self.layout.groups), self.arrivals.lacking
        return [group for index, group in groups if lacking[index] < self.layout.counts[index]]

    def samples(self, count: int, part: str = "") -> list[torch.Tensor]:
        """Draw up to ``count`` buckets of ``part``; see ``Trips.samples``."""
        with self.lock:
            self.arrivals.read()
            return self._trips.samples(self._groups_here(), count, part)

    @property
    def device(self) -> torch.device:
        return self.arrivals.device

    @abstractmethod
    def _launch(self) -> None:
        """Launch groups that are ready, within the bound on memory."""

    def _submit_second_stages(self) -> None:  # noqa: B027
        """Submit second stages, without waiting, where ranks need no common order."""

    @abstractmethod
    def _receive(self) -> None:
        """Advance groups whose collective has been received, without waiting."""

    @abstractmethod
    def _advance_oldest(self) -> None:
        """Wait for the collective that comes next, and advance its group."""

    def _start(self, index: int, plan: Plan) -> Flight:
        """Encode a group and submit its payload."""
        trip = self._trips.trip(index, self._factor)
        request = next(trip)
        self._held += plan.most
        flight = Flight(index, trip, request, plan)
        self._submit(flight)
        return flight

    def _submit(self, flight: Flight) -> None:
        """Submit the next collective of a group's exchange."""
        world, request, index = self.binding.world, flight.request, flight.index
        assert request is not None
        self._meter.add(index, wire_bytes=request.sent_bytes(world.rank, world.size))
        self._meter.hold({("work", index): 0, ("flight", index): request.held_bytes(world)})
        name = self._trips.name(self.layout.labels[index], flight.stage)
        flight.handle, flight.begun = request.submit(world, name), time.perf_counter()
        self.names.add(name)
        flight.request = request.waiting()
        self._flying.append(flight)

    def _advance(self, flight: Flight) -> None:
        """Wait for a collective, then submit the next one of its group, or launch others."""
        self._flying.remove(flight)
        index, begin = flight.index, time.perf_counter()
        request, handle = flight.request, flight.handle
        assert request is not None  # it flies
        flight.request = flight.handle = None  # a step may keep its flights
        received = request.receive(self.binding.world, handle)
        del request, handle
        end = time.perf_counter()
        self._meter.add(index, exchange_s=end - begin, flight_s=end - flight.begun)
        size = sum(map(torch.Tensor.numel, received))
        self._meter.hold({("flight", index): size, ("work", index): flight.plan.working})
        flight.stage += 1
        try:
            flight.request = flight.trip.send(received)
        except (StopIteration, PayloadError) as end_of_trip:
            if isinstance(end_of_trip, PayloadError):
                self._failures.note(index, end_of_trip)
            del received
            flight.is_over = True
            self._held -= flight.plan.most
            self._returned.add(index)
            self._hold_nothing_but_kept(index)
            self._launch()
        else:
            del received
            self._submit(flight)

    def _hold_nothing_but_kept(self, index: int) -> None:
        """Record that a group whose average was delivered holds what could not be written back."""
        kept = self.arrivals.kept.get(index)
        size = 0 if kept is None else kept.nbytes
        self._meter.hold({("flight", index): 0, ("work", index): 0, ("result", index): size})


def _go_on(find_step: weakref.ref[Step]) -> None:
    """Launch groups that are complete, and submit second stages, without a worker."""
    step = find_step()
    if step is not None and not step._hold:
        with step.lock:
            step._launch()
            step._submit_second_stages()
