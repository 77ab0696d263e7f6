"""Define Exchange, the base of all ways from ranks' payloads to averages."""

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
    from hvd_adaptive.adapt.updates import Updates
    from hvd_adaptive.exchange.staged_codec import StagedCodec
    from hvd_adaptive.layout import Group
    from hvd_adaptive.transport.world import World

# Result of ``encode``; a Sendable is an empty part, or one that is sent without a header.
Outgoing = Encoded | Sendable

# Yields collectives, receives their results, and returns the group's average.
Route = Generator[Collective, list[torch.Tensor], torch.Tensor]


class FailedElsewhereError(PayloadError):
    """Another rank could not read a payload; the error on that rank has the details."""


def memory_of(outgoing: Outgoing) -> Sendable:
    """Return the memory that is sent."""
    return outgoing.memory if isinstance(outgoing, Encoded) else outgoing


def payloads_of(sent: Sequence[Outgoing]) -> list[Encoded]:
    """Return the payloads without empty parts."""
    return [part for part in sent if isinstance(part, Encoded)]


def _new_memory(
    use: str, coordinates: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty(coordinates, dtype=dtype, device=device)


@dataclass(frozen=True)
class Shipment:
    """A group that is exchanged, and functions of its step.

    Attributes:
        codec: Codec of the group's part.
        dtype: Dtype of the group.
        quantized: Number of quantised coordinates, which come first.
        full: Number of full-precision coordinates.
        layout_fingerprint: Fingerprint of the layout, for payloads' headers.
        key: Function that returns a rank's key of random numbers for this group, step and attempt.
        factor: Function that returns the scale of sums over ranks; called after everything was
            sent.
        time: Context manager that adds its duration to a field of the step's figures.
        count: Function that records the bytes of payloads encoded from this rank's gradients.
        memory: Function (use, coordinates, dtype, device) that returns uninitialised memory. The
            memory may be used until the exchange's next collective; then another group may use it.
            The memory of a "result" may be the gradient's own, so call it only after the group's
            payloads are encoded.
        keys: Function that returns all keys that a rank may use, if there are several.
        measure: Function that records quantisation errors. It is called with the values that this
            rank quantises and None, or with the values that it sends as plain numbers and the dtype
            of these numbers.
    """

    codec: StagedCodec
    dtype: torch.dtype
    quantized: int
    full: int
    layout_fingerprint: int
    key: Callable[[int], int]
    factor: Callable[[], float]
    time: Callable[[str], AbstractContextManager]
    count: Callable[[int], None]
    memory: Callable[[str, int, torch.dtype, torch.device], torch.Tensor] = _new_memory
    keys: Callable[[int], Iterable[int]] | None = None
    measure: Callable[[torch.Tensor, torch.dtype | None], None] = lambda values, dtype: None

    def is_from(self, rank: int, key: int, of: Callable[[int], int] = int) -> bool:
        """Return whether ``rank`` may use ``key``, or ``of`` a key of the group."""
        keys = (self.key(rank),) if self.keys is None else self.keys(rank)
        return any(of(known) == key for known in keys)

    def frame(self, quantized: int, full: int) -> Frame:
        """Return the frame of a payload of these numbers of coordinates."""
        return Frame(quantized + full, full, self.dtype, self.layout_fingerprint)

    def wide(self, use: str, coordinates: int, device: torch.device) -> torch.Tensor:
        """Return memory in float32, or in float64 if that is the group's dtype."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.memory(use, coordinates, dtype, device)

    def narrowed(self, wide: torch.Tensor, quantized: int, ranks: int) -> torch.Tensor:
        """Return the result of ``ranks`` ranks in the group's dtype; ``wide`` may change.

        Averages are converted by finite.narrowed; sums are not limited.
        """
        averages = self.factor() * ranks < 1 + 1e-6
        return narrowed(wide, quantized if averages else 0, self.dtype)

    def empty_result(self, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory for the whole group."""
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
    """Position of a rank.

    Attributes:
        ranks: Number of ranks.
        rank: This rank.
        nodes: The node of each rank, or () if unknown.
    """

    ranks: int
    rank: int
    nodes: tuple[int, ...] = ()


class Exchange(ABC):
    """A way to exchange groups between ranks, on one rank.

    It does not depend on Horovod: it yields collectives, so that the simulation of all ranks runs
    the same code.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.ranks, self.rank = place, place.ranks, place.rank

    @property
    def is_set_up(self) -> bool:
        """Return whether ``set_up`` has been called or is not needed."""
        return True

    def set_up(  # noqa: B027
        self, world: World, compressor: StagedCodec, name: str, device: torch.device
    ) -> None:
        """Detect or measure what the exchange depends on, together with the other ranks.

        The ranks have compared their settings and layouts before.

        Args:
            world: The ranks.
            compressor: The default part's codec.
            name: Beginning of the names of collectives.
            device: Device of the gradients.
        """

    def log_choices(self, groups: Sequence[Group]) -> None:  # noqa: B027
        """Log how each of a layout's groups is sent, if that is measured; after ``set_up``."""

    def quantized(self, group: Group) -> int:
        """Return how many of a group's coordinates are quantised, the first ones; after ``set_up``.

        They are none if the exchange sends the group in full precision.
        """
        return group.quantized

    def parts_among(self, groups: Iterable[Group]) -> list[str]:
        """Return labels of the parts that quantise anything in ``groups``, in order; or [""]."""
        return list(dict.fromkeys(g.part for g in groups if self.quantized(g))) or [""]

    def prepare(self, updates: Updates, labels: Sequence[str], step: int) -> None:  # noqa: B027
        """Make the parts' second stages, after ``set_up`` and before ``step`` updates tables."""

    def share(self, rank: int, group: Group, bucket_size: int) -> Share:
        """Return the share of ``rank``, this one or a rank of its node, of a group."""
        return Share((rank,), 0, self.quantized(group))

    def choice(self, coordinates: int) -> str | None:
        """Return the exchange that was chosen for a group of this size, or None."""
        return None

    @abstractmethod
    def in_flight_bytes(
        self, codec: StagedCodec, quantized: int, full: int, dtype: torch.dtype
    ) -> int:
        """Return the most bytes that a group's exchange holds, the same on every rank.

        The result is at least the size of each of its collectives.
        """

    def working_bytes(self, codec: StagedCodec, quantized: int, full: int) -> int:
        """Return the bytes for processing a collective's result, besides payloads and result."""
        return 0

    def stages(self, coordinates: int) -> int | None:
        """Return the number of a group's collectives if it may go on before other groups start.

        It is 1 or 2. None if the group must wait for groups that were launched before it.
        """
        return None

    @abstractmethod
    def encode(
        self, shipment: Shipment, flat: torch.Tensor, values: torch.Tensor
    ) -> list[Outgoing]:
        """Encode the group's first messages, in the order of its coordinates.

        With error feedback each is a payload or empty.

        Args:
            shipment: The group.
            flat: Its coordinates, in its dtype; valid during this call.
            values: Encoded in place of the quantised coordinates; valid during this call.

        Returns:
            Messages that together contain all coordinates.
        """

    @abstractmethod
    def route(self, shipment: Shipment, sent: Sequence[Outgoing]) -> Route:
        """Exchange the messages of ``encode``.

        Returns:
            The average (or sum) in the group's dtype, the same bits on every rank.

        Raises:
            PayloadError: A payload arrived corrupt, perhaps on this rank alone. It is raised after
                the group's last collective, because other ranks wait for each of them.
        """
