"""Which buckets of a step's groups a table is fitted to."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvd_adaptive.fusion.layout import Group


def draw_buckets(
    groups: Sequence[Group],
    flat_of: Callable[[Group], torch.Tensor],
    *,
    bucket_size: int,
    count: int,
    key: int,
    part: str = "",
) -> list[torch.Tensor]:
    """Up to ``count`` full quantised buckets (float32 copies) of the groups of ``part``, drawn
    without replacement; the first shorter ones where none of these groups has a full one.

    flat_of: a group's coordinates, quantised ones first; asked only for groups that are drawn
        from, one at a time, and not read after the next call.
    key: names the random numbers (64 bits); each part has its own.
    """
    groups = [group for group in groups if group.part == part]
    whole = [group.quantized // bucket_size for group in groups]
    if not sum(whole):
        short = (flat_of(group)[: group.quantized] for group in groups if group.quantized)
        return [flat.to(torch.float32, copy=True) for flat in itertools.islice(short, count)]
    draw = np.random.Generator(np.random.Philox(key=key + (zlib.crc32(part.encode()) << 64)))
    chosen = np.sort(draw.choice(sum(whole), min(count, sum(whole)), replace=False))
    buckets: list[torch.Tensor] = []
    for group, available in zip(groups, whole, strict=True):
        inside = chosen[chosen < available].tolist()
        if inside:
            parts = flat_of(group)[: available * bucket_size].split(bucket_size)
            buckets += [parts[index].to(torch.float32, copy=True) for index in inside]
        chosen = chosen[len(inside) :] - available
    return buckets
