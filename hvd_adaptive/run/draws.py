"""Draw the buckets of a rank's gradient to which a table is fitted."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvd_adaptive.adapt.statistics import Sample
from hvd_adaptive.layout import Group

# Partial buckets are at least this share of a sample, if there are enough of them.
PARTIAL_SHARE = 0.25


def draw_buckets(
    groups: Sequence[Group],
    flat_of: Callable[[Group], torch.Tensor],
    *,
    bucket_size: int,
    count: int,
    key: int,
    part: str = "",
    quantized_of: Callable[[Group], int] = lambda group: group.quantized,
) -> Sample:
    """Draw quantised buckets without replacement, with weights that make sums over them unbiased.

    The error of a table is sum_n ||v_n||² sum_i psi(r_i) over all buckets n and their coordinates i
    (ALQ paper, Eqs 1, 2, 10). If each bucket is drawn with a known probability p_n and has the
    weight 1/p_n, the sum over the drawn buckets is unbiased (Horvitz and Thompson). Groups' partial
    buckets are few and often hold a network's last layer. They are drawn separately from the full
    ones, with a larger probability if they are rarer than ``PARTIAL_SHARE``.

    Args:
        groups: Groups; those of ``part`` are drawn from.
        flat_of: Function that returns a group's coordinates, quantised ones first. It is called
            only for groups that are drawn from, and the result is not read after the next call.
        count: Most buckets.
        key: 64 bits that select the random numbers; each part has its own.
        quantized_of: Function that returns the number of a group's quantised coordinates.

    Returns:
        At most ``count`` buckets, as float32 copies, and their weights.
    """
    groups = [group for group in groups if group.part == part]
    sizes = list(map(quantized_of, groups))
    whole = [size // bucket_size for size in sizes]
    ends = [place for place, size in enumerate(sizes) if size % bucket_size]
    draw = np.random.Generator(np.random.Philox(key=key + (zlib.crc32(part.encode()) << 64)))
    full, partial, weights = _draw(sum(whole), len(ends), count, draw)
    with_partial = {ends[index] for index in partial.tolist()}
    drawn = Sample()
    for place, (group, available) in enumerate(zip(groups, whole, strict=True)):
        inside = full[full < available].tolist()
        if inside or place in with_partial:
            buckets = flat_of(group)[: sizes[place]].split(bucket_size)
            for index in inside:
                drawn.add(buckets[index].to(torch.float32, copy=True), weights[0])
            if place in with_partial:
                drawn.add(buckets[-1].to(torch.float32, copy=True), weights[1])
        full = full[len(inside) :] - available
    return drawn


def _draw(
    full: int, partial: int, count: int, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """Return ascending indices of drawn full and partial buckets, and weights of mean 1 of both."""
    total = full + partial
    count = min(count, total)
    if count == 1 or not (full and partial):
        # One bucket can represent both kinds only if either could have been drawn.
        chosen = np.sort(draw.choice(total, count, replace=False)) if total else np.empty(0, int)
        return chosen[chosen < full], chosen[chosen >= full] - full, (1.0, 1.0)
    wanted = round(count * max(PARTIAL_SHARE, partial / total))
    of_partial = min(max(wanted, 1, count - full), partial, count - 1)
    of_full = count - of_partial
    weights = (full / of_full * count / total, partial / of_partial * count / total)
    chosen_full = np.sort(draw.choice(full, of_full, replace=False))
    chosen_partial = np.sort(draw.choice(partial, of_partial, replace=False))
    return chosen_full, chosen_partial, weights
