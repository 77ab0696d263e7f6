"""The steps of a DistributedDataParallel model, from its buckets."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive.base.checks import living
from hvd_adaptive.base.errors import RankMismatchError, WarnOnce
from hvd_adaptive.changes import begin_step
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.connection import ApartFromHorovod
from hvd_adaptive.hooks.ddp.buckets import Bucket, BucketBinding, Pending, compare_names
from hvd_adaptive.hooks.ddp.early import EarlyGroups
from hvd_adaptive.hooks.ddp.names import Names
from hvd_adaptive.run.agreement import compare_settings, format_ranks
from hvd_adaptive.run.ordered_drive import OrderedDriver
from hvd_adaptive.training import is_first_rank
from hvd_adaptive.transport.torch_world import TorchWorld

logger = logging.getLogger("hvd_adaptive")

ENGINE = "_engine_run_backward"  # torch's function that calls autograd
UNUSED = (
    "a CompressionState has compressed nothing: register the hook with the wrapped model, "
    "model.register_comm_hook(state, compression_hook), before the first step; a copied or "
    "unpickled model needs it again"
)


class BucketSession(ApartFromHorovod):
    """Connect a compressor to a DDP model: ``take`` receives buckets, ``finish`` averages them.

    1. The first bucket begins a step. If its parameters are laid out, each bucket is handed to the
       driver (run/ordered_drive.py) as soon as backward has filled it, or groups of it earlier
       (early.py), and its future is set as soon as its average has replaced it.
    2. Buckets wait for the last one at the first step, and are laid out then. Should their averages
       be needed earlier, they are averaged in full precision.
    3. ``finish`` completes a step. It is called in the hook if the driver sends nothing before, and
       else when autograd ends the backward pass: DDP may skip buckets, the last one included.
    """

    compressor: GradientCompressor
    serves = "model", "a DistributedDataParallel model"

    def __init__(
        self, compressor: GradientCompressor, names: Names, group: dist.ProcessGroup | None
    ) -> None:
        self.compressor, self.names, self.group = compressor, names, group
        self._world: TorchWorld | None = None  # until the first bucket
        self._names_world: TorchWorld | None = None  # likewise
        self._binding: BucketBinding | None = None
        self._stale = False
        self._driver = OrderedDriver(compressor)
        self._rebuilt = False  # DDP has built its buckets anew, in the order of arrival
        self._early = EarlyGroups(self._arrive_early)
        self.was_used = False
        self._warn_of_no_use = WarnOnce(logger, is_first_rank(group))
        self._pending: Pending | None = None

    @property
    def is_idle(self) -> bool:
        return self._pending is None or self._pending.plain

    def warn_if_unused(self) -> None:
        """Warn, once and on the first rank, if the hook was never called."""
        if not self.was_used and self._world is None:
            self._warn_of_no_use("%s", UNUSED)

    def abandon(self) -> None:
        self._pending = None
        self._early.stop()
        self._driver.give_up()

    def close(self) -> None:
        """Give up the step in progress, and leave the ranks."""
        self.abandon()
        self._early.remove()
        for world in (self._world, self._names_world):
            if world is not None:
                world.close()
        self._world = self._names_world = self._binding = None
        self.was_used = True

    def rebind(self) -> None:
        self.abandon()
        self._stale = True

    def take(
        self, bucket: Bucket, index: int, is_last: bool = False, as_filled: bool = False
    ) -> None:
        """Receive a full bucket of a step.

        Args:
            index: DDP's number of it. In the first iteration with static_graph=True all are 0.
            is_last: DDP says that it is the last one. If not, perhaps none is.
            as_filled: The bucket is as DDP has filled it; no hook around ours may have changed it.
        """
        begin = time.perf_counter()
        pending = self._pending
        if pending is not None and pending.is_before(bucket):
            if (pending.ended or index) and not pending.plain:
                self.finish()  # without the buckets that DDP has skipped or changed
            pending = None
        if pending is None:
            pending = self._begin_step(bucket)
        pending.buckets.append(bucket)
        pending.parameters.update(bucket.identities)
        if pending.collects and index == 0 and len(pending.buckets) > 1:
            # DDP waits for the futures of the first iteration before it says which bucket is last.
            self._average_plainly(pending)
        elif pending.plain:
            self._all_reduce(bucket)
        elif not pending.collects:
            gradients = self._hand_over(pending, bucket)
            if gradients and as_filled and bucket is pending.buckets[0]:
                self._early.begin(gradients)
        self.compressor._training.meter.add(blocked_s=time.perf_counter() - begin)
        if not pending.plain:
            bucket.future.needed = functools.partial(self._needed, pending)
        in_backward = _at_end_of_backward(functools.partial(self._backward_ended, pending))
        if is_last and (pending.collects or self._driver.is_held or not in_backward):
            self.finish()

    def finish(self) -> None:
        """Average the buckets of a step, all of which are full."""
        pending = self._pending
        if pending is None:
            raise RuntimeError("finish() was called before the first bucket of a step")
        try:
            self._compare_arrived(pending)
            if pending.collects:
                self._lay_out_next(pending.binding, pending.buckets)
                self._driver.begin(pending.binding, pending.buckets[0].buffer.is_cpu)
                for bucket in pending.buckets:
                    self._hand_over(pending, bucket)
            self._driver.finish()
        except BaseException as error:
            self.abandon()
            if isinstance(error, RankMismatchError):  # collectives may be paired wrongly
                self._world = self._binding = None
            for bucket in pending.buckets:
                bucket.set_future(error)
            raise
        self._pending = None
        if pending.is_complete and not pending.binding.is_laid_out_for(pending.buckets):
            self._rebuilt = True
            self._lay_out_next(pending.binding, pending.buckets)
            pending.gradients = {}
            for bucket in pending.buckets:  # in their new slots
                pending.gradients |= pending.binding.by_slot(bucket)
        self._early.end(pending.gradients)

    def _compare_arrived(self, pending: Pending) -> None:
        """Compare the ranks' gradients before waiting for any of their averages."""
        if self._names_world is None:
            return
        try:
            names = pending.names(self.names, self._early.sent)
            warn = functools.partial(self._driver.warn_of_stall, pending.binding.world.rank)
            compare_names(self._names_world, self.compressor.step, names, warn)
        except RankMismatchError:
            self._driver = OrderedDriver(self.compressor)  # it must not complete the step
            self.compressor._training.meter.give_up()
            raise

    def _begin_step(self, bucket: Bucket) -> Pending:
        if self._pending is not None:
            self.abandon()  # backward ended before its last bucket
        world = self._compared_world(bucket)
        compressor = self.compressor
        begin_step(compressor)
        if self._stale or self._binding is None:
            last, self._stale = self._binding, False
            self._binding = BucketBinding(compressor, world)
            if last is not None:
                self._binding.compared_at = last.compared_at
        binding = self._binding
        self._pending = pending = Pending(binding, collects=not binding.knows(bucket))
        if not pending.collects:
            self._driver.begin(binding, bucket.buffer.is_cpu)
        return pending

    def _hand_over(self, pending: Pending, bucket: Bucket) -> dict[int, torch.Tensor]:
        """Hand the driver a bucket's gradients; return them by slot."""
        gradients = pending.binding.by_slot(bucket)
        if gradients:
            pending.gradients |= gradients
            self._driver.arrive(self._early.rest_of(gradients), bucket.set_future)
        return gradients

    def _arrive_early(self, gradients: Mapping[int, torch.Tensor]) -> None:
        self._driver.arrive(gradients, lambda error: None)

    def _lay_out_next(self, binding: BucketBinding, buckets: Sequence[Bucket]) -> None:
        """Lay out these buckets from now on."""
        parameters = [p for bucket in buckets for p in bucket.parameters]
        names = self.names.of(parameters, self.compressor.settings)
        layout = binding.lay_out(buckets, names, self._rebuilt)
        binding.named = self.names.compared(parameters)
        self._early.lay_out(layout, binding.divided(buckets))
        binding.world.forget_lengths()
        logger.debug(
            "%d buckets of DDP in %d groups over %d ranks",
            len(buckets),
            len(layout.groups),
            binding.world.size,
        )

    def _backward_ended(self, pending: Pending) -> None:
        """Complete the step: autograd has ended a backward pass in which a bucket arrived."""
        if self._pending is not pending:
            return
        pending.ended = True
        if pending.plain:
            if not _is_nested():
                self._lay_out_next(pending.binding, pending.buckets)
                self._pending = None
            return
        # Others may follow after the backward pass of a checkpoint's segment.
        held = pending.collects or self._driver.is_held
        if pending.is_complete or held or not _is_nested():
            self.finish()

    def _needed(self, pending: Pending) -> None:
        """Go on without the buckets to come: the program waits for one that has arrived."""
        if self._pending is not pending:
            return
        if pending.collects:
            self._average_plainly(pending)
        else:
            self.finish()

    def _average_plainly(self, pending: Pending) -> None:
        logger.info(
            "DistributedDataParallel needs averages before all buckets are known, as in the first "
            "iteration with static_graph=True: this step travels uncompressed"
        )
        pending.collects, pending.plain = False, True
        for bucket in pending.buckets:
            self._all_reduce(bucket)

    def _all_reduce(self, bucket: Bucket) -> None:
        """Average a bucket in full precision, as DDP does; its future is set later."""
        if not bucket.gradients:
            return  # the hook has done so
        size = dist.get_world_size(self.group)
        work = dist.all_reduce(bucket.buffer.div_(size), group=self.group, async_op=True)
        work.get_future().add_done_callback(bucket.set_after)

    def _compared_world(self, bucket: Bucket) -> TorchWorld:
        """Return the ranks, which have compared their settings once."""
        if self._world is not None and self._world.is_current():
            return self._world
        self._world, self._binding = None, None
        _check_group(self.group, bucket)
        world = TorchWorld(self.group)
        compare_settings(world, self.compressor)
        self._world, self._names_world = world, TorchWorld(self.group)
        return world


def _check_group(group: dist.ProcessGroup | None, bucket: Bucket) -> None:
    """Raise ValueError if DDP averages the bucket over other ranks than ``group``, which its hooks
    do not receive.
    """
    parameters, own = set(bucket.identities), sorted(dist.get_process_group_ranks(group))
    others = [
        sorted(dist.get_process_group_ranks(model.process_group))
        for model in living(DistributedDataParallel)
        if not parameters.isdisjoint(map(id, model.parameters()))
    ]
    if others and own not in others:  # a model may have been wrapped before
        raise ValueError(
            f"process_group: the CompressionState averages over {format_ranks(own)}, but "
            f"DistributedDataParallel over {format_ranks(others[-1])}: give "
            "CompressionState(process_group=model.process_group)"
        )


def _at_end_of_backward(call: Callable[[], None]) -> bool:
    """Have autograd call a function when the backward pass in progress ends; False if none is."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(call)
    except RuntimeError:
        return False
    return True


def called_by_autograd() -> bool:
    """Return whether autograd itself has called the caller, and no other function of Python."""
    caller = sys._getframe(1).f_back  # None on a thread of autograd's
    return caller is None or caller.f_code.co_name == ENGINE


def _is_nested() -> bool:
    """Return whether a backward pass runs within another one, as for reentrant checkpoints."""
    frame: FrameType | None = sys._getframe()
    passes = 0
    while frame is not None:
        passes += frame.f_code.co_name == ENGINE
        frame = frame.f_back
    return passes > 1
