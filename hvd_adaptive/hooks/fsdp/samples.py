"""Buckets of the modules of a step, to which tables are fitted at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hvd_adaptive.adapt.statistics import Sample
from hvd_adaptive.base.streams import Use
from hvd_adaptive.hooks.fsdp.modules import ShardedModules
from hvd_adaptive.layout import Group

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor


class ModuleSamples:
    """The buckets of one step, by part.

    Args:
        compressor: The compressor.
        modules: The modules.
    """

    def __init__(self, compressor: GradientCompressor, modules: ShardedModules) -> None:
        self._compressor, self._modules = compressor, modules
        self._of: dict[str, list[tuple[list[torch.Tensor], float, Group]]] = {}

    def clear(self) -> None:
        """Forget all buckets."""
        self._of.clear()

    def draw(self, index: int, flat: torch.Tensor, rank: int, call: int) -> None:
        """Keep copies of buckets of a module: its share of those of its part.

        Args:
            index: The module.
            flat: What it reduces, the shards of all ranks in their order. No bucket has coordinates
                of two shards.
            rank: This rank.
            call: Number of the call among those of the module in this step, from 1.
        """
        compressor, module = self._compressor, self._modules[index]
        settings, group = compressor.settings, module.group
        most = compressor.part(group.part).adaptation.samples
        rows = flat.view(-1, module.length)[:, : group.quantized // (flat.numel() // module.length)]
        per_row = -(-rows.shape[1] // settings.bucket_size)
        total = per_row * len(rows)
        count = min(total, max(1, self._modules.portion(index, most)))
        key = compressor.instance.key(settings.seed, rank, compressor.step, Use.SAMPLE)
        inside = (index << 32) + call
        draw = np.random.Generator(np.random.Philox(key=key + (inside << 64)))
        chosen = np.sort(draw.choice(total, count, replace=False)).tolist()
        buckets = [
            rows[place // per_row].split(settings.bucket_size)[place % per_row].float().clone()
            for place in chosen
        ]
        self._of.setdefault(group.part, []).append((buckets, total / count, group))

    def drawn(self, count: int, part: str) -> Sample:
        """Return the buckets of a part; each weighs as many as it stands for, 1 on average."""
        kept = self._of.get(part, [])
        drawn = sum(len(buckets) for buckets, _, _ in kept)
        total = sum(len(buckets) * weight for buckets, weight, _ in kept)
        sample = Sample()
        for buckets, weight, group in kept:
            for bucket in buckets:
                sample.add(bucket, weight * drawn / total, group)
        return sample
