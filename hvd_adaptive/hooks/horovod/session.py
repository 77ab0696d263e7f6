"""From Horovod's calls of compress and decompress to steps."""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
import zlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.hooks.description import Description
from hvd_adaptive.hooks.horovod.agreement import LATER_SECONDS, compare
from hvd_adaptive.hooks.horovod.binding import Binding
from hvd_adaptive.hooks.horovod.changed import WarnOfChanges, Watch, check_gradient
from hvd_adaptive.hooks.horovod.helper import PATIENCE, WATCH, finished_on
from hvd_adaptive.hooks.horovod.joined import JoinedStep
from hvd_adaptive.hooks.horovod.newcomers import tables_fitted, take_first_state
from hvd_adaptive.hooks.horovod.owner import find_owner
from hvd_adaptive.hooks.horovod.placeholder import (
    Reader,
    Reduction,
    StepsDiffer,
    disagreement,
    placeholder,
)
from hvd_adaptive.hooks.horovod.roll_call import RollCall
from hvd_adaptive.layout import Layout, Member
from hvd_adaptive.once import WarnOnce
from hvd_adaptive.run.step import Step
from hvd_adaptive.transport.collectives import Sent
from hvd_adaptive.transport.horovod_world import Abandoned, patient

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor

logger = logging.getLogger("hvd_adaptive")


@dataclass
class _Batch:
    """One step's gradients: a Step, or tensors without names until the first decompress.

    held: nothing may be launched before the first decompress.
    watch: of gradients that an optimizer handed over; None where there is none.
    lost: Horovod dropped a gradient of this step without asking for it back.
    life: that of Horovod in which it began.
    ready: when all placeholders were first seen to be back.
    helped: a helper does, or did, what decompress would.  failure: what came of that.
    given_up: no result is asked for any more.
    """

    step: Any  # a Step, a JoinedStep, or None until the first decompress
    unnamed: list[torch.Tensor]
    roll_call: RollCall | None = None
    held: bool = True
    watch: Watch | None = None
    lost: bool = False
    ready: float | None = None
    helped: bool = False
    failure: Exception | None = None
    given_up: bool = False
    reader: Reader | None = None
    life: Any = None
    tickets: list[weakref.ref] = field(default_factory=list)

    def ticket(self, slot: int) -> Ticket:
        """A ticket whose loss is noticed."""
        ticket = Ticket(self, slot)
        self.tickets.append(weakref.ref(ticket, self._mark_lost))
        return ticket

    def _mark_lost(self, ticket: weakref.ref) -> None:
        self.lost = True


@dataclass(frozen=True)
class Ticket:
    """What decompress needs to know of a gradient."""

    batch: _Batch
    slot: int


class Session:
    """A compressor at work: gradients come in by ``compress`` and go back by ``decompress``.

    1. The first compress binds the compressor to its optimizer (binding.py).
    2. Each gradient is recognised and joins the step's groups; Horovod gets a placeholder.
    3. The first decompress of a step checks the reduced placeholder, refits the table if this is an
       update step, and sends what has not been sent.
    4. Each decompress waits for its own group.

    Where the program keeps 3 waiting, a helper does it: see helper.py.
    """

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self._binding: Binding | None = None
        self._batch: _Batch | None = None
        self._lock = threading.RLock()
        self._warn_of_names = WarnOnce(logger)
        self._warn_of_unfrozen = WarnOnce(logger)
        self._warn_of_sparse = WarnOnce(logger)
        self._warn_of_changes = WarnOfChanges()
        self._due = (-1, False)
        self._tables = 0  # as tables_fitted counts, before the step that _due is of
        self._stale = False
        self._lived_in: Any = None  # the life of Horovod in which the last step ended

    @property
    def _attempt(self) -> int:
        return self._binding.given_up.attempt

    @property
    def layout(self) -> Layout | None:
        """See Connection.layout."""
        return None if self._binding is None else self._binding.layout

    @property
    def is_idle(self) -> bool:
        """Whether no step is in progress."""
        return self._batch is None or self._batch.lost

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket | None]:
        """See GradientCompressor.compress."""
        if tensor is None:
            raise ValueError(
                "groups=: Horovod exchanges a group in which a parameter has no gradient; every "
                "parameter of a group must have one, or be in no group"
            )
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            return tensor, None
        if (batch := self._batch) is not None and batch.helped:
            batch.given_up = True  # it had all its gradients
        with self._lock:
            if self.is_idle:
                self.compressor.begin_step()
                self._stale = self._stale or not self._binding or not self._binding.is_current()
            if self._stale or not self._binding.world.is_current():
                self._bind()
            if self._binding.layout is None and self._batch is None:
                self._look_for_owner()
            if self._binding.layout is None:
                return self._compress_unnamed(tensor.resolve_neg())
            slot = self._binding.slot_of(tensor)
            if slot is None:
                self._warn_of_names("a gradient belongs to no known parameter: Horovod reduces it")
                return tensor, None
            check_gradient(tensor, self._binding.layout.members[slot])
            tensor = self._binding.resolved(slot, tensor)
            batch = self._batch_for(slot)
            if batch.watch is not None:
                batch.watch.look(slot, self._binding.parameter(slot), tensor)
            batch.step.arrive(slot, tensor)
            absent = self._binding.is_absent(slot, tensor)
            if absent and self._binding.would_wait(slot):
                self._warn_of_sparse(
                    "%s: its gradients are sparse, and it has none now. Should another rank have "
                    "one, Horovod waits for ever: use sparse_as_dense=True",
                    self._binding.layout.members[slot].name,
                )
            small = self._placeholder(slot, absent)
            if batch.roll_call is not None:
                batch.roll_call.expect(self._binding.parameter(slot), small, slot)
                if not batch.held and (read := batch.roll_call.answer()) is not None:
                    batch.step.release(read.factor)
            return small, batch.ticket(slot)

    def decompress(self, output: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        """See GradientCompressor.decompress."""
        with self._lock:
            batch = ticket.batch
            if batch.failure is not None:
                raise batch.failure
            if batch.helped:
                self._look_for_changes(batch)
            read, absent = self._reduction(batch, output, ticket.slot)
            if batch.step is None or batch.step.factor is None:
                self._begin(batch, read)
            step = batch.step
            result = step.result(ticket.slot, absent)
            if step.finished:
                self._end(step)
            return result

    def _begin(self, batch: _Batch, read: Reduction) -> None:
        """Every gradient is there: send them."""
        self._look_for_changes(batch)
        if read.active < self._binding.world.size:
            batch.step = self._joined_step(batch)
        elif batch.step is None:
            batch.step = self._name_by_arrival(batch.unnamed)
        batch.step.factor = read.factor
        if batch.step.counts:
            if batch is self._batch and batch.step.attempt:
                world, device = self._binding.world, batch.step.device
                label = self._binding.name_at(batch.step.attempt)
                self._binding.given_up.drain(world, label, device)
            self._refit(batch.step)
        batch.step.launch_all()

    def _look_for_changes(self, batch: _Batch) -> None:
        """Once, whether gradients are what they were."""
        watch, batch.watch = batch.watch, None
        if watch is not None:
            self._warn_of_changes(watch)

    def _joined_step(self, batch: _Batch) -> JoinedStep:
        """The same gradients, if some ranks have called hvd.join(): see joined.py."""
        logger.info("some ranks have called hvd.join(): this step travels uncompressed")
        name, gradients = self._binding.name, dict(enumerate(batch.unnamed))
        if batch.step is None:
            name = f"hvd_adaptive.{self.compressor.fingerprint:08x}.unnamed"
        else:
            gradients = batch.step.arrived
            batch.step.abandon()  # nothing of it has been sent
        return JoinedStep(self._binding, gradients, name, self._attempt)

    def wants_watch(self) -> bool:
        """See helper.Helped."""
        batch = self._batch
        if batch is None or batch.roll_call is None or batch.lost or batch.helped:
            return False
        if batch.step.factor is not None or batch.life is not self._binding.world.life:
            return False
        now = time.monotonic()
        if batch.ready is None and batch.roll_call.are_back():
            batch.ready = now
        if batch.ready is None or now - batch.ready < PATIENCE:
            return True
        batch.helped = True
        name = "hvd_adaptive.helper"
        threading.Thread(target=self._help, args=(batch,), name=name, daemon=True).start()
        return False

    def _help(self, batch: _Batch) -> None:
        """Do what decompress would: every gradient is there, on every rank."""

        def is_over() -> bool:
            return batch.given_up or batch.lost

        with self._lock:
            if batch is not self._batch or batch.lost or batch.step.factor is not None:
                return
            assert batch.roll_call is not None
            watch = batch.watch
            try:
                with finished_on(batch.step.device), torch.no_grad(), patient(is_over):
                    read, _ = self._reduction(batch, *batch.roll_call.first)
                    if read.active == 1 < self._binding.world.size:
                        return  # nobody waits for it, or Horovod has ended and reduced nothing
                    self._begin(batch, read)
                    if not batch.step.counts:
                        return
                    batch.step.drain(is_over)
                if watch is not None:  # averages have taken the gradients' place
                    for slot, gradient in batch.step.arrived.items():
                        watch.look(slot, self._binding.parameter(slot), gradient)
                    batch.watch = watch
            except Abandoned as left:
                if left.handle is not None:
                    sent = Sent(left.name, left.operation, left.handle)
                    self._binding.given_up.leave(sent, batch.life)
            except Exception as error:
                batch.failure = error

    def _reduction(self, batch: _Batch, reduced: torch.Tensor, slot: int) -> tuple[Reduction, bool]:
        """See Reader.read; where ranks disagree they tell each other in what, unless it is the step
        and some may take the first one's state."""
        world = self._binding.world
        if batch.reader is None:
            batch.reader = Reader(world.size)
        try:
            return batch.reader.read(reduced, slot)
        except StepsDiffer as error:
            if error.read.active == world.size and self._meet_newcomers(batch):
                batch.reader.any_step = True
                return batch.reader.read(reduced, slot)
            self._tell(reduced)
            raise
        except RankMismatchError:
            self._tell(reduced)
            raise

    def _meet_newcomers(self, batch: _Batch) -> bool:
        """Whether ranks are alike now: see newcomers.py."""
        binding, compressor = self._binding, self.compressor
        name = binding.name or f"hvd_adaptive.{compressor.fingerprint:08x}.unnamed"
        survives = self._lived_in is not None and self._lived_in is not binding.world.life
        if not take_first_state(binding.world, compressor, name, self._attempt, survives):
            return False
        self._due = (-1, False)
        if batch.step is not None:
            batch.step.number = compressor.step
        return True

    def _tell(self, reduced: torch.Tensor) -> None:
        """RankMismatchError that says in what ranks disagree, if they can find out."""
        world = self._binding.world
        if told := self._binding.told():
            self._stale = True  # they meet anew
            raise RankMismatchError(told) from None
        name = disagreement(reduced, world.size)
        if name is not None:
            own = self._binding.description() | self._position()
            told = compare(world, own, f"hvd_adaptive.disagreement.{name}", LATER_SECONDS) or ""
        if told:
            raise RankMismatchError(told) from None

    def _position(self) -> Description:
        """Where this rank is, in the words of hooks/horovod/agreement.py."""
        step, name = self.compressor.step, self._binding.name
        due = "due" if self._update_due(step) else "not due"
        here = {"its number": str(step), "a fit of tables (update_steps)": due}
        return {
            "the step": here
            | {"its attempt": str(self._attempt), "tables fitted so far": str(self._tables)},
            "the order of optimizers": {"those before this one": name.rpartition(".")[2]},
        }

    def _look_for_owner(self) -> None:
        """A compressor first used without an optimizer may have one by now."""
        if find_owner(self.compressor, callers_only=True) is not None:
            self._bind()

    def _bind(self) -> None:
        """To the optimizer that calls, or to other ranks; a step in progress is given up."""
        if self._binding is not None:
            self.forget()
        self._binding, self._stale = Binding(self.compressor, self._binding), False
        WATCH.add(self)

    def _batch_for(self, slot: int) -> _Batch:
        """The step in progress, or a new one where it was finished or already has this gradient."""
        batch = self._batch
        usable = batch is not None and not batch.lost and batch.step.factor is None
        if usable and not batch.step.has(slot):
            return batch
        self.forget()
        if not self._binding.met:
            self._binding.meet()
        self._binding.prediction.restart()
        step = self._new_step(self._binding.layout)
        held = self._update_due(step.number) or not self._binding.exchange.settled
        call, life = self._binding.roll_call(), self._binding.world.life
        self._batch = _Batch(step, [], call, held, self._binding.watch(), life=life)
        WATCH.wake()
        return self._batch

    def _new_step(self, layout: Layout) -> Step:
        number = self.compressor.step
        residuals = self.compressor.residuals
        if residuals is not None:
            residuals.lay_out(layout, self._binding.world.rank, self._binding.world.size)
        return Step(self._binding, layout, number, self._attempt, residuals)

    def forget(self) -> None:
        """Give up the step in progress, if there is one: backward runs again, or a state is loaded.

        Payloads and placeholders of the next attempt at the step differ from this one's, so that
        ranks that gave up different things find out.
        """
        if (batch := self._batch) is not None:
            batch.given_up = True  # a helper lets go of the lock
        with self._lock:
            self._due = (-1, False)
            batch, self._batch = self._batch, None
            if batch is not None and batch.step is not None:
                self._binding.given_up.take(batch.step, batch.life)
                self.compressor.meter.restart()

    def rebind(self) -> None:
        """Settings have changed: the next step is laid out anew."""
        self.forget()
        self._stale = True

    def _update_due(self, step: int) -> bool:
        """Asked of the schedule once a step, whatever a user's callable does."""
        if self._due[0] != step:
            self._binding.prepare(step)
            self._due = (step, self.compressor.update_due(step))
            self._tables = tables_fitted(self.compressor)
        return self._due[1]

    def _refit(self, step: Step) -> None:
        """Every gradient is there: refit the tables if this is an update step."""
        self._binding.settle(step.layout, step.number, step.device, step.attempt)
        if self._update_due(step.number) or self.compressor.second_due(step.number):
            sync = self._binding.sync(step.number, step.attempt)
            self.compressor.update(step.number, step.samples, sync, step.parts, step.is_finite())

    def _end(self, step: Any) -> None:
        self._binding.prediction.learn()
        self._binding.learn_sparse()
        if unfrozen := self._binding.unfrozen():
            self._warn_of_unfrozen(
                "%s: was frozen when hvd.DistributedOptimizer was made, so Horovod leaves its "
                "gradients as they are on each rank; make the optimizer before layers are frozen",
                ", ".join(unfrozen),
            )
        self._lived_in = self._binding.world.life
        if step.counts:
            self.compressor.step = step.number + 1
        self.compressor.meter.finish()
        step.commit()
        self._binding.monitored.step_ended(self._binding, step.number, step.layout)
        self._binding.given_up.end(self._binding.world)
        self._batch = None

    def _compress_unnamed(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket]:
        if self.compressor.settings.parameter_bits is not None:
            raise ValueError(
                "parameter_bits: no optimizer holds this compressor, so the parameters' names are "
                "unknown: give named_parameters="
            )
        batch = self._batch
        if batch is None or batch.step is not None or batch.lost:
            batch = self._batch = _Batch(None, [])
        batch.unnamed.append(tensor)
        if len(batch.unnamed) > 1:
            self._warn_of_names(
                "no optimizer holds this compressor: gradients are told apart by order of "
                "arrival, which must be the same on all ranks (or give named_parameters=)"
            )
        slot = len(batch.unnamed) - 1
        return self._placeholder(slot), batch.ticket(slot)

    def _name_by_arrival(self, tensors: list[torch.Tensor]) -> Step:
        """Lay out tensors without names; ranks first make sure that they have the same."""
        binding = self._binding
        part_of = self.compressor.part_of
        members = [
            Member(str(i), tuple(t.shape), t.dtype, part_of(str(i))) for i, t in enumerate(tensors)
        ]
        layout = binding.build_layout(members, in_order=True)
        binding.name = f"hvd_adaptive.{self.compressor.fingerprint:08x}.unnamed"
        own = torch.tensor([layout.fingerprint >> 1], dtype=torch.int64, device="cpu")
        if not bool((binding.world.gather_equal(own, f"{binding.name}.layout") == own).all()):
            raise RankMismatchError("ranks disagree on their gradients' shapes or order")
        step = self._new_step(layout)
        for slot, tensor in enumerate(tensors):
            step.arrive(slot, tensor)
        return step

    def _placeholder(self, slot: int, absent: bool = False) -> torch.Tensor:
        """Covers all that ranks must agree on before they wait for each other: the collectives'
        names (settings, layout, instance), the attempt, the tables, and whether this is an update
        step."""
        step, binding = self.compressor.step, self._binding
        named = "" if binding.layout is None else binding.name
        agreed = _crc(self.compressor.fingerprint, binding.described, named)
        due = self._update_due(step)
        place = _crc(self._attempt, due, self._tables)
        return placeholder(binding.world.rank, slot, step, agreed, absent, place)


@functools.lru_cache(maxsize=16)
def _crc(*agreed: Hashable) -> int:
    return zlib.crc32(repr(agreed).encode())
