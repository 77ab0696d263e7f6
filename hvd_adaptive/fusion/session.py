"""From Horovod's calls of compress and decompress to steps."""

from __future__ import annotations

import logging
import threading
import weakref
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.fusion.binding import Binding
from hvd_adaptive.fusion.layout import Layout, Member
from hvd_adaptive.fusion.owner import find_owner
from hvd_adaptive.fusion.placeholder import check_reduced, placeholder
from hvd_adaptive.fusion.step import Step

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor

logger = logging.getLogger("hvd_adaptive")


@dataclass
class _Batch:
    """One step's gradients: a Step, or tensors without names until the first decompress.

    lost: Horovod dropped a gradient of this step without asking for it back.
    """

    step: Step | None
    unnamed: list[torch.Tensor]
    lost: bool = False
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
    """

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self._binding: Binding | None = None
        self._batch: _Batch | None = None
        self._lock = threading.RLock()
        self._warned = False
        self._due = (-1, False)
        self._attempt = 0

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket | None]:
        """See GradientCompressor.compress."""
        if tensor is None:
            raise ValueError("tensor: is None; Horovod gave a group with a missing gradient")
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            return tensor, None
        with self._lock:
            if self._binding is None or not self._binding.world.is_current():
                self._binding, self._batch = Binding(self.compressor), None
            if self._binding.layout is None and self._batch is None:
                self._look_for_owner()
            if self._binding.layout is None:
                return self._compress_unnamed(tensor)
            slot = self._binding.slot_of(tensor)
            if slot is None:
                self._warn_once("a gradient belongs to no known parameter: Horovod reduces it")
                return tensor, None
            batch = self._batch_for(slot)
            batch.step.arrive(slot, tensor)
            return self._placeholder(slot), batch.ticket(slot)

    def decompress(self, output: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        """See GradientCompressor.decompress."""
        with self._lock:
            factor = check_reduced(output, self._binding.world.size)
            batch = ticket.batch
            if batch.step is None:
                batch.step = self._name_by_arrival(batch.unnamed)
            step = batch.step
            if step.factor is None:
                step.factor = factor
                self._send(step)
            result = step.result(ticket.slot)
            if step.finished:
                self._end(step)
            return result

    def _look_for_owner(self) -> None:
        """A compressor first used without an optimizer may have one by now."""
        if find_owner(self.compressor, callers_only=True) is not None:
            self._binding = Binding(self.compressor)

    def _batch_for(self, slot: int) -> _Batch:
        """The step in progress, or a new one where it was finished or already has this gradient."""
        batch = self._batch
        usable = batch is not None and not batch.lost and batch.step.factor is None
        if usable and not batch.step.has(slot):
            return batch
        self.forget()
        self._binding.prediction.restart()
        self._batch = _Batch(self._new_step(self._binding.layout), [])
        return self._batch

    def _new_step(self, layout: Layout) -> Step:
        number = self.compressor.step
        hold = self._update_due(number) or not self._binding.exchange.settled
        residuals = self.compressor.residuals
        if residuals is not None:
            residuals.lay_out(layout, self._binding.world.rank, self._binding.world.size)
        return Step(self._binding, layout, number, hold, self._attempt, residuals)

    def forget(self) -> None:
        """Give up the step in progress, if there is one: backward runs again, or a state is loaded.

        Payloads and placeholders of the next attempt at the step differ from this one's, so that
        ranks that gave up different things find out.
        """
        self._due = (-1, False)
        batch, self._batch = self._batch, None
        if batch is not None and batch.step is not None:
            self._binding.given_up += batch.step.abandon()
            self._attempt += 1
            self.compressor.meter.restart()

    def _update_due(self, step: int) -> bool:
        """Asked of the schedule once a step, whatever a user's callable does."""
        if self._due[0] != step:
            self._binding.prepare(step)
            self._due = (step, self.compressor.update_due(step))
        return self._due[1]

    def _send(self, step: Step) -> None:
        """Every gradient is there: refit the tables if this is an update step, then exchange."""
        self._binding.settle(step.layout, step.number)
        if self._update_due(step.number) or self.compressor.second_due(step.number):
            sync = self._binding.sync()
            self.compressor.update(step.number, step.samples, sync, step.parts)
        step.launch_all()

    def _end(self, step: Step) -> None:
        self._binding.sweep()
        self._binding.prediction.learn()
        self.compressor.step = step.number + 1
        self.compressor.meter.finish()
        step.commit()
        self._batch, self._attempt = None, 0

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
            self._warn_once(
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
        own = torch.tensor([layout.fingerprint >> 1], dtype=torch.int64)
        if not bool((binding.world.gather_equal(own, f"{binding.name}.layout") == own).all()):
            raise RankMismatchError("ranks disagree on their gradients' shapes or order")
        step = self._new_step(layout)
        for slot, tensor in enumerate(tensors):
            step.arrive(slot, tensor)
        return step

    def _placeholder(self, slot: int) -> torch.Tensor:
        """Covers all that ranks must agree on before they wait for each other: the collectives'
        names (settings, layout, instance), the attempt, and whether this is an update step."""
        step, binding = self.compressor.step, self._binding
        named = "" if binding.layout is None else binding.name
        due = self._update_due(step)
        agreed = repr((self.compressor.fingerprint, named, due, self._attempt))
        return placeholder(binding.world.rank, slot, step, zlib.crc32(agreed.encode()))

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            logger.warning(message)
            self._warned = True
