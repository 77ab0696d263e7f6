"""The gradients of one step, from the first compress to the last decompress."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.hooks.horovod.joined import JoinedStep
from hvd_adaptive.layout import Layout, Member, build_layout
from hvd_adaptive.run.step import Step

if TYPE_CHECKING:
    from hvd_adaptive.hooks.horovod.binding import Binding
    from hvd_adaptive.hooks.horovod.changed import Watch
    from hvd_adaptive.hooks.horovod.placeholder import Reader
    from hvd_adaptive.hooks.horovod.placeholders import Placeholders
    from hvd_adaptive.hooks.horovod.roll_call import RollCall
    from hvd_adaptive.run.worker import Worker

logger = logging.getLogger("hvd_adaptive")


class _Holder:
    """What the tickets of one step hold; it is freed with the last of them."""

    __slots__ = ("__weakref__", "pending")

    def __init__(self, pending: PendingGradients) -> None:
        self.pending = pending


class Ticket:
    """What decompress needs to know of a gradient."""

    __slots__ = ("_holder", "slot")

    def __init__(self, holder: _Holder, slot: int) -> None:
        self._holder, self.slot = holder, slot

    @property
    def pending(self) -> PendingGradients:
        """Return the gradients of the step."""
        return self._holder.pending


@dataclass(kw_only=True)
class PendingGradients(ABC):
    """The gradients of one step.

    running: the step that exchanges them; None until the first decompress.
    lost: Horovod dropped the gradients of this step without calls of decompress.
    watch: detects changes of gradients; None if no optimizer was found.
    helped: a helper completes this step, or has completed it.
    failure: the helper's error.
    given_up: no result of this step will be requested.
    generation: Horovod's (``HorovodWorld.generation``) when the step began.
    begun: when the first gradient arrived, by time.perf_counter.
    """

    binding: Binding
    generation: Any
    running: Step | JoinedStep | None = None
    lost: bool = False
    watch: Watch | None = None
    helped: bool = False
    failure: Exception | None = None
    given_up: bool = False
    reader: Reader | None = None
    begun: float = field(default_factory=time.perf_counter)
    _holder: weakref.ref[_Holder] | None = None

    def ticket(self, slot: int) -> Ticket:
        """Return a ticket for the gradient in ``slot``. If all are dropped, the step is lost."""
        holder = None if self._holder is None else self._holder()
        if holder is None:
            holder = _Holder(self)
            self._holder = weakref.ref(holder, self._mark_lost)
        return Ticket(holder, slot)

    def _mark_lost(self, holder: weakref.ref) -> None:
        self.lost = True

    @property
    @abstractmethod
    def latest_step(self) -> Step | JoinedStep | None:
        """Return the running step, or else the step that collects gradients, or None."""

    @abstractmethod
    def complete_step(self, same_groups: bool) -> Step:
        """Return the step that holds all gradients. It may be a collective.

        same_groups: whether ranks cut their gradients into the same groups so far.
        """

    def joined_step(self) -> JoinedStep:
        """Return a step of the same gradients for ranks of which some have called hvd.join()."""
        logger.info("some ranks have called hvd.join(): this step travels uncompressed")
        attempt = self.binding.given_up.attempt
        return JoinedStep(self.binding, self._take_gradients(), self._joined_name(), attempt)

    @abstractmethod
    def _take_gradients(self) -> dict[int, torch.Tensor]:
        """Return the gradients by slot, out of the step that collected them."""

    @abstractmethod
    def _joined_name(self) -> str:
        """Return the beginning of the names of a joined step's collectives."""


@dataclass(kw_only=True)
class NamedGradients(PendingGradients):
    """The gradients of known parameters; they join the step's groups as they arrive.

    placeholders: the tensors that Horovod reduces instead of the gradients.
    held: nothing may be launched before the first decompress.
    ready: when all placeholders were first seen to be back.
    """

    step: Step
    placeholders: Placeholders
    roll_call: RollCall | None
    held: bool
    worker: Worker | None = None
    ready: float | None = None
    is_released: bool = False

    @property
    def accepts(self) -> bool:
        """Return whether a gradient may join the others."""
        current = self.generation is self.binding.world.generation
        return current and self.running is None and not self.lost

    @property
    def latest_step(self) -> Step | JoinedStep:
        return self.running or self.step

    def complete_step(self, same_groups: bool) -> Step:
        if not same_groups:
            self._group_by_name()
        return self.step

    def release(self) -> None:
        """Launch groups from now on if all ranks are known to take part."""
        if self.held or self.is_released or self.roll_call is None:
            return
        if (read := self.roll_call.answer()) is not None:
            self.is_released = True
            self.step.release(read.factor)

    def advance(self) -> bool | None:
        """See ``worker.Work.advance``."""
        if self.lost or self.given_up or self.running is not None:
            return None
        self.release()
        if not self.is_released:
            waits = not self.held and self.roll_call is not None and not self.roll_call.is_over
            return False if waits else None
        return self.step.advance()

    def _group_by_name(self) -> None:
        gradients = self._take_gradients()
        self.step = new_step(self.binding, self.binding.lay_out_by_name(), self.worker)
        for slot, gradient in gradients.items():
            self.step.arrive(slot, gradient)

    def _take_gradients(self) -> dict[int, torch.Tensor]:
        gradients = self.step.arrived
        self.step.abandon()  # nothing of it has been sent
        return gradients

    def _joined_name(self) -> str:
        return self.binding.name


@dataclass(kw_only=True)
class UnnamedGradients(PendingGradients):
    """Gradients that no optimizer names; they are laid out at the first decompress."""

    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def latest_step(self) -> Step | JoinedStep | None:
        return self.running

    def complete_step(self, same_groups: bool) -> Step:
        """Lay out the tensors in the order of arrival, if ranks have the same ones."""
        binding, part_of = self.binding, self.binding.compressor.parts.label_of
        members = [
            Member(str(i), tuple(t.shape), t.dtype, part_of(str(i)))
            for i, t in enumerate(self.tensors)
        ]
        layout = binding.build_layout(members, functools.partial(build_layout, together=True))
        binding.name = binding.unnamed
        own = torch.tensor([layout.fingerprint >> 1], dtype=torch.int64, device="cpu")
        if not bool((binding.world.gather_equal(own, f"{binding.name}.layout") == own).all()):
            raise RankMismatchError("ranks disagree on their gradients' shapes or order")
        step = new_step(binding, layout)
        for slot, tensor in enumerate(self.tensors):
            step.arrive(slot, tensor)
        return step

    def _take_gradients(self) -> dict[int, torch.Tensor]:
        return dict(enumerate(self.tensors))

    def _joined_name(self) -> str:
        return self.binding.unnamed


def new_step(binding: Binding, layout: Layout, worker: Worker | None = None) -> Step:
    """Return the step that comes next, without gradients."""
    compressor = binding.compressor
    residuals = compressor.residuals
    if residuals is not None:
        residuals.lay_out(layout, binding.world.rank, binding.world.size)
    attempt = binding.given_up.attempt
    return Step(binding, layout, compressor.step, attempt, residuals, worker)
