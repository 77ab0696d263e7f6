"""Exchange in full precision inside a node, and compressed between nodes.

1. The ranks of a node cut the group into one slice per rank (``scatter_reduce.cut``) and exchange
   the slices in full precision. Each rank averages its slice over the node in rank order, in
   float32 (float64 for float64).
2. Ranks with the same index in their nodes exchange this slice, compressed: by allgather if that
   sends less (two nodes), else by scatter_reduce. All ranks of a node work, each on its slice.
3. The ranks of a node exchange the results of their slices in full precision.

If all ranks share a node, nothing is compressed. If no ranks do, only step 2 remains.

Horovod's process sets are not used: they must be created in its ``init``, or in a mode that an
environment variable enables. A collective of some ranks is an alltoall of all ranks in which the
others send nothing (collectives.Among).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.coding.payload import OwnedBuffer
from hvd_adaptive.coding.zeros import most_section_bytes
from hvd_adaptive.exchange.exchange import (
    AllgatherExchange,
    Exchange,
    FailedElsewhereError,
    RankInfo,
    Route,
)
from hvd_adaptive.exchange.parcel import Parcel
from hvd_adaptive.exchange.scatter_reduce import Chunk, ScatterReduceExchange, cut
from hvd_adaptive.layout import Group
from hvd_adaptive.transport.collectives import AllGather, AllToAll, Among
from hvd_adaptive.transport.world import World, find_nodes

logger = logging.getLogger("hvd_adaptive")

# With more nodes, scatter_reduce sends less, although its averages have 1 to 3 bits more.
MOST_GATHERED = 2
# Most bytes of headers and scales that a rank adds.
HEADERS = 1024


@dataclass(frozen=True)
class Topology:
    """A rank's position in the nodes.

    Attributes:
        local: Ranks of this rank's node, ascending.
        index: This rank's index in ``local``.
        across: The rank with this index of each node.
        between: The exchange of these ranks.
    """

    local: Sequence[int]
    index: int
    across: Sequence[int]
    between: Exchange

    @property
    def is_alone(self) -> bool:
        """Return whether every rank has a node of its own, and there are several nodes."""
        return len(self.local) == 1 < len(self.across)

    @property
    def shares_one_node(self) -> bool:
        """Return whether all ranks share a node, so that nothing is compressed."""
        return len(self.across) == 1

    def inside(self, request: AllGather | AllToAll) -> Among:
        """Return a collective of the ranks of each node."""
        ranks = len(self.local) * len(self.across)
        return Among(self.local, request, ranks, local=True)


def find_topology(nodes: Sequence[int], rank: int) -> Topology:
    """Return the topology of ``rank``; ``nodes`` holds each rank's node."""
    names = sorted(set(nodes))
    members = [[r for r, of_rank in enumerate(nodes) if of_rank == node] for node in names]
    own = names.index(nodes[rank])
    index = members[own].index(rank)
    kind = AllgatherExchange if len(names) <= MOST_GATHERED else ScatterReduceExchange
    across = [of_node[index] for of_node in members]
    return Topology(members[own], index, across, kind(RankInfo(len(names), own)))


class HierarchicalExchange(Exchange):
    """Average inside nodes, exchange between nodes, and distribute inside nodes."""

    _topology: Topology  # after ``set_up``

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__(rank_info)
        self.is_set_up = False
        if rank_info.nodes:
            self._know(rank_info.nodes)

    def set_up(self, world: World, compressor: Codec, name: str, device: torch.device) -> None:
        nodes = find_nodes(world, name)
        if not nodes:
            raise ValueError(
                "exchange='hierarchical': every node must run as many of the ranks as the others; "
                "use exchange='scatter_reduce', or exchange=Hierarchical(ranks_per_node=...)"
            )
        self._know(nodes)

    def quantized(self, group: Group) -> int:
        return 0 if self._topology.shares_one_node else group.quantized

    def log_choices(self, groups: Sequence[Group], codecs: Mapping[str, Codec]) -> None:
        between = self._topology.between
        if self.rank == 0 and isinstance(between, ScatterReduceExchange):
            between.warn(groups, codecs, nodes=True)

    def in_flight_bytes(self, codec: Codec, quantized: int, full: int, dtype: torch.dtype) -> int:
        # For any nodes: slices sent and received in full precision, the largest a bucket longer;
        # then two payloads of such slices, or one and averages of at most 8 bits.
        coordinates = quantized + full
        spare = self.ranks * min(codec.settings.bucket_size, coordinates)
        inside = dtype.itemsize * (2 * coordinates + spare)
        payload = codec.payloads.most_length(quantized + min(spare, quantized), full, dtype)
        average = quantized + spare + most_section_bytes(quantized + spare)
        return inside + 2 * payload + 2 * average + HEADERS * self.ranks

    def working_bytes(self, codec: Codec, quantized: int, full: int) -> int:
        # The average of a node's slice; later messages are not larger.
        size = codec.settings.bucket_size
        return 8 * max(c.coordinates for c in cut(quantized, full, size, len(self._topology.local)))

    def collectives(self, coordinates: int) -> int:
        if self._topology.shares_one_node:
            return 2
        between = self._topology.between.collectives(coordinates)
        return between if self._topology.is_alone else 2 + between

    def _know(self, nodes: Sequence[int]) -> None:
        self._topology, self.is_set_up = find_topology(nodes, self.rank), True
        self.averages_of = self._topology.between.averages_of
        if self._topology.shares_one_node:
            logger.info("all %d ranks share a node: nothing is compressed", self.ranks)

    def average(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Average a group as ``Exchange.average`` says, in the three steps of this module."""
        topology, size = self._topology, parcel.codec.settings.bucket_size
        slices = cut(parcel.quantized, parcel.full, size, len(topology.local))
        own = slices[topology.index]
        if topology.is_alone:
            averaging = topology.between.average(self._part(parcel, own), flat, values)
            del flat, values
            return (yield from self._across(averaging))

        begin = time.perf_counter()
        if topology.shares_one_node:
            parcel.measure(flat, flat.dtype)
        request = [topology.inside(AllToAll(_copied(flat, slices)))]
        parcel.spent("encode_s", begin)
        del flat, values
        parts = yield request.pop()
        failures: list[PayloadError] = []
        mean = _mean(parts, own, parcel.dtype, failures)
        del parts

        averaging = self._over_nodes(parcel, own, mean)
        del mean
        result = OwnedBuffer(0, parcel.device)
        try:
            result = OwnedBuffer.copy_of((yield from averaging))
        except PayloadError as error:
            # Other ranks wait for this one. They receive an empty result, and fail, too.
            failures.append(error)

        (gathered,) = yield topology.inside(AllGather(result))
        if failures:
            raise failures[0]
        return _joined(gathered, slices, parcel)

    def _over_nodes(self, parcel: Parcel, own: Chunk, mean: torch.Tensor) -> Route:
        """Return the slice's average (or sum) over all ranks, computed from the nodes' means."""
        if self._topology.shares_one_node:
            return (mean * (parcel.factor * len(self._topology.local))).to(parcel.dtype)
        averaging = self._topology.between.average(
            self._part(parcel, own), mean.to(parcel.dtype), mean[: own.quantized]
        )
        del mean
        return (yield from self._across(averaging))

    def _part(self, parcel: Parcel, own: Chunk) -> Parcel:
        """Return the parcel of a slice, which nodes exchange."""
        return replace(
            parcel,
            quantized=own.quantized,
            full=own.full,
            ranks=self._topology.across,
            factor=parcel.factor * len(self._topology.local),
        )

    def _across(self, averaging: Route) -> Route:
        """Perform the collectives of ``averaging``, which are between nodes, among all ranks."""
        request = next(averaging)
        while True:
            assert isinstance(request, AllGather | AllToAll)
            received = yield Among(self._topology.across, request, self.ranks)
            try:
                request = averaging.send(received)
            except StopIteration as end:
                return end.value


def _copied(flat: torch.Tensor, slices: Sequence[Chunk]) -> list[OwnedBuffer]:
    """Return copies of a group's slices, in contiguous memory."""
    size = flat.element_size()
    memory, at = OwnedBuffer(flat.numel() * size, flat.device), 0
    parts: list[OwnedBuffer] = []
    for chunk in slices:
        part = memory.part(at, at + chunk.coordinates * size)
        chunk.take(flat, part.bytes.view(flat.dtype))
        parts.append(part)
        at += part.size
    return parts


def _mean(
    parts: Sequence[torch.Tensor], own: Chunk, dtype: torch.dtype, failures: list[PayloadError]
) -> torch.Tensor:
    """Return the mean of a node's ranks, added in rank order.

    If a part has a wrong length, the mean is NaN and ``failures`` receives an error: the ranks of
    other nodes must still receive a message.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(own.coordinates, dtype=wide, device=parts[0].device)
    size = own.coordinates * dtype.itemsize
    if wrong := [part.numel() for part in parts if part.numel() != size]:
        failures.append(PayloadError(f"received {wrong[0]} bytes of a slice that has {size}"))
        return total.fill_(float("nan"))
    for part in parts:
        total += part.clone().view(dtype).to(wide)
    return total.mul_(1.0 / len(parts))


def _joined(gathered: torch.Tensor, slices: Sequence[Chunk], parcel: Parcel) -> torch.Tensor:
    coordinates = parcel.quantized + parcel.full
    if gathered.numel() != coordinates * parcel.dtype.itemsize:
        raise FailedElsewhereError(
            "a rank of this node received a corrupt payload; its own error says more"
        )
    values = gathered.view(parcel.dtype)
    out, at = torch.empty(coordinates, dtype=parcel.dtype, device=gathered.device), 0
    for chunk in slices:
        chunk.put(values[at : at + chunk.coordinates], out)
        at += chunk.coordinates
    return out
