"""Exchange: how the ranks' payloads of a group become everybody's average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from hvd_adaptive.coding.header import Frame
from hvd_adaptive.coding.payload import Encoded
from hvd_adaptive.coding.sendable import Sendable
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.finite import narrowed
from hvd_adaptive.transport.collectives import Collective

if TYPE_CHECKING:
    from hvd_adaptive.exchange.staged_codec import StagedCodec
    from hvd_adaptive.layout import Group
    from hvd_adaptive.transport.world import World

# What ``encode`` makes; a Sendable is an empty part, or one that travels as it is.
Outgoing = Encoded | Sendable

# Yields what to do together, gets back what was received, returns the group's average.
Route = Generator[Collective, list[torch.Tensor], torch.Tensor]


class FailedElsewhereError(PayloadError):
    """Another rank could not read what it received; its own error says more."""


def memory_of(outgoing: Outgoing) -> Sendable:
    """The bytes that travel."""
    return outgoing.memory if isinstance(outgoing, Encoded) else outgoing


def payloads_of(sent: Sequence[Outgoing]) -> list[Encoded]:
    """Without empty parts."""
    return [part for part in sent if isinstance(part, Encoded)]


def _new_memory(
    use: str, coordinates: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty(coordinates, dtype=dtype, device=device)


@dataclass(frozen=True)
class Shipment:
    """A group on its way.

    codec: of the group's part.  quantized, full: coordinates; the quantised ones come first.
    layout: fingerprint that payloads carry.
    count: told the bytes of payloads that this rank encoded from its gradients.
    measure: called with the values that this rank quantises, and None; or with the values that it
    sends in plain numbers instead of payloads, and the dtype of these numbers.
    key: a rank's key of random numbers for this group, step and attempt; keys: those that it may
    have, where that is more than one.
    factor: what a sum over ranks is multiplied with; asked when everything has been sent.
    time: adds the seconds spent inside to a field of the step's figures.
    memory: for so many coordinates of a dtype on a device, holding anything. It is lent until the
    exchange's next collective: then another group may use it for the same. That of a "result" may
    be the gradient's own, so that it is asked for once the group's payloads are made.
    """

    codec: StagedCodec
    dtype: torch.dtype
    quantized: int
    full: int
    layout: int
    key: Callable[[int], int]
    factor: Callable[[], float]
    time: Callable[[str], AbstractContextManager]
    count: Callable[[int], None]
    memory: Callable[[str, int, torch.dtype, torch.device], torch.Tensor] = _new_memory
    keys: Callable[[int], Iterable[int]] | None = None
    measure: Callable[[torch.Tensor, torch.dtype | None], None] = lambda values, dtype: None

    def is_from(self, rank: int, key: int, of: Callable[[int], int] = int) -> bool:
        """Whether a payload's ``key`` is one that ``rank`` may have; ``of`` derives it from the
        group's."""
        keys = (self.key(rank),) if self.keys is None else self.keys(rank)
        return any(of(known) == key for known in keys)

    def frame(self, quantized: int, full: int) -> Frame:
        """Of a payload of so many of its coordinates."""
        return Frame(quantized + full, full, self.dtype, self.layout)

    def wide(self, use: str, coordinates: int, device: torch.device) -> torch.Tensor:
        """Memory in float32; float64 where that is the group's dtype."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.memory(use, coordinates, dtype, device)

    def narrowed(self, wide: torch.Tensor, quantized: int, ranks: int) -> torch.Tensor:
        """What came back from ``ranks`` ranks, in the group's dtype: averages as finite.narrowed
        has it, sums as they are. ``wide`` may change."""
        averages = self.factor() * ranks < 1 + 1e-6
        return narrowed(wide, quantized if averages else 0, self.dtype)

    def empty_result(self, device: torch.device) -> torch.Tensor:
        """For the whole group; holding anything."""
        return self.wide("result", self.quantized + self.full, device)


class Share(NamedTuple):
    """A rank's share of a group: it quantises coordinates ``begin`` to ``end`` of a mean.

    members: The ranks whose mean it is, ascending. Each of them has a share of the same mean.
    """

    members: Sequence[int]
    begin: int
    end: int


@dataclass(frozen=True)
class Place:
    """Rank ``rank`` of ``ranks``; nodes: of each rank, the node that it runs on, where known."""

    ranks: int
    rank: int
    nodes: tuple[int, ...] = ()


class Exchange(ABC):
    """A way to exchange groups between ranks, seen from one of them.

    Knows no Horovod: what it wants done together it yields, so that a simulation of all ranks runs
    the same code.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.ranks, self.rank = place, place.ranks, place.rank

    @property
    def settled(self) -> bool:
        """Whether it knows all it must know; if not, ``settle`` comes before the first group."""
        return True

    def settle(  # noqa: B027
        self, world: World, compressor: StagedCodec, name: str, device: torch.device
    ) -> None:
        """Find out, together with the other ranks, who agree on everything by now.

        name: begins the names of its collectives.  device: where gradients are.
        """

    def arrange(self, groups: Sequence[Group]) -> None:  # noqa: B027
        """Change which coordinates of a layout's groups are quantised, once it is settled."""

    def prepare(  # noqa: B027
        self, compressor: StagedCodec, labels: Sequence[str], step: int
    ) -> None:
        """Before ``step`` is asked for an update, once it is settled: make what the parts' codecs
        need besides themselves."""

    def share(self, rank: int, quantized: int, full: int, bucket_size: int) -> Share:
        """Return the share of ``rank``, this one or a rank of its node, of a group.

        quantized, full: The group's quantised and full-precision coordinates.
        """
        return Share((rank,), 0, quantized)

    def choice(self, coordinates: int) -> str | None:
        """What a group of so many coordinates travels by, where that was found out."""
        return None

    @abstractmethod
    def in_flight_bytes(
        self, codec: StagedCodec, quantized: int, full: int, dtype: torch.dtype
    ) -> int:
        """Memory that a group's exchange holds at most, and no less than any of its collectives;
        the same on every rank."""

    def working_bytes(self, codec: StagedCodec, quantized: int, full: int) -> int:
        """Memory besides payloads and result that a group takes while one of its collectives'
        results is worked on."""
        return 0

    def goes_on_early(self, coordinates: int) -> bool:
        """Whether a group of so many coordinates has a second stage, its last, that may be sent as
        soon as the first one is there, while other groups are not even launched."""
        return False

    @abstractmethod
    def encode(
        self, shipment: Shipment, flat: torch.Tensor, values: torch.Tensor
    ) -> list[Outgoing]:
        """What the group sends first, in the order of its coordinates; together they cover all.
        Payloads, or empty parts, where there is error feedback.

        flat: the group, in its dtype.  values: what is encoded in place of the quantised ones.
        Both are lent until this returns.
        """

    @abstractmethod
    def route(self, shipment: Shipment, sent: Sequence[Outgoing]) -> Route:
        """Exchange what ``encode`` made; returns the average (or sum), in the group's dtype, the
        same bits on every rank. PayloadError if a payload arrived corrupt, perhaps on this rank
        alone: only after the last of its collectives, since other ranks wait for each."""
