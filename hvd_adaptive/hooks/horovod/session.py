"""Turn Horovod's calls of compress and decompress into steps."""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import Any

import torch

from hvd_adaptive.base.errors import RankMismatchError, WarnOnce, given_up
from hvd_adaptive.base.tensors import wide_of
from hvd_adaptive.changes import begin_step
from hvd_adaptive.coding.payload import DTYPE_CODES
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.connection import Connection
from hvd_adaptive.hooks.horovod import elastic
from hvd_adaptive.hooks.horovod.binding import Binding
from hvd_adaptive.hooks.horovod.drive import SESSIONS, HorovodDrive, Ticket
from hvd_adaptive.hooks.horovod.owner import find_owner
from hvd_adaptive.hooks.horovod.placeholder import Placeholders, check_reduced
from hvd_adaptive.hooks.horovod.served import CHANGED_TOO_LATE, changed_kind
from hvd_adaptive.layout import Layout
from hvd_adaptive.run.driver import Driver
from hvd_adaptive.transport.horovod_world import reference

logger = logging.getLogger("hvd_adaptive")

_NO_GRADIENT = (
    "groups=: Horovod exchanges a group in which a parameter has no gradient; every parameter of a "
    "group must have one, or be in no group"
)


class Session(Connection):
    """Connect a compressor to its optimizer: ``compress`` receives gradients, ``decompress``
    returns averages.

    1. The first compress binds the compressor to its optimizer (binding.py).
    2. A step's first gradient begins a drive (drive.py), in which ranks compare their positions.
    3. Each gradient joins the groups of its parameter, and Horovod receives a placeholder.
    4. The first decompress of a step waits for all averages; each decompress returns one.
    """

    compressor: GradientCompressor

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self._binding: Binding | None = None  # until the first compress
        self._driver = Driver(compressor)
        self._lock = threading.RLock()
        self._warn_of_names = WarnOnce(logger)
        self._unreduced: set[str] = set()  # parameters that were warned of
        self._warn_of_sparse = WarnOnce(logger)
        self._warn_of_changes = WarnOnce(logger)
        self._stale = False
        self._last_generation: Any = None  # the generation of Horovod in which the last step ended
        self._placeholders: Placeholders | None = None  # those of the last step, if it ended
        # Placeholders since the last step ended, see transport/horovod_world.py.
        self._in_flight: list[Any] = []

    @property
    def drive(self) -> HorovodDrive | None:
        """Return the step in progress, or None."""
        return self._driver.drive

    @property
    def is_idle(self) -> bool:
        """Return whether no step is in progress."""
        drive = self._driver.drive
        return drive is None or drive.left.is_set()

    def wake(self) -> None:
        """Have the worker look at the step in progress."""
        self._driver.wake()

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket | torch.dtype | None]:
        if tensor is None:
            raise ValueError(_NO_GRADIENT)
        if tensor.layout != torch.strided or tensor.dtype not in DTYPE_CODES:
            return tensor, None
        meter = self.compressor._training.meter
        began = time.perf_counter() if meter.detailed else 0.0
        with self._lock:
            slot: int | None
            drive: Any = self._driver.drive
            if drive is not None and (
                self._stale
                or drive.flushed
                or drive.closed
                or drive.left.is_set()
                or drive.generation is not drive.binding.world.generation
            ):
                drive = None  # no gradient may join this step
            is_named = drive is not None and drive.named
            binding = drive.binding if is_named else self._current_binding()
            if binding.layout is None:
                drive, slot, small = self._arrive_unnamed(binding, drive, tensor.resolve_neg())
            else:
                slot = binding.parameters.slot_of(tensor)
                if slot is None:
                    return self._left_to_horovod(tensor)
                if drive is None or drive is not self._driver.drive or drive.here[slot]:
                    drive = self._begin(binding, binding.layout, tensor.is_cpu)
                small = self._arrive(drive, slot, tensor)
            drive.unreturned += 1
            holder = drive.holder and drive.holder()
            if began:
                meter.add(blocked_s=time.perf_counter() - began)
            return small, (holder or drive.hold(), slot)

    def _left_to_horovod(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        self._warn_of_names("a gradient belongs to no known parameter: Horovod reduces it")
        wide = wide_of(tensor.dtype)
        return (tensor, None) if tensor.dtype == wide else (tensor.to(wide), tensor.dtype)

    def _current_binding(self) -> Binding:
        """Return the binding to the calling optimizer and the current ranks."""
        binding = self._binding
        is_idle = self.is_idle
        if is_idle:
            begin_step(self.compressor)
        current = False
        if binding is not None and not self._stale and binding.world.is_current():
            current = not is_idle or binding.parameters.are_current(binding.layout)
            current = current and (binding.has_optimizer or binding.serves_caller())
        if binding is None or not current:
            binding = self._bind()
        # A compressor first used without an optimizer may have one by now.
        may_have_owner = binding.layout is None and self.drive is None
        if may_have_owner and find_owner(self.compressor, callers_only=True) is not None:
            binding = self._bind()
        return binding

    def _bind(self) -> Binding:
        """Bind to the calling optimizer and the current ranks; give up a step in progress."""
        self.abandon()
        self._binding, self._stale = Binding(self.compressor, self._binding), False
        SESSIONS.add(self)
        if len(SESSIONS) > 1:
            for session in list(SESSIONS):
                session.wake()  # a step in progress may be left alone from now on
        return self._binding

    def _arrive(self, drive: HorovodDrive, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        """Hand a gradient to the step, and return what Horovod reduces instead."""
        parameters, member = drive.binding.parameters, drive.step.layout.members[slot]
        absent = False
        if tensor.is_neg():
            tensor = parameters.resolved(slot, tensor)
        if drive.watch is not None:
            absent = drive.watch.look(slot, tensor)
        elif tensor.dtype != member.dtype or tensor.shape != member.shape:
            raise changed_kind(tensor, member)
        drive.step.arrive(slot, tensor, drive.named and parameters.by_slot[slot].grad is tensor)
        if absent and parameters.would_wait(slot):
            self._warn_of_sparse(
                "%s: its gradients are sparse, and it has none now. Should another rank have "
                "one, Horovod waits for ever: use sparse_as_dense=True",
                member.name,
            )
        if drive.placeholders is None:
            return self._position(drive.binding, slot)
        if absent:
            drive.placeholders.mark_absent(slot)
        if drive.worker is None:
            drive.send_what_is_complete()
        return drive.placeholders.tensors[slot]

    def _begin(self, binding: Binding, layout: Layout | None, on_cpu: bool) -> HorovodDrive:
        """Begin a step, and return it; the one in progress, if any, is given up."""
        members = () if layout is None else layout.members
        make = functools.partial(
            HorovodDrive, binding, layout=layout, last_generation=self._last_generation
        )
        self._driver.start(make, on_cpu)
        drive: HorovodDrive = self._driver.drive
        drive.watch = binding.parameters.begin_step(members)
        if drive.named:
            # Those of the last step, if Horovod has reduced all of them.
            placeholders, self._placeholders = self._placeholders, None
            if placeholders is None or len(placeholders.tensors) != len(members):
                placeholders = Placeholders(len(members))
            placeholders.begin()
            self._in_flight.append(placeholders)
            drive.placeholders = placeholders
            self._driver.wake()
        return drive

    def _arrive_unnamed(
        self, binding: Binding, drive: HorovodDrive | None, tensor: torch.Tensor
    ) -> tuple[HorovodDrive, int, torch.Tensor]:
        if self.compressor.settings.parameter_bits is not None:
            raise ValueError(
                "parameter_bits: no optimizer holds this compressor, so the parameters' names are "
                "unknown: give named_parameters="
            )
        if drive is None or drive.step is not None or drive is not self._driver.drive:
            drive = self._begin(binding, None, tensor.is_cpu)
        drive.tensors.append(tensor)
        if len(drive.tensors) > 1:
            self._warn_of_names(
                "no optimizer holds this compressor: gradients are told apart by order of "
                "arrival, which must be the same on all ranks (or give named_parameters=)"
            )
        slot = len(drive.tensors) - 1
        return drive, slot, self._position(binding, slot)

    def _position(self, binding: Binding, slot: int) -> torch.Tensor:
        """Return the placeholder of a gradient whose reduction is unknown."""
        placeholder = binding.agreement.position(binding, binding.abandoned.attempt, slot)
        self._in_flight.append(reference(placeholder))
        return placeholder

    def decompress(self, output: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        meter = self.compressor._training.meter
        began = time.perf_counter() if meter.detailed else 0.0
        with self._lock:
            holder, slot = ticket
            drive = holder.drive
            if drive is not self._driver.drive or not drive.is_done:
                self._complete(drive, output)
            absent = False  # on all ranks
            if drive.named:
                absent = round(output.item() / drive.read.factor) == drive.read.active
            else:
                check_reduced(output, drive.binding.world.size, drive.any_step)
            result = drive.step.result(slot, absent)
            drive.unreturned -= 1
            if began:
                meter.add(blocked_s=time.perf_counter() - began)
            if not drive.unreturned:
                self._end(drive)
            return result

    def _complete(self, drive: HorovodDrive, output: torch.Tensor) -> None:
        """Wait for all averages of a step, all of whose gradients have arrived."""
        if drive.error is None and drive is not self._driver.drive:
            raise given_up()
        if drive.watch is not None:
            watch, drive.watch = drive.watch, None
            if names := watch.changed():
                more = f" and {len(names) - 1} more" if names[1:] else ""
                self._warn_of_changes(CHANGED_TOO_LATE, names[0], more)
        if drive.flushed and drive.error is not None:  # at an earlier decompress
            raise drive.error
        drive.reduced = output
        try:
            self._driver.wait()
        except RankMismatchError:
            if drive.named and drive.binding.agreement.is_new and drive.binding.release_name():
                self._stale = True
            raise

    def abandon(self) -> None:
        """Give up the step in progress, if any: backward runs again, or a state is loaded."""
        if (drive := self.drive) is not None:
            drive.left.set()  # whoever waits for it in another thread releases the lock
        with self._lock:
            self._driver.give_up()

    def rebind(self) -> None:
        """Lay out the next step anew: settings have changed."""
        self.abandon()
        self._stale = True

    def _end(self, drive: HorovodDrive) -> None:
        binding = drive.binding
        if names := binding.parameters.end_step():
            self._warn_of_unreduced(names)
        self._last_generation = drive.generation
        self._in_flight.clear()
        self._placeholders = drive.placeholders
        binding.world.left = None
        self._driver.end()
        if binding.abandoned.attempt or binding.abandoned.flying:
            binding.abandoned.end(binding.world)

    def _warn_of_unreduced(self, names: list[str]) -> None:
        """Warn, once for each, of parameters whose gradients Horovod does not reduce."""
        if new := [name for name in names if name not in self._unreduced]:
            self._unreduced.update(new)
            logger.warning(
                "%s: was frozen when hvd.DistributedOptimizer was made, or was added to it later, "
                "so Horovod leaves its gradients as they are on each rank; make the optimizer with "
                "all parameters, before layers are frozen",
                ", ".join(new),
            )


def constructed(compressor: GradientCompressor) -> None:
    """Register the handler of compressors' states with elastic Horovod, if it is imported."""
    elastic.register_handler(GradientCompressor, elastic.CompressorStateHandler)


def connect(compressor: GradientCompressor) -> Session:
    """Return a new session of ``compressor``; see ``connection.framework``."""
    return Session(compressor)
