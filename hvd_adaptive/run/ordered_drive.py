"""Define OrderedDriver, for ranks that pair collectives by their order.

A door (hooks/) finds the parameters' slots and calls, for each step,

    begin(binding, on_cpu)       when the step's first gradients are there
    arrive(gradients, done)      for gradients that arrive together, final and disjoint
    finish()                     when no further gradient will arrive

``done`` is called as soon as averages have replaced its gradients. Ranks must call ``begin`` in the
same order; gradients may arrive in any. Collectives of a step follow one order: the gather of
positions, fits of tables, groups (ordered.py), parameters if they are compared, failures.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.base.tensors import HostCopy, stacked
from hvd_adaptive.run.agreement import disagreement, position
from hvd_adaptive.run.driver import Drive, Driver, Road, Worker
from hvd_adaptive.run.ordered import OrderedStep
from hvd_adaptive.run.rank_context import RankContext

logger = logging.getLogger("hvd_adaptive")

# Lengths of payloads are exchanged again after so many steps, so that frames can shrink.
LENGTHS_LAST = 256

# Called with None, or with the error because of which there are no averages.
Done = Callable[[BaseException | None], None]


class OrderedDrive(Drive):
    """Take one step of DDP or LocalSGD to its end; ranks compare their positions first.

    The world of ``binding`` has ``begin_gather``. If ``held``, nothing is sent before the step is
    flushed and ranks agree: these settings are new, the exchange is set up, or gradients are
    sampled for tables, which averages would replace.
    """

    def __init__(
        self, binding: RankContext, on_cpu: bool, attempt: int, lock: Any, worker: Worker | None
    ) -> None:
        super().__init__(binding, lock, worker)
        compressor, layout = binding.compressor, binding.layout
        assert layout is not None  # sessions lay out before they begin
        number, residuals = compressor.step, compressor._training.residuals
        if residuals is not None:
            residuals.lay_out(layout, binding.world.rank, binding.world.size)
        binding.prepare(number)
        due = compressor._training.updates.at(number)
        warmed_up = number == compressor.settings.warmup_steps
        if due.samples or number % LENGTHS_LAST == 0 or warmed_up:
            binding.world.forget_lengths()
        self.held = due.samples or not (binding.has_agreed and binding.exchange.is_set_up)
        self.step = OrderedStep(binding, layout, attempt, worker, on_cpu)
        compares = binding.wants_comparison
        own = position(compressor, attempt, layout, due, self.held, binding.settings_row, compares)
        self._check: Any = binding.world.begin_gather(own)
        self._agreed = self._compares = False
        # Slots that arrived together, and for each whether this rank's gradient has a value other
        # than zero; filled in only if there are residuals.
        self._used: list[tuple[list[int], HostCopy]] = []
        # Gradients that arrived together, and what follows when averages have replaced them.
        self._deliveries: deque[tuple[Mapping[int, torch.Tensor], Done]] = deque()
        # To exchange lengths, a hook would wait for ranks that may differ, and for a GPU.
        if not self.held and (worker is not None or binding.world.knows_lengths):
            self.step.release(1.0 / binding.world.size)

    def arrive(self, gradients: Mapping[int, torch.Tensor], done: Done) -> None:
        """See ``OrderedDriver.arrive``."""
        if self.binding.compressor._training.residuals is not None and gradients:
            flags = stacked([gradient.any() for gradient in gradients.values()])
            self._used.append((list(gradients), flags))
        self._deliveries.append((gradients, done))
        for slot, gradient in gradients.items():
            self.step.arrive(slot, gradient)

    def road(self) -> Road:
        while not self.flushed:
            if self.held:
                yield None
            elif not self._agree(wait=False):
                yield False
            else:
                done = self.step.advance()
                yield self._deliver_what_is_back() or done
        self._complete()

    def _complete(self) -> None:
        """Do the rest of the step, waiting for other ranks."""
        binding, step = self.binding, self.step
        self._agree(wait=True)
        if not binding.exchange.is_set_up:
            binding.set_up(step.layout, step.number, step.device)
        updates = binding.compressor._training.updates
        # ``set_up`` may have made tables of averages, which are fitted at once; the step is held.
        if self.held and updates.at(step.number).samples:
            updates.run(step.number, step.samples, binding.sync(), step.parts)
        step.launch_all(1.0 / binding.world.size)
        has_residuals = binding.compressor._training.residuals is not None
        used = self._used_somewhere() if has_residuals else None
        while self._deliveries:
            self._deliver(used)
        if self._compares:
            binding.compare_parameters()
        step.check_everywhere()

    def _agree(self, wait: bool) -> bool:
        """Compare positions; return whether ranks agree for certain, or raise RankMismatchError."""
        world: Any = self.binding.world
        if not self._agreed:
            if not wait and not world.is_gathered(self._check):
                return False
            positions = world.end_gather(self._check)
            if mismatch := disagreement(positions, self.binding.agreed):
                raise RankMismatchError(mismatch)
            self._compares = bool(positions[:, -1].any())
            self._agreed = self.step.may_receive = self.binding.has_agreed = True
        return True

    def _used_somewhere(self) -> Sequence[bool]:
        """Return for each slot whether some rank's gradient has a value other than zero.

        If none has, DDP applies nothing (find_unused_parameters), so the residual must keep what it
        would send.
        """
        self.step.receive_all()  # ranks have sent different numbers of groups
        slots = range(len(self.step.layout.members))
        own = [False for _ in slots]
        for arrived, flags in self._used:
            for slot, flag in zip(arrived, flags.get().tolist(), strict=True):
                own[slot] = flag
        used = torch.tensor(own, dtype=torch.uint8, device="cpu")
        return self.binding.world.gather_equal(used, "used").any(dim=0).tolist()

    def _deliver_what_is_back(self) -> bool:
        """Deliver averages that have been received; with residuals all are delivered at the end."""
        delivered = False
        while self._deliveries and self.binding.compressor._training.residuals is None:
            gradients, _ = self._deliveries[0]
            if not self.step.is_back(gradients):
                break
            self._deliver(None)
            delivered = True
        return delivered

    def _deliver(self, used: Sequence[bool] | None) -> None:
        gradients, done = self._deliveries[0]
        for slot, gradient in gradients.items():
            result = self.step.result(slot, absent=used is not None and not used[slot])
            if result.data_ptr() != gradient.data_ptr():
                gradient.copy_(result)
        self._deliveries.popleft()
        done(None)

    def give_up(self) -> None:
        """Complete all collectives of the step, of which ranks have begun different numbers."""
        try:
            if not self.held and self.error is None:
                self._agree(wait=True)
                self.step.send_the_rest()
        except RuntimeError as error:
            logger.debug("step %d is given up: %s", self.step.number, error)
        self.step.abandon()

    def fail(self, error: BaseException) -> None:
        self.error = error
        while self._deliveries:
            _, done = self._deliveries.popleft()
            done(error)
        self.over.set()


class OrderedDriver(Driver):
    """Take gradients through the steps of one compressor, in one order of collectives."""

    @property
    def is_held(self) -> bool:
        """Return whether the step in progress sends nothing before ``finish``."""
        return self.drive is not None and (self.drive.held or self.drive.worker is None)

    def begin(self, binding: RankContext, on_cpu: bool) -> None:
        """Begin a step of the binding's layout; see ``OrderedDrive``."""

        def make(lock: Any, worker: Worker | None) -> OrderedDrive:
            return OrderedDrive(binding, on_cpu, self.attempt, lock, worker)

        self.start(make, on_cpu)

    def arrive(self, gradients: Mapping[int, torch.Tensor], done: Done) -> None:
        """Accept gradients by slot. They are final and disjoint, and averages will replace them.

        ``done`` is called once, from any thread, when averages have replaced them, or with an
        error.
        """
        self.drive.arrive(gradients, done)

    def finish(self) -> None:
        """Complete the step, all of whose gradients have arrived; see ``Driver.wait``."""
        begin = time.perf_counter()
        self.wait()
        self.compressor._training.meter.add(blocked_s=time.perf_counter() - begin)
        self.end()
