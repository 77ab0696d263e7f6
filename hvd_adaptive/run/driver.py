"""Define Driver, which takes gradients through the steps of one compressor.

A door (hooks/) finds the parameters' slots and calls, for each step,

    begin(binding, layout)       when the step's first gradients are there
    arrive(gradients, done)      for gradients that arrive together, final and disjoint
    finish()                     when no further gradient will arrive

Everything that needs no user code runs on a worker thread meanwhile: ranks compare their positions
in training, groups are encoded, sent, received and decoded, tables are fitted. ``done`` is called
as soon as averages have replaced its gradients. ``finish`` waits, and raises the worker's error.
With ``worker=False``, and on a GPU, ``arrive`` sends what it can, and ``finish`` does the rest.

Ranks must call ``begin`` and ``arrive`` in the same order. Collectives of a step follow one order:
the gather of positions, fits of tables, groups by their course (course.py), failures.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.device import HostCopy, stacked
from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.layout import Layout
from hvd_adaptive.run.agreement import disagreement, position
from hvd_adaptive.run.ordered import OrderedStep
from hvd_adaptive.run.worker import Worker

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.run.groups import Groups

logger = logging.getLogger("hvd_adaptive")

# Lengths of payloads are exchanged again after so many steps, so that frames can shrink.
LENGTHS_LAST = 256

# Called with None, or with the error because of which there are no averages.
Done = Callable[[BaseException | None], None]


@dataclass
class _Delivery:
    """Gradients that arrived together, by slot, and what follows when averages replaced them."""

    gradients: Mapping[int, torch.Tensor]
    done: Done


@dataclass
class _Drive:
    """One step.

    Attributes:
        held: Nothing is sent before ``finish``: the exchange is set up, or gradients are sampled
            for tables.
        check: The gather of positions, which has been submitted.
        lock: Held by the thread that takes the step further.
        used: Slots that arrived together, and for each whether this rank's gradient has a value
            other than zero; filled in only if there are residuals.
        flushed: No further gradient will arrive.
        over: Set when all is done, or ``error`` is.
        begun: When the first gradients arrived.
    """

    step: OrderedStep
    held: bool
    check: Any
    lock: Any
    agreed: bool = False
    flushed: bool = False
    used: list[tuple[list[int], HostCopy]] = field(default_factory=list)
    deliveries: deque[_Delivery] = field(default_factory=deque)
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    begun: float = field(default_factory=time.perf_counter)

    @property
    def binding(self) -> Groups:
        """Return the binding of the step."""
        return self.step.binding

    # On the worker, or in the program's thread without one ----------------------------------------

    def advance(self) -> bool | None:
        """See ``worker.Work.advance``."""
        with self.lock:
            if self.over.is_set():
                return None
            try:
                if self.flushed:
                    self._complete()
                    self.over.set()
                    return None
                return self._go_on()
            except BaseException as error:
                self.fail(error)
                return None

    def _go_on(self) -> bool | None:
        """Do what needs no waiting."""
        if self.held:
            return None
        if not self._agree(wait=False):
            return False
        done = self.step.advance()
        if self.step.error is not None:
            raise self.step.error
        return self._deliver_what_is_back() or done

    def _complete(self) -> None:
        """Do the rest of the step, waiting for other ranks."""
        binding, step = self.binding, self.step
        self._agree(wait=True)
        binding.set_up(step.layout, step.number, step.device)
        updates = binding.compressor.updates
        if updates.needs_samples(step.number):
            updates.run(step.number, step.samples, binding.sync(), step.parts)
        step.launch_all(1.0 / binding.world.size)
        used = self._used_somewhere()
        while self.deliveries:
            self._deliver(used)
        step.check_everywhere()

    def _agree(self, wait: bool) -> bool:
        """Compare positions; return whether ranks are known to agree.

        Raises:
            RankMismatchError: They do not.
        """
        world: Any = self.binding.world
        if not self.agreed:
            if not wait and not world.is_gathered(self.check):
                return False
            if mismatch := disagreement(world.end_gather(self.check)):
                raise RankMismatchError(mismatch)
            self.agreed = self.step.may_receive = True
        return True

    def _used_somewhere(self) -> Sequence[bool] | None:
        """Return for each slot whether some rank's gradient has a value other than zero.

        If none has, DDP applies nothing (find_unused_parameters), so the residual must keep what it
        would send. None without residuals.
        """
        if self.binding.compressor.residuals is None:
            return None
        self.step.receive_all()  # ranks have sent different numbers of groups
        slots = range(len(self.step.layout.members))
        own = [False for _ in slots]
        for arrived, flags in self.used:
            for slot, flag in zip(arrived, flags.get().tolist(), strict=True):
                own[slot] = flag
        used = torch.tensor(own, dtype=torch.uint8, device="cpu")
        return self.binding.world.gather_equal(used, "used").any(dim=0).tolist()

    def _deliver_what_is_back(self) -> bool:
        """Deliver averages that have been received; with residuals all are delivered at the end."""
        delivered = False
        while self.deliveries and self.binding.compressor.residuals is None:
            if not all(map(self.step.is_back, self.deliveries[0].gradients)):
                break
            self._deliver(None)
            delivered = True
        return delivered

    def _deliver(self, used: Sequence[bool] | None) -> None:
        delivery = self.deliveries[0]
        for slot, gradient in delivery.gradients.items():
            result = self.step.result(slot, absent=used is not None and not used[slot])
            if result.data_ptr() != gradient.data_ptr():
                gradient.copy_(result)
        self.deliveries.popleft()
        delivery.done(None)

    def give_up(self) -> None:
        """Give the step up, so that ranks remain in one order of collectives.

        Ranks have the same gradients, but have sent different numbers of groups.
        """
        try:
            if not self.held and self.error is None:
                self._agree(wait=True)
                self.step.send_what_has_arrived()
        except RuntimeError as error:
            logger.debug("step %d is given up: %s", self.step.number, error)
        self.step.abandon()

    def fail(self, error: BaseException) -> None:
        """End the step with an error."""
        self.error = error
        while self.deliveries:
            self.deliveries.popleft().done(error)
        self.over.set()


class Driver:
    """Take gradients through the steps of one compressor."""

    make_lock = threading.RLock  # tests replace it

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self._attempt = 0
        self._drive: _Drive | None = None
        self._worker = Worker(functools.partial(_drive_of, weakref.ref(self)))

    @property
    def is_idle(self) -> bool:
        """Return whether no step is in progress."""
        return self._drive is None

    @property
    def is_held(self) -> bool:
        """Return whether the step in progress sends nothing before ``finish``."""
        return self._drive is not None and (self._drive.held or not self._works(self._drive))

    def begin(self, binding: Groups, layout: Layout, on_cpu: bool) -> None:
        """Begin a step of ``layout``; ranks compare their positions.

        Args:
            binding: The ranks and the exchange, whose world has ``begin_gather``.
            layout: The layout.
            on_cpu: Whether gradients are on the CPU.
        """
        self.give_up()
        compressor, number = self.compressor, self.compressor.step
        residuals = compressor.residuals
        if residuals is not None:
            residuals.lay_out(layout, binding.world.rank, binding.world.size)
        binding.prepare(number)
        compressor.updates.due(number)  # once a step, whatever it returns
        # Averages replace gradients, so these are sampled before anything is sent.
        samples = compressor.updates.needs_samples(number)
        warmed_up = number == compressor.settings.warmup_steps
        forgets = samples or number % LENGTHS_LAST == 0 or warmed_up
        if forgets:
            binding.world.forget_lengths()
        # Lengths are exchanged anew: the host would wait for a GPU, and so for the backward pass.
        held = samples or not binding.exchange.is_set_up or (forgets and not on_cpu)
        worker = self._worker if on_cpu and compressor.settings.worker else None
        step = OrderedStep(binding, layout, number, self._attempt, residuals, worker)
        check = binding.world.begin_gather(position(compressor, self._attempt, layout, held))
        self._drive = _Drive(step, held, check, self.make_lock())
        if not held:
            step.release(1.0 / binding.world.size)

    def arrive(self, gradients: Mapping[int, torch.Tensor], done: Done) -> None:
        """Accept gradients by slot. They are final and disjoint, and averages will replace them.

        Args:
            gradients: The gradients.
            done: Function that is called once, from any thread, when averages have replaced them,
                or with an error.
        """
        drive = self._known()
        if self.compressor.residuals is not None:
            flags = stacked([gradient.any() for gradient in gradients.values()])
            drive.used.append((list(gradients), flags))
        drive.deliveries.append(_Delivery(gradients, done))
        for slot, gradient in gradients.items():
            drive.step.arrive(slot, gradient)

    def finish(self) -> None:
        """Complete the step, all of whose gradients have arrived; averages replace them.

        Raises:
            RankMismatchError: Ranks differ in settings, steps or gradients.
            PayloadError: A payload arrived corrupt, on any rank.
        """
        drive, meter = self._known(), self.compressor.meter
        begin = time.perf_counter()
        meter.add("arrival_s", begin - drive.begun)
        drive.flushed = True
        if self._works(drive):
            self._worker.wait_for(drive.over, self._warn_of_stall)
        else:
            drive.advance()
        if drive.error is not None:
            self.give_up()
            raise drive.error
        step, binding = drive.step, drive.binding
        self.compressor.step, self._attempt, self._drive = step.number + 1, 0, None
        meter.add("blocked_s", time.perf_counter() - begin)
        meter.finish()
        step.commit()
        binding.monitored.step_ended(binding, step.number, step.layout, step.device)

    def give_up(self) -> None:
        """Give up the step in progress, if there is one.

        Payloads of the next attempt differ from this one's, so ranks detect that they gave up
        different attempts.
        """
        drive, self._drive = self._drive, None
        if drive is None:
            return
        with drive.lock:
            drive.over.set()
            drive.give_up()
        self._attempt += 1
        self.compressor.meter.give_up()

    def describe(self) -> str:
        """Return what the step in progress waits for, in lines; "" if there is none."""
        drive = self._drive
        return "" if drive is None else drive.step.describe()

    def _warn_of_stall(self) -> None:
        logger.warning("still waiting for other ranks: %s", self.describe())

    def _known(self) -> _Drive:
        if self._drive is None:
            raise RuntimeError("no step has begun, or it was given up")
        return self._drive

    def _works(self, drive: _Drive) -> bool:
        return drive.step.has_worker


def _drive_of(find_driver: weakref.ref[Driver]) -> _Drive | None:
    driver = find_driver()
    return None if driver is None else driver._drive
