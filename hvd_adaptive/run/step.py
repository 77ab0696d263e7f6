"""Define Step, which exchanges one step's gradients in groups."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.feedback import Residuals
from hvd_adaptive.layout import Group, Layout
from hvd_adaptive.run.arrivals import Arrivals
from hvd_adaptive.run.failures import Failures, step_failed
from hvd_adaptive.run.results import Results
from hvd_adaptive.run.trip import Trip, Trips
from hvd_adaptive.transport.collectives import AllGather, Collective, InFlight

if TYPE_CHECKING:
    from hvd_adaptive.run.rank_context import RankContext
    from hvd_adaptive.run.worker import Worker

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(eq=False)
class _Flight:
    """A group in flight, and the collective that its trip waits for."""

    index: int
    trip: Trip
    request: Collective
    early: int | None = None  # the number of its stages, if they may go on before the first result
    stage: int = 0
    handle: Any = None
    begun: float = 0.0


def _locked(method: _Method) -> _Method:
    """Hold the step's lock during a method, and begin with what has arrived."""

    @functools.wraps(method)
    def locked(step: Step, *arguments: Any, **keywords: Any) -> Any:
        with step.lock:
            step.arrivals.read()
            return method(step, *arguments, **keywords)

    return cast(_Method, locked)


class Step:
    """Exchange the gradients of one step.

    1. ``arrive`` accepts a member's gradient. After ``release``, complete groups are launched in
       the layout's reverse order on every rank (roughly the order of the backward pass), within the
       bound on memory. Update steps are not released.
    2. Groups whose first stage has been received submit their second stage. A worker (worker.py)
       also decodes what has been received; averages stay in memory of their own meanwhile.
    3. ``launch_all`` launches the rest; every gradient has arrived. After ``write_back`` averages
       replace gradients.
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
        number: int,
        attempt: int = 0,
        residuals: Residuals | None = None,
        worker: Worker | None = None,
        disjoint: bool = False,
    ) -> None:
        self.binding = binding
        self.layout = layout
        self._factor = 0.0  # until release or launch_all
        self.attempt = attempt
        self.lock = self.make_lock()
        self.arrivals = Arrivals(layout, disjoint)
        self.names: set[str] = set()  # of the collectives that were submitted
        self._results = Results(binding, self.arrivals, layout)
        self._trips = Trips(
            binding.compressor,
            binding.exchange,
            layout,
            number,
            self._results,
            meter=binding.compressor._training.meter,
            attempt=attempt,
            name=binding.name,
            residuals=residuals,
        )
        self._worker = worker
        self._hold = True
        self._all_arrived = False
        self._next = len(layout.groups)
        self._flying: deque[_Flight] = deque()
        self._held = 0
        self._returned: set[int] = set()  # groups that have been received, or could not be read
        self._failures = Failures()
        self._failed: dict[int, int] | None = None

    @property
    def number(self) -> int:
        """Return the number of the step."""
        return self._trips.number

    def renumber(self, number: int) -> None:
        """Adopt the number of the first rank, before anything is sent."""
        self._trips.number = number

    @property
    def arrived(self) -> dict[int, torch.Tensor]:
        """Return the gradients by slot."""
        with self.lock:
            self.arrivals.read()
            there = enumerate(self.arrivals.tensors)
            return {slot: tensor for slot, tensor in there if tensor is not None}

    def has(self, slot: int) -> bool:
        """Return whether the member's gradient has arrived."""
        return bool(self.arrivals.here[slot])

    def arrive(self, slot: int, tensor: torch.Tensor, is_gradient: bool = True) -> None:
        """Accept a member's gradient; without a worker, launch groups that are complete.

        A worker may hold the lock meanwhile.

        Args:
            slot: The member.
            tensor: The gradient.
            is_gradient: Whether it is a parameter's gradient, which the average may replace.
        """
        arrivals = self.arrivals
        if not (arrivals.on_cpu and tensor.is_cpu) and tensor.device != arrivals.device:
            self.binding.compressor.parts.default.payloads.check_device(tensor.device)
        news = arrivals.post(slot, tensor, is_gradient)
        if self._worker is not None:
            if news:
                self._worker.wake()
        elif not self._hold:
            self._go_on()

    @_locked
    def release(self, factor: float) -> None:
        """Launch complete groups from now on, and submit their second stages.

        Args:
            factor: Scale of sums over ranks.
        """
        self._hold, self._factor = False, factor
        if self._worker is None:
            self._launch()

    @_locked
    def _go_on(self) -> None:
        """Launch groups that are complete, and submit second stages."""
        self._launch()
        self._submit_second_stages()

    @_locked
    def advance(self) -> bool | None:
        """Do what can be done without waiting.

        Returns:
            Whether anything was done; None if there is nothing to do until a gradient arrives.
        """
        if self._hold:
            return None
        before = self._next, len(self.names), len(self._returned)
        self._launch()
        self._receive_last_stages()
        self._submit_second_stages()
        while self._all_arrived and self._flying and self._is_back(self._flying[0]):
            self._advance(self._flying[0])
        if before != (self._next, len(self.names), len(self._returned)):
            return True
        return False if self._flying else None

    @property
    def is_received(self) -> bool:
        """Return whether all groups have been received, after ``launch_all``."""
        return not self._flying and self._next == 0

    @_locked
    def launch_all(self, factor: float) -> None:
        """Submit every group, within the bound on memory.

        Every dense gradient has arrived, on every rank. A group without any gradient (sparse
        parameters, which Horovod exchanges itself) is omitted.

        Args:
            factor: Scale of sums over ranks.
        """
        self._hold, self._all_arrived, self._factor = False, True, factor
        self._launch()

    @_locked
    def write_back(self) -> None:
        """Replace gradients by their averages from now on."""
        if not self._results.is_early:
            return
        self._results.write_early()
        for index in self._returned:
            self._account("result", index, self._results.kept_bytes(index))

    def result(self, slot: int, absent: bool = False) -> torch.Tensor:
        """Return the reduced gradient of a member, in its own shape and dtype.

        Args:
            slot: The member.
            absent: No rank has the gradient. The result is then zero; quantisation could turn the
                zeros of a bucket into other values.
        """
        for group, _ in self.layout.pieces_of[slot]:
            while group not in self._returned:
                self._advance_oldest()
        tensor = self.arrivals.take(slot)
        if not self.arrivals.in_place[slot] and self._failures.first is None:
            tensor = self._results.of(slot, tensor, bool(self.arrivals.is_gradient[slot]))
        if absent:
            self._trips.hold(slot)
            tensor.detach().zero_()
        return tensor

    def check_everywhere(self) -> None:
        """Raise an error, on every rank, if the step must not be applied.

        A rank could not read what it received, or residuals have outgrown the gradients.
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
            name, row = self._trips.name_of("corrupt"), self._trips.row()
            self._failed, rows = self._failures.everywhere(self.binding.world, name, row)
            self._trips.agree(rows)
        return self._failed

    def describe(self) -> str:
        """Return what the step waits for, in lines."""
        members = self.layout.members
        missing = [m.name for slot, m in enumerate(members) if not self.has(slot)]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        lines = [
            f"step {self.number}, attempt {self.attempt}: {len(members) - len(missing)} of "
            f"{len(members)} gradients have arrived"
            + (f", without {', '.join(missing[:3])}{more}" if missing else "")
        ]
        now = time.perf_counter()
        lines += [
            f"{self.layout.labels[f.index]}: collective {f.stage + 1}, for {now - f.begun:.1f} s"
            for f in list(self._flying)
        ]
        return "\n".join(lines)

    @_locked
    def abandon(self) -> list[InFlight]:
        """Give up an unfinished step, and return the collectives in flight."""
        self._hold = True
        flying = [
            InFlight(
                self._trips.name(f.index, f.stage),
                "payloads" if isinstance(f.request, AllGather) else "parts",
                f.handle,
            )
            for f in self._flying
        ]
        self._flying.clear()
        self._trips.abandon()
        self._results.forget_early()
        self._held = 0
        self._next = 0
        return flying

    def commit(self) -> None:
        """Apply the step's residuals after its end, unless AMP skips the step."""
        self._trips.commit()

    @property
    def parts(self) -> list[str]:
        """Return labels of the parts that are sent, the same on every rank.

        Every dense gradient must have arrived.
        """
        self.arrivals.read()
        return self.binding.exchange.parts_among(self._groups_here())

    def _groups_here(self) -> list[Group]:
        """Return the groups of which any gradient has arrived."""
        groups = enumerate(self.layout.groups)
        return [group for index, group in groups if self.arrivals.any_of(index)]

    @_locked
    def samples(self, count: int, part: str = "") -> list[torch.Tensor]:
        """Draw up to ``count`` buckets of ``part`` that this rank will quantise (run/draws.py).

        If ranks of a node quantise its mean, this is a collective of these ranks.
        """
        draws = self._trips.draws(self._groups_here(), count, part)
        name = self._trips.name_of(f"samples.{part}")
        if len(draws.members) > 1:
            self.names.add(name)
        return draws.among_members(self._trips.values, self.binding.world, name, self.device)

    @property
    def device(self) -> torch.device:
        """Return the device of the gradients."""
        return self.arrivals.device or torch.device("cpu")

    def _launch(self) -> None:
        """Launch groups that are ready, in order, within the bound on memory."""
        while self._next > 0 and (self._all_arrived or self.arrivals.all_of(self._next - 1)):
            index = self._next - 1
            if self._all_arrived and not self.arrivals.any_of(index):
                self._next = index
                continue
            if not self._fits(index):
                break
            self._next = index
            self._start(index)
            self._submit_second_stages()

    def _submit_second_stages(self) -> None:
        """Submit the second stages of groups whose first stage has been received, without waiting.

        Ranks do so at different times; Horovod orders collectives. There is no deadlock: all ranks
        advance first stages in the order of their launch, so a rank that waits for its oldest group
        waits for ranks that are behind it, or for an older group. Averages are not decoded here,
        because they would overwrite memory into which autograd may still accumulate.
        """
        while flight := next((f for f in self._flying if f.stage == 0), None):
            if flight.early != 2 or not self._is_back(flight):
                return
            self._advance(flight)

    def _is_back(self, flight: _Flight) -> bool:
        """Return whether what a group waits for has been received."""
        return self.binding.world.poll(flight.handle)

    def _fits(self, index: int) -> bool:
        """Return whether the bound on memory allows a group beside those in flight."""
        total = self._held + self.binding.in_flight_bytes(self.layout.groups[index])
        return not self._flying or total <= self.binding.settings.tuning.in_flight_bytes

    def _start(self, index: int) -> None:
        """Encode a group and submit its payload."""
        group, binding = self.layout.groups[index], self.binding
        trip = self._trips.trip(index, self._factor)
        request, early = next(trip), None
        self._held += binding.in_flight_bytes(group)
        if self.arrivals.on_cpu and binding.world.orders_collectives:
            early = binding.exchange.stages(group.coordinates)
        self._submit(_Flight(index, trip, request, early))

    def _submit(self, flight: _Flight) -> None:
        """Submit the next collective of a group's exchange."""
        world = self.binding.world
        sent = flight.request.sent_bytes(world.rank, world.size)
        self.binding.compressor._training.meter.add("wire_bytes", sent, flight.index)
        name = self._trips.name(flight.index, flight.stage)
        self._account("flight", flight.index, flight.request.held_bytes(world))
        flight.handle, flight.begun = flight.request.submit(world, name), time.perf_counter()
        self.names.add(name)
        flight.request = flight.request.waiting()
        self._flying.append(flight)

    def _account(self, kind: str, index: int, size: int) -> None:
        """Record that a group holds ``size`` bytes from now on, in this step."""
        self.binding.compressor._training.meter.hold((kind, index), size)

    def _advance_oldest(self) -> None:
        """Wait for the collective that was submitted first, and advance its group."""
        if not self._flying:
            raise RuntimeError("this gradient's step was given up: backward has run again since")
        self._advance(self._flying[0])

    def _receive_last_stages(self) -> None:
        """Decode groups whose last stage has been received, without waiting.

        A group's first stage is advanced in the order of launch (``_submit_second_stages``). After
        its last stage a group submits nothing, so the order does not matter.
        """
        for flight in list(self._flying):
            if flight.early == flight.stage + 1 and self._is_back(flight):
                self._advance(flight)

    def _advance(self, flight: _Flight) -> None:
        """Wait for a collective, then submit the next one of its group.

        After the last one, launch further groups that fit.
        """
        self._flying.remove(flight)
        meter = self.binding.compressor._training.meter
        with meter.time("exchange_s", flight.index):
            received = flight.request.receive(self.binding.world, flight.handle)
        meter.add("flight_s", time.perf_counter() - flight.begun, flight.index)
        self._account("flight", flight.index, sum(part.numel() for part in received))
        self._account("work", flight.index, self._trips.working_bytes(flight.index))
        try:
            flight.request = flight.trip.send(received)
            flight.stage += 1
        except StopIteration:
            self._finish(flight.index)
        except PayloadError as error:
            self._failures.note(flight.index, error)
            self._finish(flight.index)
        else:
            del received
            self._account("work", flight.index, 0)
            self._submit(flight)

    def _finish(self, index: int) -> None:
        """Record that a group's average has been delivered, or could not be read."""
        self._held -= self.binding.in_flight_bytes(self.layout.groups[index])
        self._account("flight", index, 0)
        self._account("work", index, 0)
        self._account("result", index, self._results.kept_bytes(index))
        self._returned.add(index)
        self._launch()
