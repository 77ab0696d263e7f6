"""Sample what a rank quantises: its own gradient or a slice of its node's mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from hvd_adaptive.adapt.statistics import Sample
from hvd_adaptive.coding.owned_buffer import OwnedBuffer
from hvd_adaptive.exchange.exchange import Exchange, OwnSlice
from hvd_adaptive.layout import Group
from hvd_adaptive.run.samples import draw_buckets
from hvd_adaptive.transport.collectives import AllToAll, Among
from hvd_adaptive.transport.world import World

logger = logging.getLogger("hvd_adaptive")

FlatOf = Callable[[Group], torch.Tensor]


class Draws:
    """Draw buckets from what a rank quantises of the groups of one part.

    With exchange="hierarchical" the ranks of a node quantise its mean, each a slice of it
    (Exchange.own_slice). Tables are fitted before the step's gradients are exchanged, so the means
    do not exist yet. A rank draws buckets from its own slices. The other ranks of its node compute
    the same draw, since keys are known, and send it their values of these buckets. Tables are
    therefore fitted to buckets of this step's means. A rank with empty slices draws no bucket.

    Args:
        exchange: This rank's exchange.
        groups: Groups that are sent in this step.
        bucket_size: Coordinates of a bucket.
        count: Most buckets that a rank draws.
        key_of: Returns a rank's key of draws, for ``samples.draw_buckets``.
        part: Label of the part.

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
        """Return this rank's draw; with several members this is a collective of all ranks.

        Args:
            flat_of: Gives a group's values on this rank.
            world: The ranks.
            name: Name of the collective.
            device: Device of what is sent.
        """
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
        """Return this rank's draw with means in place of gradients.

        The means are the sums that the exchange makes. If a message arrived damaged, the draw is
        empty: the other ranks' samples are enough for a fit.

        Args:
            drawn: This rank's draw.
            received: ``shared`` of the same buckets from each member, in order; float32.
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
        """Return the factor of the weights of ``rank``'s draw.

        Slices may hold different numbers of buckets, but ``draw_buckets`` returns weights of mean
        1. Each of n buckets drawn from N represents N/n buckets.
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
