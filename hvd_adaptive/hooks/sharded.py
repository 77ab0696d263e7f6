"""The steps of a model that FSDP2 shards, from the tensors that its modules reduce."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hvd_adaptive.adapt.statistics import Sample
from hvd_adaptive.device import check_supported
from hvd_adaptive.errors import PayloadError, RankMismatchError
from hvd_adaptive.exchange.exchange import Place, Route
from hvd_adaptive.exchange.parcel import Parcel, RandomStream
from hvd_adaptive.exchange.shard_reduce import ShardReduce
from hvd_adaptive.finite import narrowed
from hvd_adaptive.hooks.connected import ApartFromHorovod
from hvd_adaptive.layout import Group, Layout, Member, Piece
from hvd_adaptive.run.agreement import compare_settings
from hvd_adaptive.run.description import differences
from hvd_adaptive.run.failures import Failures
from hvd_adaptive.run.groups import Groups
from hvd_adaptive.streams import Use, group_number
from hvd_adaptive.transport.torch_world import TorchWorld

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor

logger = logging.getLogger("hvd_adaptive")

# Calls of one module in a step after which a missing ``finish`` is warned of.
MANY_CALLS = 256
ADVICE = "Every rank must run the same modules, and finish the same steps"


@dataclass
class ShardedModule:
    """A module of the model.

    Attributes:
        name: Its name in the model.
        numel: The number of its parameters' coordinates.
        group: What it reduces; None until its first call.
        length: Coordinates of a shard, or of the tensor that is averaged.
    """

    name: str
    numel: int
    group: Group = field(default_factory=lambda: Group(torch.float32))
    length: int = 0


class ShardedSession(ApartFromHorovod):
    """Connect a compressor to the modules of one model; a Connection.

    1. ``average`` is called for each module during backward passes, on all ranks in one order. It
       encodes, sends, receives and decodes. A payload that cannot be read is noted.
    2. ``finish`` ends a step, before the optimizer's. Ranks exchange failures and positions, so
       that all raise the same error. Tables are fitted if that is due, and used from the next step.

    Args:
        compressor: The compressor.
        modules: The modules.
        label: Beginning of collectives' names.
        shards: Ranks keep shards of the average; else each rank gets all of it.
    """

    serves = "model", "a model of FSDP"

    def __init__(
        self,
        compressor: GradientCompressor,
        modules: Sequence[ShardedModule],
        label: str,
        shards: bool,
    ) -> None:
        self.compressor, self.modules = compressor, list(modules)
        self._label, self._shards = label, shards
        self._group: Any = None
        self._world: TorchWorld | None = None  # until the first call
        self._binding: Groups | None = None
        self._calls: Counter[int] = Counter()  # of each module in the step in progress
        self._attempts: Counter[int] = Counter()  # likewise, with those of steps that failed
        self._failures = Failures()
        self._samples: dict[str, list[tuple[list[torch.Tensor], float, Group]]] = {}
        self._is_sampled = False
        self._device = torch.device("cpu")
        parts = compressor.parts
        self._labels = [parts.label_of(module.name) for module in self.modules]

    @property
    def exchange(self) -> str | None:
        """See Connection.exchange."""
        return "reduce_scatter" if self._shards else super().exchange

    @property
    def is_idle(self) -> bool:
        """See Connection.is_idle."""
        return not self._calls

    def forget(self) -> None:
        """Give up the step in progress: what is reduced next is of another attempt."""
        if self._calls:
            self._calls.clear()
            self._samples.clear()
            self._failures = Failures()
            self.compressor.meter.give_up()

    def rebind(self) -> None:
        """Use other settings from the next call on."""
        self.forget()
        self._binding = None
        self._labels = [self.compressor.parts.label_of(module.name) for module in self.modules]

    @torch.no_grad()
    def average(
        self, index: int, flat: torch.Tensor, out: torch.Tensor, group: Any, factor: float
    ) -> None:
        """Average a module's tensor over ranks, a collective.

        Args:
            index: The module.
            flat: What is averaged, 1-D; with shards, those of all ranks in their order.
            out: Receives the average, or this rank's shard of it; may be ``flat``.
            group: The process group.
            factor: Scale of the sum over ranks.
        """
        self.reconnect()
        check_supported(flat.device)
        world = self._world_of(group)
        if not self._calls:
            self._begin(world)
        binding = self._binding
        assert binding is not None
        module = self._noted(index, flat, world.size)
        self._calls[index] += 1
        self._attempts[index] += 1
        if self._is_sampled:
            self._draw(index, flat)
        ordered, parcel = self._parcel(index, flat, factor)
        meter = self.compressor.meter
        meter.add("coordinates", flat.numel(), index)
        meter.add("uncompressed_bytes", flat.nbytes, index)
        try:
            route = binding.exchange.average(parcel, ordered, ordered[: parcel.quantized])
            del ordered
            average = self._travelled(world, route, index)
        except PayloadError as error:
            self._failures.note(index, error)
            out.fill_(float("nan"))
            return
        quantized = parcel.quantized // (world.size if self._shards else 1)
        meter.look(average[:quantized], self.compressor.settings.bucket_size, index)
        averages = factor * world.size < 1 + 1e-6
        out.copy_(narrowed(average, quantized if averages else 0, out.dtype))
        if self._calls[index] == MANY_CALLS:
            logger.warning(
                "%s was reduced %d times since the last optimizer step: call finish() before each "
                "step of an optimizer that is no torch.optim.Optimizer",
                module.name,
                MANY_CALLS,
            )

    @torch.no_grad()
    def finish(self) -> None:
        """End a step, a collective; do nothing if nothing was reduced since the last one.

        Raises:
            PayloadError: A payload arrived corrupt, on any rank.
            RankMismatchError: Ranks have reduced different modules, or differ in the step.
        """
        if not self._calls:
            return
        world, compressor, step = self._world, self.compressor, self.compressor.step
        assert world is not None and self._binding is not None
        calls = sorted(self._calls.items())
        own = [step, compressor.codec.settings_fingerprint, zlib.crc32(repr(calls).encode())]
        failed, rows = self._failures.everywhere(world, f"{self._label}.corrupt", own)
        described = [
            {
                "the step": {"its number": str(int(step))},
                "settings": {"all of them": f"{int(settings):08x}"},
                "modules": {"those reduced": f"{int(modules):08x}"},
            }
            for step, settings, modules in rows
        ]
        cause = self._failures.first
        if mismatch := differences(described, range(len(described)), ADVICE):
            self.forget()
            raise RankMismatchError(mismatch) from cause
        if failed:
            self.forget()
            names = [f"rank {rank} ({self.modules[m].name})" for rank, m in failed.items()]
            raise PayloadError(
                f"step {step}: a payload arrived corrupt at {', '.join(names)}. No rank takes the "
                "optimizer's step: call zero_grad() and go on"
            ) from cause
        if self._is_sampled:
            compressor.updates.run(step, self._drawn, self._binding.sync(step), self._parts_sent())
        self._binding.layout = self._laid_out()
        compressor.step += 1
        self._calls.clear()
        self._attempts.clear()
        self._samples.clear()
        compressor.meter.finish()
        self._binding.monitored.step_ended(self._binding, step, self._binding.layout, self._device)

    @property
    def place(self) -> tuple[int, int]:
        """Return this rank and the number of ranks that exchange; of all ranks if not known yet."""
        known = self._world
        return (
            (dist.get_rank(), dist.get_world_size()) if known is None else (known.rank, known.size)
        )

    def states_of_ranks(self) -> list[dict[str, Any]]:
        """Return the states on all ranks, a collective; before the first call this one alone."""
        own = self.compressor.state_dict()
        return [own] if self._world is None else self._world.gather_objects(own)

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
        compressor.begin_step()
        step = compressor.step
        if self._binding is None:
            self._binding = Groups(compressor, world, self._label)
            if self._shards:
                self._binding.exchange = ShardReduce(Place(world.size, world.rank))
        if not self._shards:
            self._binding.parts = self._parts_sent(everywhere=True)
            self._binding.prepare(step)
        compressor.updates.due(step)  # once a step, whatever it returns
        self._is_sampled = compressor.updates.needs_samples(step)
        if self._is_sampled or step == compressor.settings.warmup_steps:
            world.forget_lengths()

    def _noted(self, index: int, flat: torch.Tensor, ranks: int) -> ShardedModule:
        """Note what a module reduces."""
        module, part = self.modules[index], self._labels[index]
        settings = self.compressor.settings
        rows = ranks if self._shards else 1
        module.length = flat.numel() // rows
        self._device = flat.device
        per_row = settings.quantized_part(module.length)
        if part is None or flat.numel() < settings.min_numel:
            per_row = 0
        quantized = rows * per_row
        pieces = (Piece(index, 0, flat.numel(), 0),)
        full = flat.numel() - quantized
        module.group = Group(flat.dtype, quantized, full, pieces, (part or "") if per_row else "")
        return module

    def _parcel(self, index: int, flat: torch.Tensor, factor: float) -> tuple[torch.Tensor, Parcel]:
        """Return the coordinates, those in full precision last, and their parcel."""
        compressor, module = self.compressor, self.modules[index]
        settings, group = compressor.settings, module.group
        warm = compressor.step < settings.warmup_steps
        quantized = 0 if warm else group.quantized
        rows = flat.view(-1, module.length)
        per_row = quantized // len(rows)
        if 0 < per_row < module.length and len(rows) > 1:
            flat = torch.cat([rows[:, :per_row].reshape(-1), rows[:, per_row:].reshape(-1)])
        described = (module.name, flat.numel(), quantized, str(flat.dtype), self._shards)
        digest = hashlib.sha256(repr(described).encode()).digest()
        number = group_number(index, self._attempts[index] - 1)
        assert self._binding is not None
        return flat, Parcel(
            codec=compressor.part(group.part),
            dtype=flat.dtype,
            quantized=quantized,
            full=flat.numel() - quantized,
            device=flat.device,
            stream=RandomStream(compressor.instance, settings.seed, compressor.step, number),
            factor=factor,
            layout=int.from_bytes(digest[:8], "little"),
            index=index,
            meter=compressor.meter,
        )

    def _travelled(self, world: TorchWorld, route: Route, index: int) -> torch.Tensor:
        """Return the result of a route, whose collectives are performed one after the other."""
        meter, stage = self.compressor.meter, 0
        request = next(route)
        while True:
            meter.add("wire_bytes", request.sent_bytes(world.rank, world.size), index)
            with meter.time("exchange_s", index):
                handle = request.submit(world, f"{self._label}.{index}.stage{stage}")
                received = request.waiting().receive(world, handle)
            try:
                request, stage = route.send(received), stage + 1
            except StopIteration as ended:
                return ended.value

    def _draw(self, index: int, flat: torch.Tensor) -> None:
        """Keep buckets of a module, as many as its share of its part's coordinates."""
        module, settings = self.modules[index], self.compressor.settings
        group = module.group
        if not group.quantized:
            return
        same = [
            m.numel
            for m, label in zip(self.modules, self._labels, strict=True)
            if label == group.part
        ]
        most = self.compressor.part(group.part).adaptation.samples
        rows = flat.view(-1, module.length)[:, : group.quantized // (flat.numel() // module.length)]
        per_row = -(-rows.shape[1] // settings.bucket_size)
        total = per_row * len(rows)
        count = min(total, max(1, round(most * module.numel / max(1, sum(same)))))
        instance, step = self.compressor.instance, self.compressor.step
        world = self._world
        assert world is not None
        key = instance.key(settings.seed, world.rank, step, Use.SAMPLE)
        inside = (index << 32) + self._attempts[index]
        draw = np.random.Generator(np.random.Philox(key=key + (inside << 64)))
        chosen = np.sort(draw.choice(total, count, replace=False)).tolist()
        buckets = [
            rows[place // per_row].split(settings.bucket_size)[place % per_row].float().clone()
            for place in chosen
        ]
        self._samples.setdefault(group.part, []).append((buckets, total / count, group))

    def _drawn(self, count: int, part: str) -> Sample:
        """Return the buckets of a part; each weighs as many as it stands for, 1 on average."""
        kept = self._samples.get(part, [])
        drawn = sum(len(buckets) for buckets, _, _ in kept)
        total = sum(len(buckets) * weight for buckets, weight, _ in kept)
        sample = Sample()
        for buckets, weight, group in kept:
            for bucket in buckets:
                sample.add(bucket, weight * drawn / total, group)
        return sample

    def _parts_sent(self, everywhere: bool = False) -> list[str]:
        """Return labels of parts that quantise anything in this step, or in all modules."""
        if everywhere:
            return list(dict.fromkeys(p for p in self._labels if p is not None)) or [""]
        sent = (self.modules[index].group for index in sorted(self._calls))
        return list(dict.fromkeys(group.part for group in sent if group.quantized)) or [""]

    def _laid_out(self) -> Layout:
        """Return the layout of what modules have reduced so far."""
        members = [
            Member(m.name, (sum(p.numel for p in m.group.pieces),), m.group.dtype, part)
            for m, part in zip(self.modules, self._labels, strict=True)
        ]
        groups = [
            m.group if m.group.pieces else Group(m.group.dtype, pieces=(Piece(i, 0, 0, 0),))
            for i, m in enumerate(self.modules)
        ]
        digest = hashlib.sha256(repr(groups).encode()).digest()
        return Layout(members, groups, int.from_bytes(digest[:8], "little"))
