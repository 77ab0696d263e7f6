"""From Horovod's calls of compress and decompress to steps."""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.coding.header import DTYPE_CODES
from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.finite import wide_of
from hvd_adaptive.hooks.connected import Connected
from hvd_adaptive.hooks.horovod.binding import Binding
from hvd_adaptive.hooks.horovod.changed import WarnOfChanges, check_gradient
from hvd_adaptive.hooks.horovod.helper import PATIENCE, WATCH, finished_on
from hvd_adaptive.hooks.horovod.newcomers import take_first_state
from hvd_adaptive.hooks.horovod.owner import find_owner
from hvd_adaptive.hooks.horovod.pending import (
    NamedGradients,
    PendingGradients,
    Ticket,
    UnnamedGradients,
    new_step,
)
from hvd_adaptive.hooks.horovod.placeholder import Reader, Reduction, StepsDiffer
from hvd_adaptive.hooks.horovod.placeholders import Placeholders
from hvd_adaptive.hooks.horovod.position import Position
from hvd_adaptive.layout import Layout, Member
from hvd_adaptive.once import WarnOnce
from hvd_adaptive.run.step import Step
from hvd_adaptive.run.worker import Work, Worker
from hvd_adaptive.transport.collectives import Sent
from hvd_adaptive.transport.horovod_world import Abandoned, patient
from hvd_adaptive.transport.in_flight import reference

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.hooks.horovod.joined import JoinedStep

logger = logging.getLogger("hvd_adaptive")


class Session(Connected):
    """Connect a compressor to its optimizer: ``compress`` receives gradients, ``decompress``
    returns averages.

    1. The first compress binds the compressor to its optimizer (binding.py).
    2. Each gradient joins the groups of its parameter, and Horovod receives a placeholder.
    3. The first decompress of a step checks the reduced placeholder, refits the table if this is an
       update step, and sends the remaining groups.
    4. Each decompress waits for its own group.

    If the program delays 3, a helper does it (helper.py).
    """

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self._binding: Binding | None = None  # until the first compress
        self._pending: PendingGradients | None = None
        self._position = Position(compressor)
        self._lock = threading.RLock()
        self._worker = Worker(functools.partial(_work_of, weakref.ref(self)))
        self._warn_of_names = WarnOnce(logger)
        self._warn_of_unfrozen = WarnOnce(logger)
        self._warn_of_sparse = WarnOnce(logger)
        self._warn_of_changes = WarnOfChanges()
        self._stale = False
        self._last_generation: Any = None  # the generation of Horovod in which the last step ended
        self._placeholders: Placeholders | None = None  # those of the last step, if it ended
        # Placeholders since the last step ended, see transport/in_flight.py.
        self._in_flight: list[Any] = []

    @property
    def is_idle(self) -> bool:
        """Return whether no step is in progress."""
        return self._pending is None or self._pending.lost

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket | torch.dtype | None]:
        """See GradientCompressor.compress."""
        meter = self.compressor.meter
        if not meter.detailed:
            return self._compress(tensor)
        with meter.time("blocked_s"):
            return self._compress(tensor)

    def _compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket | torch.dtype | None]:
        if tensor is None:
            raise ValueError(
                "groups=: Horovod exchanges a group in which a parameter has no gradient; every "
                "parameter of a group must have one, or be in no group"
            )
        if tensor.layout != torch.strided or tensor.dtype not in DTYPE_CODES:
            return tensor, None
        if (pending := self._pending) is not None and pending.helped:
            pending.given_up = True  # it had all its gradients
        with self._lock:
            pending = self._joinable()
            binding = self._current_binding() if pending is None else pending.binding
            layout = binding.layout
            if layout is None:
                return self._compress_unnamed(binding, tensor.resolve_neg())
            slot = binding.parameters.slot_of(tensor)
            if slot is None:
                self._warn_of_names("a gradient belongs to no known parameter: Horovod reduces it")
                wide = wide_of(tensor.dtype)
                return (tensor, None) if tensor.dtype == wide else (tensor.to(wide), tensor.dtype)
            if pending is None or pending.step.has(slot):
                pending = self._begin(binding, layout, tensor.is_cpu)
            return self._compress_named(pending, layout.members[slot], slot, tensor)

    def _joinable(self) -> NamedGradients | None:
        """Return the gradients that others may join, or None."""
        pending = self._pending
        if self._stale or not isinstance(pending, NamedGradients) or not pending.accepts:
            return None
        return pending

    def _current_binding(self) -> Binding:
        """Return the binding to the calling optimizer and the current ranks."""
        binding = self._binding
        if self.is_idle:
            self.compressor.begin_step()
            self._stale = self._stale or binding is None or not binding.is_current()
        if binding is None or self._stale or not binding.world.is_current():
            binding = self._bind()
        # A compressor first used without an optimizer may have one by now.
        may_have_owner = binding.layout is None and self._pending is None
        if may_have_owner and find_owner(self.compressor, callers_only=True) is not None:
            binding = self._bind()
        return binding

    def _bind(self) -> Binding:
        """Bind to the calling optimizer and the current ranks; give up a step in progress."""
        if self._binding is not None:
            self.forget()
        self._binding, self._stale = Binding(self.compressor, self._binding), False
        WATCH.add(self)
        return self._binding

    def _compress_named(
        self, pending: NamedGradients, member: Member, slot: int, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, Ticket]:
        check_gradient(tensor, member)
        parameters = pending.binding.parameters
        tensor = parameters.resolved(slot, tensor)
        if pending.watch is not None:
            pending.watch.look(slot, parameters[slot], tensor)
        pending.step.arrive(slot, tensor)
        absent = parameters.is_absent(slot, tensor)
        if absent and parameters.would_wait(slot):
            self._warn_of_sparse(
                "%s: its gradients are sparse, and it has none now. Should another rank have "
                "one, Horovod waits for ever: use sparse_as_dense=True",
                member.name,
            )
        small = pending.placeholders.of(slot, absent)
        if pending.roll_call is not None:
            pending.roll_call.expect(parameters[slot], small, slot)
            if pending.worker is None:
                pending.release()
        return small, pending.ticket(slot)

    def _begin(self, binding: Binding, layout: Layout, on_cpu: bool) -> NamedGradients:
        """Begin a step, and return its gradients; the one in progress, if any, is given up."""
        self.forget()
        if not binding.comparison.is_started:
            binding.comparison.start()
        binding.parameters.begin_step()
        worker = self._worker if on_cpu and self.compressor.settings.worker else None
        step = new_step(binding, layout, worker)
        due = self._position.update_due(binding, step.number)
        self._pending = pending = NamedGradients(
            binding=binding,
            step=step,
            placeholders=self._begun_placeholders(binding, layout),
            held=due or not binding.exchange.is_set_up,
            roll_call=binding.roll_call(),
            worker=worker,
            generation=binding.world.generation,
            watch=binding.parameters.watch(layout.members),
        )
        WATCH.wake()
        return pending

    def _compress_unnamed(
        self, binding: Binding, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, Ticket]:
        if self.compressor.settings.parameter_bits is not None:
            raise ValueError(
                "parameter_bits: no optimizer holds this compressor, so the parameters' names are "
                "unknown: give named_parameters="
            )
        pending = self._pending
        if not isinstance(pending, UnnamedGradients) or pending.running is not None or pending.lost:
            self._pending = pending = UnnamedGradients(
                binding=binding, generation=binding.world.generation
            )
        pending.tensors.append(tensor)
        if len(pending.tensors) > 1:
            self._warn_of_names(
                "no optimizer holds this compressor: gradients are told apart by order of "
                "arrival, which must be the same on all ranks (or give named_parameters=)"
            )
        slot = len(pending.tensors) - 1
        small = self._position.template(binding).placeholder(slot)
        self._in_flight.append(reference(small))
        return small, pending.ticket(slot)

    def _begun_placeholders(self, binding: Binding, layout: Layout) -> Placeholders:
        """Return the placeholders of a new step: those of the last one, if Horovod has reduced all
        of them."""
        placeholders, self._placeholders = self._placeholders, None
        if placeholders is None or len(placeholders) != len(layout.members):
            placeholders = Placeholders(len(layout.members))
        placeholders.begin(self._position.template(binding))
        self._in_flight.append(placeholders)
        return placeholders

    def decompress(self, output: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        """See GradientCompressor.decompress."""
        meter = self.compressor.meter
        begin = time.perf_counter() if meter.detailed else 0.0
        with self._lock:
            pending = ticket.pending
            if pending.failure is not None:
                raise pending.failure
            if pending.helped:
                self._look_for_changes(pending)
            read, absent = self._reduction(pending, output, ticket.slot)
            step = pending.running
            if step is None:
                step = self._run(pending, read)
            result = step.result(ticket.slot, absent)
            if meter.detailed:
                meter.add("blocked_s", time.perf_counter() - begin)
            if step.finished:
                self._end(pending, step)
            return result

    def _run(self, pending: PendingGradients, read: Reduction) -> Step | JoinedStep:
        """Exchange the gradients, all of which have arrived."""
        self._look_for_changes(pending)
        self.compressor.meter.add("arrival_s", time.perf_counter() - pending.begun)
        running: Step | JoinedStep
        if read.active < pending.binding.world.size:
            pending.running = running = pending.joined_step()
        else:
            pending.running = running = step = pending.complete_step(read.same_groups)
            self._drain(pending, step)
            self._refit(pending.binding, step)
        running.launch_all(read.factor)
        return running

    def _look_for_changes(self, pending: PendingGradients) -> None:
        """Warn, once a step, if gradients have changed since they were handed over."""
        watch, pending.watch = pending.watch, None
        if watch is not None:
            self._warn_of_changes(watch)

    def _drain(self, pending: PendingGradients, step: Step) -> None:
        """Complete what is in flight of earlier attempts at this step."""
        if pending is self._pending and step.attempt:
            binding = pending.binding
            binding.given_up.drain(binding.world, binding.name_at(step.attempt), step.device)

    def _refit(self, binding: Binding, step: Step) -> None:
        """Refit the tables if this is an update step, or sample this step for the next one."""
        binding.set_up(step.layout, step.number, step.device, step.attempt)
        due = self._position.update_due(binding, step.number)
        updates = self.compressor.updates
        if due or updates.needs_samples(step.number):
            sync = binding.sync(step.number, step.attempt)
            updates.run(step.number, step.samples, sync, step.parts)

    def wants_watch(self) -> bool:
        """See helper.Helped."""
        pending = self._pending
        if not isinstance(pending, NamedGradients) or pending.roll_call is None:
            return False
        if pending.lost or pending.helped or pending.running is not None:
            return False
        if pending.generation is not pending.binding.world.generation:
            return False
        now = time.monotonic()
        if pending.ready is None and pending.roll_call.are_back():
            pending.ready = now
        if pending.ready is None or now - pending.ready < PATIENCE:
            return True
        pending.helped = True
        threading.Thread(
            target=self._help,
            args=(pending, *pending.roll_call.first),
            name="hvd_adaptive.helper",
            daemon=True,
        ).start()
        return False

    def _help(self, pending: NamedGradients, reduced: torch.Tensor, slot: int) -> None:
        """Do what the first decompress would: every rank has all gradients.

        reduced, slot: the first placeholder.
        """

        def is_over() -> bool:
            return pending.given_up or pending.lost

        with self._lock:
            if pending is not self._pending or pending.lost or pending.running is not None:
                return
            binding, step, watch = pending.binding, pending.step, pending.watch
            try:
                with finished_on(step.device), torch.no_grad(), patient(is_over):
                    read, _ = self._reduction(pending, reduced, slot)
                    if read.active == 1 < binding.world.size:
                        return  # nobody waits for it, or Horovod has ended and reduced nothing
                    if not self._run(pending, read).counts:
                        return
                    step.drain(is_over)
                if watch is not None:  # averages have replaced the gradients
                    for arrived, gradient in step.arrived.items():
                        watch.look(arrived, binding.parameters[arrived], gradient)
                    pending.watch = watch
            except Abandoned as left:
                if left.handle is not None:
                    sent = Sent(left.name, left.operation, left.handle)
                    binding.given_up.leave(sent, pending.generation)
            except Exception as error:
                pending.failure = error

    def _reduction(
        self, pending: PendingGradients, reduced: torch.Tensor, slot: int
    ) -> tuple[Reduction, bool]:
        """Read a reduced placeholder; see Reader.read.

        If ranks disagree, they find out in what, and each raises RankMismatchError with the answer.
        If they disagree on the step alone, they may continue from the first rank's state instead.
        """
        world = pending.binding.world
        if pending.reader is None:
            pending.reader = Reader(world.size)
        try:
            return pending.reader.read(reduced, slot)
        except StepsDiffer as error:
            if error.read.active == world.size and self._take_first_state(pending):
                pending.reader.any_step = True
                return pending.reader.read(reduced, slot)
            self._raise_mismatch(pending.binding, reduced)
            raise
        except RankMismatchError:
            self._raise_mismatch(pending.binding, reduced)
            raise

    def _take_first_state(self, pending: PendingGradients) -> bool:
        """Return whether ranks have the same state now; see newcomers.py."""
        binding, compressor = pending.binding, self.compressor
        name, attempt = binding.name or binding.unnamed, binding.given_up.attempt
        survives = (
            self._last_generation is not None
            and self._last_generation is not binding.world.generation
        )
        if not take_first_state(binding.world, compressor, name, attempt, survives):
            return False
        self._position.forget_due()
        if (step := pending.latest_step) is not None:
            step.renumber(compressor.step)
        return True

    def _raise_mismatch(self, binding: Binding, reduced: torch.Tensor) -> None:
        """Raise RankMismatchError with what ranks disagree on, if they can find out."""
        if mismatch := binding.comparison.mismatch():
            self._stale = True  # the next binding compares settings again
        else:
            mismatch = self._position.mismatch(binding, reduced)
        if mismatch:
            raise RankMismatchError(mismatch) from None

    def forget(self) -> None:
        """Give up the step in progress, if there is one: backward runs again, or a state is loaded.

        Payloads and placeholders of the next attempt at the step differ from this one's, so ranks
        detect that they gave up different attempts.
        """
        if (pending := self._pending) is not None:
            pending.given_up = True  # a helper releases the lock
        with self._lock:
            self._position.forget_due()
            pending, self._pending = self._pending, None
            if pending is not None and (step := pending.latest_step) is not None:
                pending.binding.given_up.take(step, pending.generation)
                self.compressor.meter.give_up()

    def rebind(self) -> None:
        """Lay out the next step anew: settings have changed."""
        self.forget()
        self._stale = True

    def _end(self, pending: PendingGradients, step: Step | JoinedStep) -> None:
        binding = pending.binding
        binding.parameters.end_step()
        if unfrozen := binding.parameters.unfrozen():
            self._warn_of_unfrozen(
                "%s: was frozen when hvd.DistributedOptimizer was made, so Horovod leaves its "
                "gradients as they are on each rank; make the optimizer before layers are frozen",
                ", ".join(unfrozen),
            )
        self._last_generation = binding.world.generation
        self._in_flight.clear()
        if isinstance(pending, NamedGradients):
            self._placeholders = pending.placeholders
        if step.counts:
            self.compressor.step = step.number + 1
        self.compressor.meter.finish()
        step.commit()
        binding.monitored.step_ended(binding, step.number, step.layout, step.device)
        binding.given_up.end(binding.world)
        self._pending = None


def _work_of(find_session: weakref.ref[Session]) -> Work | None:
    """Return the gradients that a session's worker exchanges, or None."""
    session = find_session()
    pending = None if session is None else session._pending
    return pending if isinstance(pending, NamedGradients) else None
