"""The steps of a DistributedDataParallel model, from its buckets."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.hooks.ddp.buckets import Bucket, BucketBinding, Names
from hvd_adaptive.hooks.description import Description, describe, differences
from hvd_adaptive.layout import Layout
from hvd_adaptive.run.step import Step
from hvd_adaptive.transport.horovod_rounds import HorovodRounds
from hvd_adaptive.transport.torch_world import TorchWorld

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor

logger = logging.getLogger("hvd_adaptive")

# Lengths of payloads are exchanged again after so many steps, so that frames can shrink.
LENGTHS_LAST = 256
UNKNOWN = -1


@dataclass
class _PendingStep:
    """One step's buckets.

    due: whether tables are fitted; None until all buckets have arrived, if there is no layout.
    used: for each slot, whether this rank's gradient has a value other than zero; empty without
        residuals.
    sending: the step that sends buckets as they arrive; None if they wait for the last one.
    check: the gather of positions, which has been submitted.
    begun: when the first bucket arrived.
    """

    binding: BucketBinding
    due: bool | None = None
    sending: Step | None = None
    check: Any = None
    buckets: list[Bucket] = field(default_factory=list)
    used: list[bool] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    def arrive(self, step: Step, index: int) -> None:
        """Give the gradients of bucket ``index`` to ``step``."""
        first = self.binding.first_slot(index)
        for offset, gradient in enumerate(self.buckets[index].gradients):
            step.arrive(first + offset, gradient)


class BucketSession:
    """Connect a compressor to a DDP model: ``take`` receives buckets, ``finish`` averages them.

    1. The first bucket begins a step. If the buckets are those of the previous step, each is
       encoded and sent as soon as backward has filled it.
    2. Buckets wait for the last one at the first step, after DDP has built its buckets anew (as it
       does after the first step), and at steps that fit tables.
    3. ``finish``: ranks check that they agree, fit tables if this is an update step, and complete
       the exchange. Averages replace the gradients in DDP's buckets.

    group: the process group; None for the default one.
    make_world: makes the ranks; None for those of ``group``.
    name: beginning of the names of collectives.
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        names: Names,
        group: dist.ProcessGroup | None,
        make_world: Callable[[], TorchWorld | HorovodRounds] | None = None,
        name: str = "ddp",
    ) -> None:
        self.compressor, self.names, self.group = compressor, names, group
        self._make_world, self._name = make_world or (lambda: TorchWorld(self.group)), name
        self._world: TorchWorld | HorovodRounds | None = None  # until the first bucket
        self._binding: BucketBinding | None = None
        self._stale = False
        self._attempt = 0
        self._pending: _PendingStep | None = None

    @property
    def layout(self) -> Layout | None:
        """See Connection.layout."""
        return None if self._binding is None else self._binding.layout

    @property
    def exchange(self) -> str | None:
        """See Connection.exchange."""
        return None if self._binding is None else self._binding.exchange_name

    @property
    def is_idle(self) -> bool:
        """Return whether no step is in progress."""
        return self._pending is None

    def forget(self) -> None:
        """Give up the step in progress, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._stop_sending(pending)

    def rebind(self) -> None:
        """Lay out the next step anew: settings have changed."""
        self.forget()
        self._stale = True

    def compress(self, tensor: torch.Tensor) -> Any:
        """Refuse a gradient of Horovod's."""
        raise RuntimeError(
            "one compressor serves one optimizer or model at a time, and this one serves a "
            "DistributedDataParallel model: construct another (or close() this one)"
        )

    def decompress(self, output: torch.Tensor, ctx: Any) -> Any:
        """Refuse a gradient of Horovod's."""
        return self.compress(output)

    def take(self, index: int, bucket: Bucket) -> None:
        """Receive bucket ``index`` of a step, which is full."""
        with self.compressor.meter.time("blocked_s"):
            self._take(index, bucket)

    def _take(self, index: int, bucket: Bucket) -> None:
        pending = self._begin_step() if index == 0 else self._pending
        if pending is None:
            raise RuntimeError(
                f"bucket {index} came without the ones before: compression_hook must be registered "
                "between steps, and its state with one model"
            )
        pending.buckets.append(bucket)
        if self.compressor.residuals is not None:
            pending.used += [bool(gradient.any()) for gradient in bucket.gradients]
        if pending.sending is not None:
            if pending.binding.knows(index, bucket):
                pending.arrive(pending.sending, index)
            elif index == 0:
                pending.sending = None
            else:
                self._stop_sending(pending)

    def finish(self) -> None:
        """Average the buckets of a step, all of which are full."""
        pending = self._pending
        if pending is None:
            raise RuntimeError("finish() was called before the first bucket of a step")
        binding, begin = pending.binding, time.perf_counter()
        self.compressor.meter.add("arrival_s", begin - pending.begun)
        if pending.sending is not None and not binding.knows_all(pending.buckets):
            self._stop_sending(pending)
        self._check_positions(binding, binding.world.end_gather(pending.check))
        try:
            self._exchange(pending, pending.sending or self._send_all(pending), begin)
        except BaseException:
            self.forget()
            raise
        for bucket in pending.buckets:
            if bucket.gradients:
                bucket.future.set_result(bucket.buffer)
        self._pending = None

    def _begin_step(self) -> _PendingStep:
        self.forget()  # backward ended before its last bucket
        world = self._compared_world()
        compressor = self.compressor
        compressor.begin_step()
        if self._stale or self._binding is None:
            self._binding, self._stale = BucketBinding(compressor, world, self._name), False
        binding, number = self._binding, compressor.step
        pending = _PendingStep(binding)
        if number % LENGTHS_LAST == 0 or number == compressor.settings.warmup_steps:
            world.forget_lengths()
        if binding.layout is not None:
            binding.prepare(number)
            pending.due = compressor.updates.due(number)
            if binding.exchange.is_set_up and not pending.due:
                pending.sending = self._new_step(binding, binding.layout)
                pending.sending.release(1.0 / world.size)
        pending.check = world.begin_gather(self._position(pending))
        self._pending = pending
        return pending

    def _compared_world(self) -> TorchWorld | HorovodRounds:
        """Return the ranks, which have compared their settings once."""
        if self._world is not None and self._world.is_current():
            return self._world
        self._world, self._binding = None, None
        world = self._make_world()
        everyone = world.gather_objects(describe(self.compressor))
        if mismatch := differences(everyone, range(world.size)):
            raise RankMismatchError(mismatch)
        self._world = world
        return world

    def _position(self, pending: _PendingStep) -> torch.Tensor:
        """Return what must be the same on all ranks before they wait for each other, int64."""
        layout = pending.binding.layout
        laid_out = UNKNOWN if layout is None else layout.fingerprint >> 1
        settings, step = self.compressor.codec.settings_fingerprint, self.compressor.step
        due = UNKNOWN
        if pending.due is not None:
            updates = self.compressor.updates
            due = updates.first_due(step) + 2 * updates.second_due(step)
        here = (settings, step, self._attempt, due, laid_out)
        return torch.tensor([*here, int(pending.sending is not None)], device="cpu")

    def _check_positions(self, binding: BucketBinding, positions: torch.Tensor) -> None:
        """Raise RankMismatchError, on every rank, if their positions differ."""
        described = [_describe_position(row) for row in positions.tolist()]
        if mismatch := differences(described, range(binding.world.size)):
            self.forget()
            raise RankMismatchError(mismatch)

    def _send_all(self, pending: _PendingStep) -> Step:
        """Return a new step with all buckets, none of which has been sent."""
        compressor, binding, buckets = self.compressor, pending.binding, pending.buckets
        layout = binding.layout
        if layout is None or not binding.knows_all(buckets):
            layout = binding.lay_out(buckets, self.names.of(buckets, compressor.settings))
            binding.world.forget_lengths()
            logger.debug(
                "%d buckets of DDP in %d groups over %d ranks",
                len(buckets),
                len(layout.groups),
                binding.world.size,
            )
        if pending.due is None:
            binding.prepare(compressor.step)
            pending.due = compressor.updates.due(compressor.step)
        if pending.due:
            binding.world.forget_lengths()
        positions = binding.world.gather_equal(self._position(pending), "position")
        self._check_positions(binding, positions)
        pending.sending = step = self._new_step(binding, layout)
        for index in range(len(buckets)):
            pending.arrive(step, index)
        return step

    def _exchange(self, pending: _PendingStep, step: Step, begin: float) -> None:
        """Fit tables, send the remaining groups, write averages into the buckets.

        begin: when the last bucket was full.
        """
        compressor, binding = self.compressor, pending.binding
        binding.set_up(step.layout, step.number, step.device)
        if pending.due or compressor.updates.second_due(step.number):
            compressor.updates.run(
                step.number, step.samples, binding.sync(), step.parts, step.is_finite()
            )
        used = self._used_somewhere(pending)
        step.launch_all(1.0 / binding.world.size)
        gradients = [gradient for bucket in pending.buckets for gradient in bucket.gradients]
        for slot, gradient in enumerate(gradients):
            result = step.result(slot, absent=not used[slot])
            if result.data_ptr() != gradient.data_ptr():
                gradient.copy_(result)
        compressor.step, self._attempt = step.number + 1, 0
        compressor.meter.add("blocked_s", time.perf_counter() - begin)
        compressor.meter.finish()
        step.commit()
        binding.monitored.step_ended(binding, step.number, step.layout, step.device)

    def _new_step(self, binding: BucketBinding, layout: Layout) -> Step:
        residuals = self.compressor.residuals
        if residuals is not None:
            residuals.lay_out(layout, binding.world.rank, binding.world.size)
        number = self.compressor.step
        return Step(binding, layout, number, self._attempt, residuals, disjoint=True)

    def _stop_sending(self, pending: _PendingStep) -> None:
        """Give up what was sent of a step.

        Payloads of the next attempt differ from this one's, so ranks detect that they gave up
        different attempts.
        """
        if pending.sending is not None:
            pending.sending.abandon()
            pending.sending = None
            self._attempt += 1
        self.compressor.meter.restart()

    def _used_somewhere(self, pending: _PendingStep) -> Sequence[bool]:
        """Return for each slot whether some rank's gradient has a value other than zero.

        If none has, DDP applies nothing (find_unused_parameters), so the residual must keep what it
        would send.
        """
        if self.compressor.residuals is None:
            return [True] * sum(len(bucket.gradients) for bucket in pending.buckets)
        used = torch.tensor(pending.used, dtype=torch.uint8, device="cpu")
        return pending.binding.world.gather_equal(used, "used").any(dim=0).tolist()


def _describe_position(position: Sequence[int]) -> Description:
    """Return a position as topics of named values; see hooks/description.py."""
    fingerprint, step, attempt, due, layout, sending = position
    fits = {False: "not due", True: "due"}
    return {
        "the step": {
            "its number": str(step),
            "its attempt": str(attempt),
            "a fit of tables (update_steps)": "not known" if due < 0 else fits[bool(due & 1)],
            "a fit of averages' tables": "not known" if due < 0 else fits[bool(due & 2)],
            "sending": "at once" if sending else "at the end",
        },
        "settings": {"all of them": f"{fingerprint:08x}"},
        "buckets": {"parameters": f"{zlib.crc32(repr(layout).encode()):08x}"},
    }
