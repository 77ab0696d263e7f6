"""Full precision inside a node, compressed payloads between nodes.

1. Ranks of a node cut the group into a slice for each of them (chunks.py) and send each other
   theirs as they are; each averages its slice of the node in rank order, in float32 (float64 for
   float64).
2. Ranks with the same place in their nodes exchange this slice, compressed: by allgather where that
   sends less (two nodes), else by scatter_reduce. All of a node's ranks work, each on its slice.
3. Ranks of a node send each other the result of their slices, as it is.

Where all ranks share a node nothing is compressed; where none do, step 2 is all.

Horovod's process sets would have to be made by its ``init``, or in a mode that a variable of the
environment turns on. They are not needed: some ranks' collective is an alltoall of all ranks in
which the others send nothing (collectives.Among).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.errors import PayloadError
from hvd_adaptive.exchange.allgather import Allgather
from hvd_adaptive.exchange.chunks import Chunk, cut
from hvd_adaptive.exchange.collectives import AllGather, AllToAll, Among
from hvd_adaptive.exchange.exchange import Exchange, Place, Route, Shipment
from hvd_adaptive.exchange.nodes import find_nodes
from hvd_adaptive.exchange.scatter_reduce import ScatterReduce

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.exchange.world import World

logger = logging.getLogger("hvd_adaptive")

# More nodes than these send less by scatter_reduce, whose averages have 1 to 3 bits more.
MOST_GATHERED = 2
# Bytes of headers and scales that a rank may add, whatever it sends.
HEADERS = 1024


class Hierarchical(Exchange):
    """Ranks that share a node, then nodes, then ranks that share a node."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._between: Exchange | None = None
        if place.nodes:
            self._know(place.nodes)

    @property
    def settled(self) -> bool:
        return self._between is not None

    def settle(
        self, world: World, compressor: GradientCompressor, name: str, device: torch.device
    ) -> None:
        nodes = find_nodes(world, name)
        if not nodes:
            raise ValueError(
                "exchange='hierarchical': every node must run as many of the ranks as the others; "
                "use exchange='scatter_reduce', or say ranks_per_node="
            )
        self._know(nodes)

    def prepare(self, compressor: GradientCompressor, labels: Sequence[str], step: int) -> None:
        self._between.prepare(compressor, labels, step)

    def in_flight_bytes(
        self, codec: GradientCompressor, quantized: int, full: int, dtype: torch.dtype
    ) -> int:
        # Whatever the nodes: slices as they are, sent and received, the largest a bucket too large;
        # then two payloads of such slices, or one and averages of at most 8 bits.
        coordinates = quantized + full
        spare = self.ranks * min(codec.settings.bucket_size, coordinates)
        inside = dtype.itemsize * (2 * coordinates + spare)
        payload = codec.payload_bytes(quantized + min(spare, quantized), full, dtype)
        return inside + 2 * payload + 2 * (quantized + spare) + HEADERS * self.ranks

    def working_bytes(self, codec: GradientCompressor, quantized: int, full: int) -> int:
        # The average of a node's slice; what is then exchanged is not larger.
        size = codec.settings.bucket_size
        return 8 * max(c.coordinates for c in cut(quantized, full, size, len(self._local)))

    def _know(self, nodes: Sequence[int]) -> None:
        names = sorted(set(nodes))
        members = [[r for r in range(self.ranks) if nodes[r] == node] for node in names]
        own = names.index(nodes[self.rank])
        self._local = members[own]
        self._index = self._local.index(self.rank)
        # Ranks in the same place of their nodes.
        self._across = [of_node[self._index] for of_node in members]
        kind = Allgather if len(names) <= MOST_GATHERED else ScatterReduce
        self._between = kind(Place(len(names), own))
        if len(names) == 1:
            logger.info("all %d ranks share a node: nothing is compressed", self.ranks)

    def encode(
        self, shipment: Shipment, flat: torch.Tensor, values: torch.Tensor
    ) -> list[torch.Tensor]:
        return [_bytes(c.of(flat)) for c in self._slices(shipment)]

    def route(self, shipment: Shipment, sent: Sequence[torch.Tensor]) -> Route:
        slices = self._slices(shipment)
        own = slices[self._index]
        parts = yield Among(self._local, AllToAll(sent), self.ranks, local=True)
        del sent
        mean = _mean(parts, own, shipment.dtype)
        del parts
        failure, result = None, mean.new_empty(0)
        try:
            result = yield from self._exchanged(shipment, own, mean)
        except PayloadError as error:
            # The others would wait for this rank for ever: they get nothing, and fail, too.
            failure = error
        result = _bytes(result)
        (gathered,) = yield Among(self._local, AllGather(result), self.ranks, local=True)
        if failure is not None:
            raise failure
        return _joined(gathered, slices, shipment)

    def _exchanged(self, shipment: Shipment, own: Chunk, mean: torch.Tensor) -> Route:
        """The slice's average (or sum) over all ranks, from the means of nodes."""
        inside = len(self._local)
        if len(self._across) == 1:
            return (mean * (shipment.factor() * inside)).to(shipment.dtype)
        across = self._across
        part = dataclasses.replace(
            shipment,
            quantized=own.quantized,
            full=own.full,
            key=lambda node: shipment.key(across[node]),
            keys=shipment.keys and (lambda node: shipment.keys(across[node])),
            factor=lambda: shipment.factor() * inside,
        )
        with shipment.time("encode_s"):
            payloads = self._between.encode(part, mean.to(part.dtype), mean[: own.quantized])
        route, received = self._between.route(part, payloads), None
        del payloads
        while True:
            try:
                request = route.send(received)
            except StopIteration as end:
                return end.value
            assert isinstance(request, AllGather | AllToAll)
            received = yield Among(across, request, self.ranks)

    def _slices(self, shipment: Shipment) -> Sequence[Chunk]:
        size = shipment.codec.settings.bucket_size
        return cut(shipment.quantized, shipment.full, size, len(self._local))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _mean(parts: Sequence[torch.Tensor], own: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """Of a node's ranks, added in their order."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(own.coordinates, dtype=wide, device=parts[0].device)
    for part in parts:
        total += part.clone().view(dtype).to(wide)
    return total.mul_(1.0 / len(parts))


def _joined(gathered: torch.Tensor, slices: Sequence[Chunk], shipment: Shipment) -> torch.Tensor:
    coordinates = shipment.quantized + shipment.full
    if gathered.numel() != coordinates * shipment.dtype.itemsize:
        raise PayloadError(
            "a rank of this node received a corrupt payload; its own error says more"
        )
    values = gathered.view(shipment.dtype)
    out, at = torch.empty(coordinates, dtype=shipment.dtype, device=gathered.device), 0
    for chunk in slices:
        chunk.put(values[at : at + chunk.coordinates], out)
        at += chunk.coordinates
    return out
