"""Draw the buckets to which a table is fitted: of a rank's own gradient, or of its node's mean."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvd_adaptive.adapt.statistics import Sample
from hvd_adaptive.coding.payload import OwnedBuffer
from hvd_adaptive.exchange.exchange import Exchange, OwnSlice
from hvd_adaptive.layout import Group
from hvd_adaptive.transport.collectives import AllToAll, Among
from hvd_adaptive.transport.world import World

logger = logging.getLogger("hvd_adaptive")

FlatOf = Callable[[Group], torch.Tensor]


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
    bounds_of: Callable[[Group], tuple[int, int]] = lambda group: (0, group.quantized),
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
        bucket_size: Coordinates of a bucket.
        count: Most buckets.
        key: 64 bits that select the random numbers; each part has its own.
        part: A part of the parameters.
        bounds_of: Function that returns the range of a group's coordinates that are drawn from:
            whole buckets, except for the last one.

    Returns:
        At most ``count`` buckets, as float32 copies, and their weights.
    """
    groups = [group for group in groups if group.part == part]
    bounds = [bounds_of(group) for group in groups]
    whole = [(end - begin) // bucket_size for begin, end in bounds]
    ends = [i for i, (begin, end) in enumerate(bounds) if (end - begin) % bucket_size]
    draw = np.random.Generator(np.random.Philox(key=key + (zlib.crc32(part.encode()) << 64)))
    full, partial, weights = _draw(sum(whole), len(ends), count, draw)
    with_partial = {ends[index] for index in partial.tolist()}
    drawn = Sample()
    for place, (group, available) in enumerate(zip(groups, whole, strict=True)):
        inside = full[full < available].tolist()
        if inside or place in with_partial:
            begin, end = bounds[place]
            buckets = flat_of(group)[begin:end].split(bucket_size)
            for index in inside:
                drawn.add(buckets[index].to(torch.float32, copy=True), weights[0], group)
            if place in with_partial:
                drawn.add(buckets[-1].to(torch.float32, copy=True), weights[1], group)
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


class Draws:
    """Draw buckets from what a rank quantises of the groups of one part.

    With exchange="hierarchical" the ranks of a node quantise its mean, each a slice of it
    (Exchange.own_slice). Tables are fitted before the step's gradients are exchanged, so the means
    do not exist yet. A rank draws buckets from its own slices. The other ranks of its node compute
    the same draw, since keys are known (``key_of`` a rank), and send it their values of these
    buckets. A rank with empty slices draws no bucket.

    Attributes:
        members: Ranks whose gradients are averaged, including this one, ascending.
    """

    def __init__(
        self,
        exchange: Exchange,
        groups: Sequence[Group],
        *,
        bucket_size: int,
        count: int,
        key_of: Callable[[int], int],
        part: str = "",
    ) -> None:
        self._exchange, self._bucket_size, self._count = exchange, bucket_size, count
        self._groups = [group for group in groups if group.part == part]
        self._key_of, self._part = key_of, part
        own = exchange.rank
        known = (self._slice_of(own, group).members for group in self._groups)
        self.members: list[int] = sorted({own}.union(*known))

    def draw(self, rank: int, flat_of: FlatOf) -> Sample:
        """Return the buckets that ``rank``, a member, draws; ``flat_of`` gives a group's values."""

        def bounds_of(group: Group) -> tuple[int, int]:
            own = self._slice_of(rank, group)
            return own.begin, own.end

        drawn = draw_buckets(
            self._groups,
            flat_of,
            bucket_size=self._bucket_size,
            count=self._count,
            key=self._key_of(rank),
            part=self._part,
            bounds_of=bounds_of,
        )
        if len(self.members) > 1:
            factor = self._factor(rank)
            drawn.weights = [factor * weight for weight in drawn.weights]
        return drawn

    def among_members(
        self, flat_of: FlatOf, world: World, name: str, device: torch.device
    ) -> Sample:
        """Return this rank's draw; with several members this is a collective of all ranks."""
        drawn = {member: self.draw(member, flat_of) for member in self.members}
        own = drawn[world.rank]
        if len(drawn) == 1:
            return own
        parts = [OwnedBuffer.copy_of(self.shared(of), device) for of in drawn.values()]
        request = Among(self.members, AllToAll(parts), world.size, local=True)
        handle = request.submit(world, name)
        world.wait_until_there(handle, name, "parts")
        received = request.receive(world, handle)
        whole = [part[: part.numel() // 4 * 4].clone().view(torch.float32) for part in received]
        return self.averaged(own, whole)

    def shared(self, drawn: Sample) -> torch.Tensor:
        """Return the drawn buckets whose mean is quantised, end to end; float32."""
        buckets = [drawn[index] for index in self._places(drawn)]
        return torch.cat(buckets) if buckets else torch.zeros(0, dtype=torch.float32, device="cpu")

    def averaged(self, drawn: Sample, received: Sequence[torch.Tensor]) -> Sample:
        """Return this rank's draw with means in place of gradients: the sums that the exchange
        makes.

        If a message arrived damaged, the draw is empty: the other ranks' samples are enough for a
        fit. ``received`` are ``shared`` of the same buckets from each member, in order; float32.
        """
        places = self._places(drawn)
        sizes = [drawn[place].numel() for place in places]
        if any(of_member.numel() != sum(sizes) for of_member in received):
            logger.warning("samples for a fit arrived damaged, and are left out")
            return Sample()
        total = torch.zeros_like(received[0])
        for of_member in received:
            total += of_member
        total *= 1.0 / len(received)
        for place, mean in zip(places, total.split(sizes), strict=True):
            drawn[place] = mean
        return drawn

    def _places(self, drawn: Sample) -> list[int]:
        """Return the indices of drawn buckets whose mean is quantised."""
        return [
            place
            for place, group in enumerate(drawn.groups)
            if len(self._slice_of(self._exchange.rank, group).members) > 1
        ]

    def _factor(self, rank: int) -> float:
        """Return the factor of the weights of ``rank``'s draw: slices may hold different numbers of
        buckets, each of n drawn from N represents N/n, and ``draw_buckets`` returns weights of mean
        1.
        """
        held = [self._buckets(member) for member in self.members]
        drawn = sum(min(self._count, buckets) for buckets in held)
        own = self._buckets(rank)
        return own / min(self._count, own) * drawn / sum(held) if own else 1.0

    def _buckets(self, rank: int) -> int:
        slices = [self._slice_of(rank, group) for group in self._groups]
        return sum(-(-(own.end - own.begin) // self._bucket_size) for own in slices)

    def _slice_of(self, rank: int, group: Group) -> OwnSlice:
        return self._exchange.own_slice(rank, group, self._bucket_size)
