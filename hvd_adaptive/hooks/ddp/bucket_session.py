"""From DistributedDataParallel's buckets to steps."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.hooks.ddp.buckets import Bucket, BucketBinding, Names
from hvd_adaptive.hooks.description import Description, describe, differences
from hvd_adaptive.layout import Layout
from hvd_adaptive.run.step import Step
from hvd_adaptive.transport.torch_world import TorchWorld

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor

logger = logging.getLogger("hvd_adaptive")

# Steps after which lengths of payloads are asked for again, lest frames stay larger than need be.
LENGTHS_LAST = 256
UNKNOWN = -1


class BucketSession:
    """A compressor at work for a DDP model: buckets come in by ``take``, ``finish`` averages them.

    1. The first bucket of a step begins it. Where the buckets are those of the step before, each
       is encoded and sent as soon as backward has filled it.
    2. At the first step, where DDP has built its buckets anew (as it does after the first step),
       and where tables are to be fitted, buckets wait for the last one.
    3. ``finish``: ranks make sure that they agree, fit tables if this is an update step, and finish
       the exchange. Averages take the gradients' place in DDP's buckets.

    group: the process group; the default one where None.
    """

    def __init__(
        self, compressor: GradientCompressor, names: Names, group: dist.ProcessGroup | None
    ) -> None:
        self.compressor, self.names, self.group = compressor, names, group
        self._world: TorchWorld | None = None
        self._binding: BucketBinding | None = None
        self._stale = False
        self._attempt = 0
        self._forget_step()

    def _forget_step(self) -> None:
        self._buckets: list[Bucket] = []
        self._used: list[bool] = []
        self._step: Step | None = None
        self._check: Any = None
        self._due: bool | None = None

    @property
    def layout(self) -> Layout | None:
        """See Connection.layout."""
        return None if self._binding is None else self._binding.layout

    @property
    def is_idle(self) -> bool:
        """Whether no step is in progress."""
        return self._check is None

    def forget(self) -> None:
        """Give up the step in progress, if there is one."""
        if not self.is_idle:
            self._drop_step()
            self._forget_step()

    def rebind(self) -> None:
        """Settings have changed: the next step is laid out anew."""
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
        """Bucket ``index`` of a step is full."""
        if index == 0:
            self._begin_step()
        elif self.is_idle:
            raise RuntimeError(
                f"bucket {index} came without the ones before: compression_hook must be registered "
                "between steps, and its state with one model"
            )
        self._buckets.append(bucket)
        if self.compressor.residuals is not None:
            self._used += [bool(gradient.any()) for gradient in bucket.gradients]
        if self._step is not None:
            if self._binding.knows(index, bucket):
                self._arrive(index)
            elif index == 0:
                self._step = None
            else:
                self._drop_step()

    def finish(self) -> None:
        """All buckets are full: average them."""
        if self._step is not None and not self._binding.knows_all(self._buckets):
            self._drop_step()
        self._agree(self._world.end_gather(self._check))
        try:
            if self._step is None:
                self._take_all()
            self._exchange()
        except BaseException:
            self.forget()
            raise
        for bucket in self._buckets:
            if bucket.gradients:
                bucket.future.set_result(bucket.buffer)
        self._forget_step()

    def _begin_step(self) -> None:
        self.forget()  # backward ended before its last bucket
        self._meet()
        compressor = self.compressor
        compressor.begin_step()
        if self._stale or self._binding is None:
            self._binding, self._stale = BucketBinding(compressor, self._world), False
        binding, number = self._binding, compressor.step
        if number % LENGTHS_LAST == 0 or number == compressor.settings.warmup_steps:
            self._world.forget_lengths()
        if binding.layout is not None:
            binding.prepare(number)
            self._due = compressor.update_due(number)
            if binding.exchange.settled and not self._due:
                self._step = self._new_step()
                self._step.release()
        self._check = self._world.begin_gather(self._position())

    def _meet(self) -> None:
        """Ranks tell each other their settings, once."""
        if self._world is not None and self._world.is_current():
            return
        self._world, self._binding = TorchWorld(self.group), None
        own = describe(self.compressor)
        everyone = self._world.gather_objects(own)
        if told := differences(everyone, range(self._world.size)):
            self._world = None
            raise RankMismatchError(told)

    def _position(self) -> torch.Tensor:
        """Where this rank is, int64: what ranks must have alike before they wait for each other."""
        binding = self._binding
        layout = UNKNOWN if binding.layout is None else binding.layout.fingerprint >> 1
        due = UNKNOWN if self._due is None else int(self._due)
        here = (self.compressor.fingerprint, self.compressor.step, self._attempt, due, layout)
        return torch.tensor([*here, int(self._step is not None)], device="cpu")

    def _agree(self, positions: torch.Tensor) -> None:
        """RankMismatchError, on every rank, where they are not in the same place."""
        told = differences([_told(row) for row in positions.tolist()], range(self._world.size))
        if told:
            self.forget()
            raise RankMismatchError(told)

    def _take_all(self) -> None:
        """No bucket has been sent yet; perhaps none has been laid out."""
        compressor, binding = self.compressor, self._binding
        if binding.layout is None or not binding.knows_all(self._buckets):
            names = self.names.of(self._buckets, compressor.settings)
            binding.lay_out(self._buckets, names)
            self._world.forget_lengths()
            logger.debug(
                "%d buckets of DDP in %d groups over %d ranks",
                len(self._buckets),
                len(binding.layout.groups),
                self._world.size,
            )
        if self._due is None:
            binding.prepare(compressor.step)
            self._due = compressor.update_due(compressor.step)
        if self._due:
            self._world.forget_lengths()
        self._agree(self._world.gather_equal(self._position(), "position"))
        self._step = self._new_step()
        for index in range(len(self._buckets)):
            self._arrive(index)

    def _exchange(self) -> None:
        """Fit tables, send what has not been sent, put averages into the buckets."""
        compressor, binding, step, world = (
            self.compressor,
            self._binding,
            self._step,
            self._world,
        )
        step.factor = 1.0 / world.size
        binding.settle(step.layout, step.number, step.device)
        if self._due or compressor.second_due(step.number):
            compressor.update(
                step.number, step.samples, binding.sync(), step.parts, step.is_finite()
            )
        used = self._used_somewhere()
        step.launch_all()
        gradients = [gradient for bucket in self._buckets for gradient in bucket.gradients]
        for slot, gradient in enumerate(gradients):
            result = step.result(slot, absent=not used[slot])
            if result.data_ptr() != gradient.data_ptr():
                gradient.copy_(result)
        compressor.step, self._attempt = step.number + 1, 0
        compressor.meter.finish()
        step.commit()
        binding.monitored.step_ended(binding, step.number, step.layout)

    def _new_step(self) -> Step:
        binding, residuals = self._binding, self.compressor.residuals
        if residuals is not None:
            residuals.lay_out(binding.layout, self._world.rank, self._world.size)
        step = Step(binding, binding.layout, self.compressor.step, self._attempt, residuals)
        step.disjoint = True
        return step

    def _arrive(self, index: int) -> None:
        slot = self._binding.first_slot(index)
        for place, gradient in enumerate(self._buckets[index].gradients):
            self._step.arrive(slot + place, gradient)

    def _drop_step(self) -> None:
        """What was sent is left alone. Payloads of the next attempt differ from this one's, so that
        ranks that gave up different things find out."""
        if self._step is not None:
            self._step.abandon()
            self._step = None
            self._attempt += 1
        self.compressor.meter.restart()

    def _used_somewhere(self) -> Sequence[bool]:
        """Of each slot, whether some rank has a gradient other than zeros. Where none has, DDP
        applies nothing (find_unused_parameters), and what a residual would send must stay in it."""
        if self.compressor.residuals is None:
            return [True] * sum(len(bucket.gradients) for bucket in self._buckets)
        used = torch.tensor(self._used, dtype=torch.uint8, device="cpu")
        return self._world.gather_equal(used, "used").any(dim=0).tolist()


def _told(position: Sequence[int]) -> Description:
    """In the words of hooks/horovod/agreement.py."""
    fingerprint, step, attempt, due, layout, sending = position
    fits = {0: "not due", 1: "due"}
    return {
        "the step": {
            "its number": str(step),
            "its attempt": str(attempt),
            "a fit of tables (update_steps)": fits.get(due, "to be asked"),
            "sending": "at once" if sending else "at the end",
        },
        "settings": {"all of them": f"{fingerprint:08x}"},
        "buckets": {"parameters": f"{zlib.crc32(repr(layout).encode()):08x}"},
    }
