"""Define Exchange, a way from ranks' payloads to averages, its simplest kind, and Failures."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.coding.payload import payloads_in
from hvd_adaptive.exchange.parcel import Parcel
from hvd_adaptive.layout import Group
from hvd_adaptive.monitor import StepMeter
from hvd_adaptive.transport.collectives import AllGather, Collective, copies_sent
from hvd_adaptive.transport.world import World

# Yields collectives, receives their results, and returns the group's average.
Route = Generator[Collective, list[torch.Tensor], torch.Tensor]


class FailedElsewhereError(PayloadError):
    """Another rank could not read a payload; the error on that rank has the details."""


@dataclass(frozen=True)
class RankInfo:
    """Position of a rank; ``nodes`` holds the node of each rank, or () if unknown."""

    ranks: int
    rank: int
    nodes: tuple[int, ...] = ()


class Exchange(ABC):
    """A way to exchange groups between ranks, on one rank.

    It does not depend on Horovod: it yields collectives, so that the simulation of all ranks runs
    the same code.

    Attributes:
        is_set_up: ``set_up`` has been called, or is not needed.
        overlaps: A group has one or two collectives, and its second may be submitted before other
            groups start. Otherwise a group must wait for those that were launched before it.
        averages_of: Numbers of ranks, or nodes, whose averages are encoded again; after ``set_up``.
    """

    is_set_up = True
    overlaps = False
    averages_of: tuple[int, ...] = ()

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info, self.ranks, self.rank = rank_info, rank_info.ranks, rank_info.rank

    def set_up(  # noqa: B027
        self, world: World, compressor: Codec, name: str, device: torch.device
    ) -> None:
        """Detect or measure what the exchange depends on, together with the other ranks.

        The ranks have compared their settings and layouts before. ``compressor`` is the default
        part's codec; ``name`` begins the names of collectives.
        """

    def log_choices(  # noqa: B027
        self, groups: Sequence[Group], codecs: Mapping[str, Codec]
    ) -> None:
        """Log how each of a layout's groups is sent, if that is measured; after ``set_up``.

        Rank 0 warns if averages have an error that another setting avoids.
        """

    def quantized(self, group: Group) -> int:
        """Return how many of a group's coordinates are quantised, the first ones; after ``set_up``.
        They are none if the exchange sends the group in full precision.
        """
        return group.quantized

    def parts_among(self, groups: Iterable[Group]) -> list[str]:
        """Return labels of the parts that quantise anything in groups, in order; or [""]."""
        return list(dict.fromkeys(g.part for g in groups if self.quantized(g))) or [""]

    def choice(self, coordinates: int) -> str | None:
        """Return the exchange that was chosen for a group of this size, or None."""
        return None

    @abstractmethod
    def in_flight_bytes(self, codec: Codec, quantized: int, full: int, dtype: torch.dtype) -> int:
        """Return the most bytes that a group's exchange holds, the same on every rank, at least the
        size of each of its collectives.
        """

    def working_bytes(self, codec: Codec, quantized: int, full: int) -> int:
        """Return the bytes for processing a collective's result, besides payloads and result."""
        return 0

    @abstractmethod
    def collectives(self, coordinates: int) -> int:
        """Return the number of a group's collectives, the same on every rank."""

    @abstractmethod
    def average(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Yield a group's collectives, receive their results, and return the group's average.

        The first messages are encoded before the first collective is yielded. Implementations then
        delete ``flat`` and ``values``, so that no memory is kept while the collective is under way.

        Args:
            parcel: The group.
            flat: Its coordinates, in its dtype; valid until the first collective.
            values: Encoded in place of the quantised coordinates; valid until the first collective.

        Returns:
            The average (or sum) in the group's dtype, the same bits on every rank. Its memory may
            be borrowed (``Memory.result``).

        Raises:
            PayloadError: A payload arrived corrupt, perhaps on this rank alone. It is raised after
                the group's last collective, because other ranks wait for each of them.
        """


class AllgatherExchange(Exchange):
    """Send every rank's payload to every other rank, which decodes all: for few ranks."""

    overlaps = True

    def in_flight_bytes(self, codec: Codec, quantized: int, full: int, dtype: torch.dtype) -> int:
        # All ranks' payloads, and its own once more or, sent directly, for each of them.
        copies = self.ranks + copies_sent(self.ranks)
        return copies * codec.payloads.most_length(quantized, full, dtype)

    def collectives(self, coordinates: int) -> int:
        return 1

    def average(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Average a group as ``Exchange.average`` says.

        1. Encode the group.
        2. Send the payload to all ranks.
        3. Check that each rank's payload is of this group and step.
        4. Decode all payloads, and add them in rank order.
        """
        begin = time.perf_counter()
        payloads, key = parcel.codec.payloads, parcel.key(self.rank)
        payload = payloads.encode(flat, parcel.quantized, key, parcel.layout, values)
        parcel.encoded([payload], values, begin)
        del flat, values

        arrived = yield AllGather(payload.memory)

        received = list(payloads_in(arrived, range(self.ranks)))
        for rank, of_rank in enumerate(received):
            if of_rank.header.key != parcel.key(rank):
                raise PayloadError(f"rank {rank} sent a payload of another step or group")

        begin = time.perf_counter()
        out = parcel.empty_result()
        frame = parcel.frame(parcel.quantized, parcel.full)
        quantized, full = out[: parcel.quantized], out[parcel.quantized :]
        payloads.sum_into(received, frame, parcel.factor, quantized, full)
        result = parcel.narrowed(out, parcel.quantized, self.ranks)
        parcel.spent("decode_s", begin)
        return result


def carry_out(
    route: Route,
    world: World,
    name: str,
    meter: StepMeter | None = None,
    index: int = 0,
    before: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Return a route's result; its collectives are performed one by one, and waited for.

    ``before`` is called once the first message is encoded, before it is sent.
    """
    request, stage = next(route), 0
    if before is not None:
        before()
    while True:
        sent, begin = request.sent_bytes(world.rank, world.size), time.perf_counter()
        handle = request.submit(world, f"{name}.stage{stage}")
        received = request.waiting().receive(world, handle)
        if meter is not None:
            meter.add(index, wire_bytes=sent, exchange_s=time.perf_counter() - begin)
        try:
            request, stage = route.send(received), stage + 1
        except StopIteration as ended:
            return ended.value


# Most ranks that the error names.
MOST_NAMED = 8


@dataclass
class Failures:
    """Failures of one rank in one step.

    1. A rank that cannot read a payload records it, and takes part in the rest of the step, because
       the other ranks wait for it.
    2. After all groups are received and before the last gradient is returned, ranks exchange one
       number (``everywhere``). Either every rank completes the step or none does.

    These numbers are the step's last message. If it is corrupted, ranks may read it differently.
    """

    first: PayloadError | None = None  # the error to raise
    _number: int = 0

    def note(self, index: int, error: PayloadError) -> None:
        """Record that this rank, or another one, could not read a payload of group ``index``.
        Failures of this rank take precedence.
        """
        elsewhere = isinstance(error, FailedElsewhereError)
        if self.first is None or (self._number < 0 and not elsewhere):
            self.first, self._number = error, -1 - index if elsewhere else 1 + index

    def everywhere(
        self, ranks: int, gather: Callable[[torch.Tensor], torch.Tensor], more: Sequence[float] = ()
    ) -> tuple[dict[int, int], list[list[float]]]:
        """Return the groups that could not be read, by rank, and all ranks' ``more``, as many
        numbers on each; ``gather`` returns the tensors of all ranks, stacked.
        """
        numbers = torch.tensor(list(more), dtype=torch.float64, device="cpu")
        own = torch.cat([torch.tensor([self._number], device="cpu"), numbers.view(torch.int64)])
        everyone = gather(own) if ranks > 1 else own[None]
        rows = everyone[:, 1:].contiguous().view(torch.float64).tolist()
        of_ranks = everyone[:, 0].tolist()
        if not any(of_ranks):
            return {}, rows
        failed = {rank: number for rank, number in enumerate(of_ranks) if number}
        # Ranks that failed because of another rank are named only if no other rank is.
        origins = {rank: number for rank, number in failed.items() if number > 0} or failed
        return {rank: abs(number) - 1 for rank, number in origins.items()}, rows


def step_failed(number: int, failed: Mapping[int, int], labels: list[str]) -> PayloadError:
    """Return the error that every rank raises; ``labels`` are those of the groups."""
    named = [
        f"rank {rank} ({labels[group] if group < len(labels) else f'group {group}'})"
        for rank, group in failed.items()
    ]
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return PayloadError(
        f"step {number}: a payload arrived corrupt at {', '.join(named[:MOST_NAMED])}{more}. The "
        "step is given up on every rank; its gradients are lost, and are NaN now. No parameter has "
        "changed"
    )
