"""Run the steps of a model that FSDP2 shards."""

from __future__ import annotations

import contextlib
import functools
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_adaptive.base.errors import PayloadError, RankMismatchError, WarnOnce
from hvd_adaptive.base.tensors import check_supported
from hvd_adaptive.changes import begin_step
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.connection import ApartFromHorovod
from hvd_adaptive.exchange.exchange import Failures, RankInfo, carry_out
from hvd_adaptive.exchange.scatter_reduce import ShardReduce
from hvd_adaptive.hooks.fsdp.modules import ShardedModule, ShardedModules
from hvd_adaptive.run.agreement import compare_settings, differences, disagreement, position
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.run.rounded_zeros import RoundedZeros
from hvd_adaptive.training import is_first_rank
from hvd_adaptive.transport.torch_world import TorchWorld

logger = logging.getLogger("hvd_adaptive")

ADVICE = "Every rank must run the same modules, and finish the same steps"
# Calls of one module in a step after which a missing ``finish`` is warned of.
MANY_CALLS = 256
UNUSED = (
    "nothing was compressed, because FSDP has reduced no gradient by this compressor: train the "
    "model that was given to compress_reduce_scatter or compress_all_reduce"
)
UNFINISHED = (
    "gradients were reduced, but no step ended: call finish() before your update; a step of a "
    "torch.optim.Optimizer calls it"
)


class ShardedSession(ApartFromHorovod):
    """Connect a compressor to the modules of one model; a Connection.

    1. ``average`` is called for each module during backward passes, on all ranks in one order. It
       encodes, sends, receives and decodes. A payload that cannot be read is noted. In a step's
       first call ranks compare their positions, while they encode; if they differ, nothing is sent.
    2. ``finish`` ends a step, before the optimizer's. Ranks exchange failures and what they have
       reduced, so that all raise the same error. Tables are fitted if that is due, and used from
       the next step.

    Args:
        label: Beginning of collectives' names.
        shards: Ranks keep shards of the average; else each rank gets all of it.

    Attributes:
        has_shards: See ``shards``.
    """

    compressor: GradientCompressor
    serves = "model", "a model of FSDP"

    def __init__(
        self,
        compressor: GradientCompressor,
        modules: Sequence[ShardedModule],
        label: str,
        shards: bool,
    ) -> None:
        self.compressor, self._modules = compressor, ShardedModules(compressor, modules, shards)
        self._label, self.has_shards = label, shards
        self._group: Any = None
        self._world: TorchWorld | None = None  # until the first call
        self._binding: RankContext | None = None
        self._calls: Counter[int] = Counter()  # of each module in the step in progress
        self._attempts: Counter[int] = Counter()  # likewise, with those of steps that failed
        self._failures = Failures()
        self._positions: Any = None  # their gather, in flight in the first call of a step
        self._mismatch: RankMismatchError | None = None  # of the positions
        # Modules whose average was computed from payloads that are not compared yet.
        self._unchecked: list[tuple[int, Callable[[], None]]] = []
        self._is_sampled = False
        self._zeros: RoundedZeros | None = None
        self._device = torch.device("cpu")
        self._warn_of_no_use = WarnOnce(logger, is_first_rank())

    @property
    def exchange(self) -> str | None:
        return "reduce_scatter" if self.has_shards else super().exchange

    @property
    def is_idle(self) -> bool:
        return not self._calls

    def warn_if_unused(self) -> None:
        """Warn, once and on the first rank, if nothing was ever reduced, or no step has ended."""
        if self._world is None:
            self._warn_of_no_use("%s", UNUSED)
        elif self._calls and self.compressor._training.meter.last is None:
            self._warn_of_no_use("%s", UNFINISHED)

    def abandon(self) -> None:
        """Give up the step in progress: what is reduced next is of another attempt."""
        if self._calls:
            self._calls.clear()
            self._modules.buckets.clear()
            self._unchecked.clear()
            self._failures, self._mismatch = Failures(), None
            self.compressor._training.meter.give_up()

    def rebind(self) -> None:
        """Use other settings from the next call on."""
        self.abandon()
        self._binding = None
        self._modules.relabel()

    @torch.no_grad()
    def average(
        self, index: int, flat: torch.Tensor, out: torch.Tensor, group: Any, factor: float
    ) -> None:
        """Average a module's tensor over ranks, a collective.

        Args:
            flat: What is averaged, 1-D; with shards, those of all ranks in their order.
            out: Receives the average, or this rank's shard of it; may be ``flat``.
            factor: Scale of the sum over ranks.
        """
        if self._mismatch is not None:
            out.fill_(float("nan"))
            return
        self.reconnect()
        check_supported(flat.device)
        world = self._world_of(group)
        if not self._calls:
            self._begin(world)
        binding = self._binding
        assert binding is not None
        module, self._device = self._modules.note(index, flat, world.size), flat.device
        self._calls[index] += 1
        self._attempts[index] += 1
        if self._is_sampled and module.group.quantized:
            self._modules.draw(index, flat, world.rank, self._attempts[index])
        call = self._attempts[index] - 1
        ordered, parcel = self._modules.parcel(index, flat, factor, call)
        if self._zeros is not None:
            values, padding = ordered[: parcel.quantized], module.padding * flat.numel()
            self._zeros.look(module.group, values, parcel.codec, round(padding / module.length))
        meter = self.compressor._training.meter
        meter.add(index, coordinates=flat.numel(), uncompressed_bytes=flat.nbytes)
        try:
            route = binding.exchange.average(parcel, ordered, ordered[: parcel.quantized])
            del ordered
            agree = None if self._positions is None else self._agree
            average = carry_out(route, world, f"{self._label}.{index}", meter, index, agree)
        except RankMismatchError as error:
            self._mismatch = error
            out.fill_(float("nan"))
            # Raise it after FSDP's own callback, so that FSDP can begin another backward pass.
            with contextlib.suppress(RuntimeError):  # outside of one ``finish`` raises it
                torch.autograd.Variable._execution_engine.queue_callback(self._refuse)
            return
        except PayloadError as error:
            self._failures.note(index, error)
            out.fill_(float("nan"))
            return
        self._unchecked += [(index, verify) for verify in parcel.unchecked]
        quantized = parcel.quantized // (world.size if self.has_shards else 1)
        size, without_zeros = parcel.codec.settings.bucket_size, parcel.codec.leaves_zeros_out
        meter.look(average[:quantized], size, index, without_zeros)
        out.copy_(parcel.narrowed(average, quantized, world.size))
        if self._calls[index] == MANY_CALLS:
            logger.warning(
                "%s was reduced %d times since the last optimizer step: call finish() before each "
                "step of an optimizer that is no torch.optim.Optimizer",
                module.name,
                MANY_CALLS,
            )

    @torch.no_grad()
    def finish(self) -> None:
        """End a step, a collective; see ``fsdp.Compressed.finish``."""
        if not self._calls:
            return
        self._refuse()
        world, compressor, step = self._world, self.compressor, self.compressor.step
        assert world is not None and self._binding is not None
        for index, verify in self._unchecked:
            try:
                verify()
            except PayloadError as error:
                self._failures.note(index, error)
        self._unchecked.clear()
        try:
            self._compare(world)
        except (PayloadError, RankMismatchError):
            self.abandon()
            raise
        if self._is_sampled:
            parts = self._modules.parts_of(self._calls)
            compressor._training.updates.run(step, self._modules.drawn, self._binding.sync(), parts)
        layout = self._binding.layout = self._modules.layout()
        if self._zeros is not None and step >= compressor.settings.warmup_steps:
            compressor.parts.looked_for_zeros(self._zeros.tell(layout.members))
        compressor.step += 1
        self._calls.clear()
        self._attempts.clear()
        self._modules.buckets.clear()
        compressor._training.meter.finish()
        self._binding.monitored.step_ended(self._binding, step, layout, self._device)

    def _agree(self) -> None:
        """Raise RankMismatchError, the same one on all ranks, if they differ at a step's begin."""
        world, binding = self._world, self._binding
        assert world is not None and binding is not None
        positions, self._positions = world.end_gather(self._positions), None
        if mismatch := disagreement(positions, binding.agreed):
            raise RankMismatchError(mismatch)
        if self._is_sampled or self.compressor.step == self.compressor.settings.warmup_steps:
            world.forget_lengths()

    def _refuse(self) -> None:
        """Give the step up if ranks differ, and raise RankMismatchError."""
        if (mismatch := self._mismatch) is not None:
            self.abandon()
            raise mismatch

    def _compare(self, world: TorchWorld) -> None:
        """Compare the ranks' modules and failures, a collective; see ``finish``."""
        compressor, failures = self.compressor, self._failures
        calls = zlib.crc32(repr(sorted(self._calls.items())).encode())
        gather = functools.partial(world.gather_equal, name=f"{self._label}.corrupt")
        failed, rows = failures.everywhere(world.size, gather, [calls])
        described = [{"modules": {"those reduced": f"{int(calls):08x}"}} for (calls,) in rows]
        if mismatch := differences(described, range(len(described)), ADVICE):
            raise RankMismatchError(mismatch) from failures.first
        if failed:
            names = [f"rank {rank} ({self._modules[i].name})" for rank, i in failed.items()]
            raise PayloadError(
                f"step {compressor.step}: a payload arrived corrupt at {', '.join(names)}. No rank "
                "takes the optimizer's step: call zero_grad() and go on"
            ) from failures.first

    def _world_of(self, group: Any) -> TorchWorld:
        """Return the ranks, which have compared their settings; a collective at the first call."""
        if self._world is None:
            self._group, self._world = group, TorchWorld(group)
            compare_settings(self._world, self.compressor)
        if group is not self._group:
            raise ValueError(
                "model: its modules are sharded over different groups of ranks; compress those of "
                "each group with a compressor of their own"
            )
        return self._world

    def _begin(self, world: TorchWorld) -> None:
        compressor = self.compressor
        begin_step(compressor)
        step = compressor.step
        if self._binding is None:
            self._binding = RankContext(compressor, world, self._label)
            if self.has_shards:
                self._binding.exchange = ShardReduce(RankInfo(world.size, world.rank))
        if not self.has_shards:
            self._binding.parts = self._modules.parts()
            self._binding.prepare(step)
        due = compressor._training.updates.at(step)
        self._is_sampled = due.samples
        row = self._binding.settings_row
        own = position(compressor, 0, None, due, False, row, compares=False)
        self._positions = world.begin_gather(own)
        looks = compressor.parts.looks_for_zeros and world.rank == 0
        self._zeros = RoundedZeros() if looks else None
