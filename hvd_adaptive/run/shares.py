"""Samples of what is quantised, where that is not each rank's own gradient but a node's mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from hvd_adaptive.adapt.statistics import Sample
from hvd_adaptive.exchange.exchange import Exchange, Share
from hvd_adaptive.layout import Group
from hvd_adaptive.run.samples import draw_buckets

logger = logging.getLogger("hvd_adaptive")

FlatOf = Callable[[Group], torch.Tensor]


class Shares:
    """What a rank quantises of the groups of one part, and the buckets that it draws from that.

    With exchange="hierarchical" ranks of a node quantise its mean, each a slice (Exchange.share).
    Tables are fitted before a step's gradients travel, so the means are not there yet. A rank draws
    buckets from its slice alone; all of its node know which, since keys are known, and send it
    theirs of the same coordinates. So what is fitted to are buckets of this step's means, and no
    other coordinate travels twice. A rank whose slices are empty draws none.

    members: ranks whose gradients are averaged, this one's among them, ascending.
    key_of: a rank's key of draws, for ``samples.draw_buckets``.
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
        known = (self._share(own, group).members for group in self._groups)
        self.members: list[int] = sorted({own}.union(*known))

    def draw(self, rank: int, flat_of: FlatOf) -> Sample:
        """The buckets that ``rank``, a member, draws, of what ``flat_of`` says groups hold."""

        def bounds_of(group: Group) -> tuple[int, int]:
            share = self._share(rank, group)
            return share.begin, share.end

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

    def shared(self, drawn: Sample) -> torch.Tensor:
        """Of drawn buckets those of which a mean is quantised, end to end; float32."""
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
        wanted = sum(drawn[place].numel() for place in self._places(drawn))
        if any(of_member.numel() != wanted for of_member in received):
            logger.warning("samples for a fit arrived damaged, and are left out")
            return Sample()
        total = torch.zeros_like(received[0])
        for of_member in received:
            total += of_member
        total *= 1.0 / len(received)
        places = self._places(drawn)
        means = total.split([drawn[place].numel() for place in places])
        for place, mean in zip(places, means, strict=True):
            drawn[place] = mean
        return drawn

    def _places(self, drawn: Sample) -> list[int]:
        return [
            place
            for place, group in enumerate(drawn.groups)
            if len(self._share(self._exchange.rank, group).members) > 1
        ]

    def _factor(self, rank: int) -> float:
        """What weights of ``rank``'s draw are multiplied with. Slices may hold different numbers of
        buckets, and ``draw_buckets`` makes weights 1 on average whatever these are: a rank that
        draws n of N buckets stands for N/n each."""
        held = [self._buckets(member) for member in self.members]
        drawn = sum(min(self._count, buckets) for buckets in held)
        own = self._buckets(rank)
        return own / min(self._count, own) * drawn / sum(held) if own else 1.0

    def _buckets(self, rank: int) -> int:
        shares = [self._share(rank, group) for group in self._groups]
        return sum(-(-(share.end - share.begin) // self._bucket_size) for share in shares)

    def _share(self, rank: int, group: Group) -> Share:
        return self._exchange.share(rank, group.quantized, group.full, self._bucket_size)
