"""Describe the modules that FSDP2 shards: which of their coordinates are quantised, and how."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hvd_adaptive.adapt.statistics import Sample
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.exchange.parcel import Parcel, RandomStream
from hvd_adaptive.kernels.random import Use, group_number
from hvd_adaptive.layout import Group, Layout, Member, Piece, digest


@dataclass
class ShardedModule:
    """A module of the model.

    Attributes:
        numel: The number of its parameters' coordinates.
        padding: Coordinates of a shard, on average, that FSDP2 adds so that shards are equal.
        group: What it reduces; None until its first call.
        length: Coordinates of a shard, or of the tensor that is averaged.
    """

    name: str
    numel: int
    padding: float = 0.0
    group: Group = field(default_factory=lambda: Group(torch.float32))
    length: int = 0


class ShardedModules:
    """The modules of one model, by their index, and the part of the parameters that each is in.

    What a module reduces are the ``shards`` of all ranks; else one shard. ``buckets`` are those
    drawn in this step, by part: some of each call, and how many each of these stands for.
    """

    def __init__(
        self, compressor: GradientCompressor, modules: Sequence[ShardedModule], shards: bool
    ) -> None:
        self._compressor, self._modules, self._shards = compressor, list(modules), shards
        self.buckets: dict[str, list[tuple[list[torch.Tensor], float]]] = {}
        self.relabel()

    def __getitem__(self, index: int) -> ShardedModule:
        return self._modules[index]

    def relabel(self) -> None:
        """Find the modules' parts anew: settings have changed."""
        parts = self._compressor.parts
        self._labels = [parts.label_of(module.name) for module in self._modules]

    def note(self, index: int, flat: torch.Tensor, ranks: int) -> ShardedModule:
        """Note what a module reduces, and return the module."""
        module, part = self._modules[index], self._labels[index]
        settings = self._compressor.settings
        rows = ranks if self._shards else 1
        module.length = flat.numel() // rows
        per_row = settings.quantized_part(module.length)
        if part is None or flat.numel() < settings.min_numel:
            per_row = 0
        quantized = rows * per_row
        pieces = (Piece(index, 0, flat.numel(), 0),)
        full = flat.numel() - quantized
        module.group = Group(flat.dtype, quantized, full, pieces, (part or "") if per_row else "")
        return module

    def parcel(
        self, index: int, flat: torch.Tensor, factor: float, call: int
    ) -> tuple[torch.Tensor, Parcel]:
        """Return a module's coordinates, those in full precision last, and their parcel.

        Args:
            factor: Scale of the sum over ranks.
            call: Number of the call among those of the module in this step, from 0.
        """
        compressor, module = self._compressor, self._modules[index]
        settings, step, part = compressor.settings, compressor.step, module.group.part
        quantized = 0 if step < settings.warmup_steps else module.group.quantized
        described = (module.name, flat.numel(), quantized, str(flat.dtype), self._shards)
        number, group = compressor._training.instance.bind(), group_number(index, call)
        return _ordered(flat.view(-1, module.length), quantized), Parcel(
            codec=compressor.parts[part],
            dtype=flat.dtype,
            quantized=quantized,
            full=flat.numel() - quantized,
            device=flat.device,
            stream=RandomStream(number, settings.seed, step, group),
            factor=factor,
            layout=digest(described),
            index=index,
            meter=compressor._training.meter,
        )

    def _portion(self, index: int, of_part: int) -> int:
        """Return a module's portion of a number: its share of the coordinates of its part."""
        part = self._modules[index].group.part
        labelled = zip(self._modules, self._labels, strict=True)
        same = sum(module.numel for module, label in labelled if label == part)
        return round(of_part * self._modules[index].numel / max(1, same))

    def parts(self) -> list[str]:
        return list(dict.fromkeys(p for p in self._labels if p is not None)) or [""]

    def parts_of(self, indices: Collection[int]) -> list[str]:
        """Return the labels of the parts of which these modules quantise anything."""
        sent = (self._modules[index].group for index in sorted(indices))
        return list(dict.fromkeys(group.part for group in sent if group.quantized)) or [""]

    def layout(self) -> Layout:
        """Return the layout of what modules have reduced so far."""
        members = [
            Member(m.name, (sum(p.numel for p in m.group.pieces),), m.group.dtype, part)
            for m, part in zip(self._modules, self._labels, strict=True)
        ]
        groups = [
            m.group if m.group.pieces else Group(m.group.dtype, pieces=(Piece(i, 0, 0, 0),))
            for i, m in enumerate(self._modules)
        ]
        return Layout(members, groups, digest(groups))

    def draw(self, index: int, flat: torch.Tensor, rank: int, call: int) -> None:
        """Keep copies of buckets of a module: its share of those of its part.

        ``flat`` is what it reduces, the shards of all ranks in their order. No bucket has
        coordinates of two shards. ``call`` numbers the calls of the module in this step, from 1.
        """
        compressor, module = self._compressor, self[index]
        settings, group = compressor.settings, module.group
        most = compressor.parts[group.part].adaptation.samples
        rows = flat.view(-1, module.length)[:, : group.quantized // (flat.numel() // module.length)]
        per_row = -(-rows.shape[1] // settings.bucket_size)
        total = per_row * len(rows)
        count = min(total, max(1, self._portion(index, most)))
        key = compressor._training.instance.key(settings.seed, rank, compressor.step, Use.SAMPLE)
        inside = (index << 32) + call
        draw = np.random.Generator(np.random.Philox(key=key + (inside << 64)))
        chosen = np.sort(draw.choice(total, count, replace=False)).tolist()
        buckets = [
            rows[place // per_row].split(settings.bucket_size)[place % per_row].float().clone()
            for place in chosen
        ]
        self.buckets.setdefault(group.part, []).append((buckets, total / count))

    def drawn(self, count: int, part: str) -> Sample:
        """Return the buckets of a part; each weighs as many as it stands for, 1 on average."""
        kept = self.buckets.get(part, [])
        drawn = sum(len(buckets) for buckets, _ in kept)
        total = sum(len(buckets) * weight for buckets, weight in kept)
        sample = Sample()
        for buckets, weight in kept:
            for bucket in buckets:
                sample.add(bucket, weight * drawn / total)
        return sample


def _ordered(rows: torch.Tensor, quantized: int) -> torch.Tensor:
    """Return the coordinates of shards, one a row, those in full precision last."""
    per_row = quantized // len(rows)
    if 0 < per_row < rows.shape[1] and len(rows) > 1:
        return torch.cat([rows[:, :per_row].reshape(-1), rows[:, per_row:].reshape(-1)])
    return rows.view(-1)


def group_of_shards(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks among which a model is sharded; None, the default group, if unknown.

    Nothing is reduced of parameters that each rank has for itself.
    """
    groups = list(groups_of_shards(model))
    return next((g for g in groups if dist.get_world_size(g) > 1), groups[-1] if groups else None)


def groups_of_shards(model: nn.Module) -> Iterator[dist.ProcessGroup]:
    """Yield the groups of ranks among which parameters are sharded."""
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        for dim, placement in enumerate(getattr(parameter, "placements", ())):
            if placement.is_shard() or hasattr(placement, "split_factor"):
                yield mesh.get_group(dim)


def padding_of(parameter: Any, everywhere: bool) -> float:
    """Return the zeros that FSDP2 adds to this rank's shard, or ``everywhere``, on average."""
    shape, whole = list(parameter.shape), float(parameter.numel())
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return 0.0  # fully_shard was told to ignore it
    for size, placement in zip(mesh.shape, parameter.placements, strict=True):
        if placement.is_shard() or hasattr(placement, "split_factor"):
            shape[placement.dim] = -(-shape[placement.dim] // size)
            whole /= size
    return math.prod(shape) - (whole if everywhere else parameter.to_local().numel())
