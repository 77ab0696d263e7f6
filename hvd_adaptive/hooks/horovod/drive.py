"""Define HorovodDrive, one step of an optimizer of Horovod's, or of calls of ``hvd.allreduce``.

Horovod pairs collectives by name, so groups may be sent in any order, and each optimizer's worker
goes on by itself. If a process has several optimizers, ranks may call their steps in different
orders, and each rank's program waits in one for what the others would send in another. A step whose
gradients have all arrived for ``PATIENCE`` is therefore completed by its worker, as stock Horovod
completes its allreduces. No rank waits for ever unless stock Horovod would, too: workers wait only
for collectives of their own step, which the workers of the other ranks submit.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from typing import Any, cast

import torch

from hvd_adaptive.base.errors import RankMismatchError, given_up
from hvd_adaptive.base.tensors import finished_on
from hvd_adaptive.hooks.horovod.binding import Binding
from hvd_adaptive.hooks.horovod.elastic import take_first_state
from hvd_adaptive.hooks.horovod.placeholder import (
    Placeholders,
    Reduction,
    StepsDiffer,
    check_reduced,
    disagreement,
)
from hvd_adaptive.hooks.horovod.served import Watch
from hvd_adaptive.hooks.horovod.unfinished import JoinedStep
from hvd_adaptive.layout import Layout, Member, build_layout
from hvd_adaptive.run.driver import Drive, Road, Worker
from hvd_adaptive.run.unordered import UnorderedStep
from hvd_adaptive.transport.horovod_world import Abandoned

logger = logging.getLogger("hvd_adaptive")

# In seconds. A program is seldom slower to call ``step``.
PATIENCE = 0.05

# Connections whose steps have workers; with several, workers complete steps by themselves.
SESSIONS: weakref.WeakSet[Any] = weakref.WeakSet()


class _Holder:
    """Hold what the tickets of one step share; it is freed with the last of them."""

    drive: HorovodDrive


# What decompress needs to know of a gradient: its step and slot.
Ticket = tuple[_Holder, int]


class HorovodDrive(Drive):
    """Take one step to its end.

    Args:
        layout: The layout; None if no optimizer names gradients. They are then laid out when all
            have arrived.
        last_generation: Horovod's generation when the compressor's last step ended; None if there
            was none.

    Attributes:
        step: The step; None until gradients are laid out.
        tensors: The gradients that no optimizer names, in the order of arrival.
        placeholders: What Horovod's optimizer reduces instead of the gradients.
        named: Horovod's optimizer calls, so that gradients are known, and the op.
        reduced: A reduced placeholder, if it is a position.
        read: What the reduced position shows.
        watch: Detects changes of gradients; None if no optimizer was found.
        any_step: Ranks have compared their steps, and may differ in them.
        closed: No further gradient may join the others.
        here: By slot, whether a gradient has arrived.
        unreturned: Number of gradients that have arrived and whose averages were not returned.
    """

    def __init__(
        self,
        binding: Binding,
        lock: Any,
        worker: Worker | None,
        *,
        layout: Layout | None = None,
        last_generation: Any = None,
    ) -> None:
        super().__init__(binding, lock, worker)
        self.binding: Binding = binding
        self.generation, self._last_generation = binding.world.generation, last_generation
        self.tensors: list[torch.Tensor] = []
        self.watch: Watch | None = None
        self.placeholders: Placeholders | None = None
        self.reduced: torch.Tensor | None = None
        self.closed = self.any_step = self._alone = False
        self.read = Reduction(0.0, 0)  # until the reduced position is known
        self.ready = 0.0  # when all gradients were first seen to have arrived
        self.holder: weakref.ref[_Holder] | None = None
        self.unreturned = 0
        self.step: Any = None if layout is None else _new_step(binding, layout, worker)
        self.here = bytearray() if self.step is None else self.step.arrivals.here
        binding.agreement.begin_step(binding)
        due = binding.agreement.due
        fits = due.first or due.second
        self._held = fits or layout is None or not binding.exchange.is_set_up
        self.named = layout is not None and binding.has_optimizer
        binding.world.left = self.left
        if self.named:
            binding.agreement.submit(binding, binding.abandoned.attempt)

    def hold(self) -> _Holder:
        """Return what all tickets hold. If all are dropped, the step is left."""
        holder, left = _Holder(), self.left
        holder.drive = self
        self.holder = weakref.ref(holder, lambda _: left.set())
        return holder

    # On the road ----------------------------------------------------------------------------------

    def advance(self) -> bool | None:
        """Go on in the worker thread.

        If the program's thread takes the step further, the worker does so only until ranks agree
        for the first time, or if the program leaves the step alone.
        """
        # Horovod numbers handles anew in each generation, so none of this step may be polled then.
        if self.left.is_set() or self.generation is not self.binding.world.generation:
            with self.lock:
                if not self.over.is_set():
                    self.fail(given_up())
            return None
        with self.lock:
            self._alone = len(SESSIONS) > 1 and self._is_left_alone()
            if self.worker is None and not (self._is_new or self._alone):
                return False if len(SESSIONS) > 1 and not self.over.is_set() else None
            if self.worker is not None or self.step is None or self.step.device.type == "cpu":
                return self.go_on()
            with finished_on(self.step.device):
                return self.go_on()

    def send_what_is_complete(self) -> None:
        """Go on in a hook, which must not wait: its gradient's placeholder is not submitted yet."""
        with self.lock:
            if not self._alone:
                self.go_on()

    @property
    def _is_new(self) -> bool:
        """Return whether ranks have never agreed, and may wait for each other's placeholders."""
        return self.named and self.binding.agreement.is_new

    def road(self) -> Road:
        answer = self.binding.agreement.answer
        while (reduced := answer() if self.named else self.reduced) is None:
            yield False if self.named else None
        yield from self._agree(reduced)
        takes_part = self.read.active == self.binding.world.size
        is_settled = self.read.same_groups and self.read.same_number
        if takes_part and is_settled and not self._held:
            self.step.release(self.read.factor)
        if takes_part:
            self.binding.agreement.is_new = False
        yield True
        yield from self._until_closed()
        self.closed = True
        yield from (self._exchange() if takes_part else self._sum_of_some())

    def _agree(self, reduced: torch.Tensor) -> Road:
        """Read what ranks have compared; raise RankMismatchError on all of them, or ValueError."""
        world, own = self.binding.world, self.binding.agreement.own if self.named else None
        try:
            self.read = check_reduced(reduced, world.size, own=own)
        except StepsDiffer as error:
            yield from self._until_closed()
            if error.read.active < world.size or not self._take_first_state(reduced):
                self._raise_mismatch(reduced, error)
            self.any_step = True
            self.read = check_reduced(reduced, world.size, any_step=True)
        except RankMismatchError as error:
            if self.worker is None and not self._is_new:
                yield from self._until_closed()
            self._raise_mismatch(reduced, error)
        if (conflict := self.binding.agreement.conflict) is not None:
            raise ValueError(conflict)
        if self.named:
            op, hvd = cast(Any, self.binding.owner).op, world.hvd
            self.read = self.read._replace(factor=1.0 / world.size if op == hvd.Average else 1.0)

    def _raise_mismatch(self, reduced: torch.Tensor, error: RankMismatchError) -> None:
        """Raise RankMismatchError with what ranks disagree on, if they can find out."""
        binding = self.binding
        mismatch = binding.agreement.find_out(binding, binding.abandoned.attempt, reduced)
        raise RankMismatchError(mismatch or str(error))

    def _take_first_state(self, reduced: torch.Tensor) -> bool:
        """Return whether ranks have the same state now."""
        binding, compressor, world = self.binding, self.binding.compressor, self.binding.world
        # Another one at each attempt: collectives of one that was given up may be in flight.
        name = f"{binding.name or binding.unnamed}.{disagreement(reduced, world.size)}"
        last = self._last_generation
        survives = last is not None and last is not self.generation
        if not take_first_state(world, compressor, name, binding.abandoned.attempt, survives):
            return False
        binding.agreement.begin_step(binding)
        if self.step is not None:
            self.step.renumber(compressor.step)
        return True

    def _until_closed(self) -> Road:
        """Send groups that are complete, until no further gradient arrives."""
        while not (self.flushed or self._alone):
            done = None if self.worker is None else self.step.advance()
            yield done or (False if len(SESSIONS) > 1 else done)

    def _is_left_alone(self) -> bool:
        """Return whether the worker must complete a step of several optimizers'."""
        if self.flushed or not self.named:
            return False
        if self.closed:
            return True
        if not all(map(self.binding.parameters.is_sparse, self.step.arrivals.missing())):
            return False
        now = time.monotonic()
        self.ready = self.ready or now
        # A lone rank has nobody to wait for it, or Horovod has ended and reduced nothing.
        is_lone = self.read.active == 1 < self.binding.world.size
        return now - self.ready >= PATIENCE and not is_lone

    def _exchange(self) -> Road:
        """Complete a step in which all ranks take part."""
        binding = self.binding
        if self.step is None:
            self.step = self._laid_out()
        elif not self.read.same_groups:
            gradients = self._taken_back()
            self.step = self._again(binding.lay_out_by_name(), gradients)
        step = self.step
        if step.attempt:
            binding.abandoned.complete(binding.world, binding.name_at(step.attempt), step.device)
        if not self.read.same_number:
            self._agree_on_number(binding.name_at(step.attempt))
        if not binding.exchange.is_set_up:
            binding.set_up(step.layout, step.number, step.device, step.attempt)
            binding.agreement.begin_step(binding)  # averages may have tables to fit by now
        if binding.agreement.due.samples:
            sync, updates = binding.sync(step.attempt), binding.compressor._training.updates
            updates.run(step.number, step.samples, sync, step.parts)
        step.launch_all(self.read.factor)
        while not step.is_received:
            has_written = self.flushed and step.write_next()  # later averages replace gradients
            yield step.advance() or has_written
        if self.read.compares and binding.world.size > 1:
            binding.compare_parameters(step.attempt)
        if self.flushed:
            step.write_next()
        step.failed_everywhere()
        while not self.flushed:
            yield None
        while step.write_next():
            pass
        step.check_everywhere()

    def _agree_on_number(self, name: str) -> None:
        """Number the compressor alike on all ranks, before any random number is drawn."""
        instance = self.binding.compressor._training.instance
        own = torch.tensor(instance.offer(), device="cpu")
        everyone = self.binding.world.gather_equal(own, f"{name}.number")
        instance.agree(everyone.tolist(), name)

    def _sum_of_some(self) -> Road:
        """Complete a step of some ranks; the others have called hvd.join()."""
        logger.info("some ranks have called hvd.join(): this step travels uncompressed")
        binding, attempt = self.binding, self.binding.abandoned.attempt
        gradients = dict(enumerate(self.tensors)) if self.step is None else self._taken_back()
        name = binding.unnamed if self.step is None else binding.name
        self.step = JoinedStep(binding, gradients, name, attempt)
        self.step.launch_all(self.read.factor)
        while not self.step.is_received:
            yield False
        self.step.check_ranks(self.read.active)
        while not self.flushed:
            yield None

    def _laid_out(self) -> UnorderedStep:
        """Lay out the tensors in the order of arrival, if ranks have the same ones."""
        binding, part_of = self.binding, self.binding.compressor.parts.label_of
        members = [
            Member(str(i), tuple(t.shape), t.dtype, part_of(str(i)))
            for i, t in enumerate(self.tensors)
        ]
        cut = functools.partial(build_layout, members, as_given=True, before=None)
        layout = binding.build_layout(cut)
        binding.name = binding.unnamed
        own = torch.tensor([layout.fingerprint >> 1], dtype=torch.int64, device="cpu")
        if not bool((binding.world.gather_equal(own, f"{binding.name}.layout") == own).all()):
            raise RankMismatchError("ranks disagree on their gradients' shapes or order")
        return self._again(layout, dict(enumerate(self.tensors)))

    def _taken_back(self) -> dict[int, torch.Tensor]:
        """Return the gradients by slot, out of the step, which has sent nothing."""
        gradients = self.step.arrived
        self.step.abandon()
        return gradients

    def _again(self, layout: Layout, gradients: dict[int, torch.Tensor]) -> UnorderedStep:
        step = _new_step(self.binding, layout, self.worker)
        for slot, gradient in gradients.items():
            step.arrive(slot, gradient, self.binding.parameters.is_gradient(slot, gradient))
        return step

    # End ------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        if isinstance(error, Abandoned):
            self.binding.abandoned.add(error.sent, self.generation)
            error = given_up()
        super().fail(error)

    def give_up(self) -> None:
        """Leave what is in flight to the next attempt; see unfinished.py."""
        self.binding.world.left = None
        if self.step is not None:
            self.binding.abandoned.add_step(self.step, self.generation)


def _new_step(binding: Binding, layout: Layout, worker: Worker | None) -> UnorderedStep:
    """Return the step that comes next, without gradients."""
    residuals = binding.compressor._training.residuals
    if residuals is not None:
        residuals.lay_out(layout, binding.world.rank, binding.world.size)
    return UnorderedStep(binding, layout, binding.abandoned.attempt, worker)
