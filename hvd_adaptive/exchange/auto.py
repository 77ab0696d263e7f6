"""The exchange that is fastest here, for each group: measured, once, by all ranks together.

At the first step, when all ranks are known to agree, each candidate exchanges groups of two sizes,
``SIZES``, with the compressor's own codec over the real network. Other sizes lie on the line
through the two; smaller ones take as long as the small one. A step's groups overlap, so these are
no forecasts of it; they rank the candidates. The slowest rank's times count, the first rank
joins them and tells all, and so all choose alike. Of those within ``TOLERANCE`` of the best, the
most exact is taken: candidates are listed in that order.

Times vary from run to run, and so may choices and bits. To repeat a run, give ``exchange=`` what
the log says was chosen.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.device import wait_for
from hvd_adaptive.exchange.allgather import Allgather
from hvd_adaptive.exchange.exchange import Exchange, Outgoing, Place, Route, Share, Shipment
from hvd_adaptive.exchange.hierarchical import Hierarchical
from hvd_adaptive.exchange.plain import Half, Plain
from hvd_adaptive.exchange.scatter_reduce import ScatterReduce
from hvd_adaptive.exchange.second_stage import references
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.streams import Use
from hvd_adaptive.transport.nodes import find_nodes

if TYPE_CHECKING:
    from hvd_adaptive.exchange.staged_codec import StagedCodec
    from hvd_adaptive.layout import Group
    from hvd_adaptive.transport.world import World

logger = logging.getLogger("hvd_adaptive")

SIZES = (1 << 12, 1 << 20)
REPEATS = 3
TOLERANCE = 1.05
# Beyond so many ranks an allgather of 3-bit payloads moves more than float32 would.
MOST_GATHERED = 32


class Auto(Exchange):
    """One of several exchanges for each group, by its size."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        # The most exact first.
        self._candidates: dict[str, Exchange] = {"float32": Plain(place), "bfloat16": Half(place)}
        if place.ranks <= MOST_GATHERED:
            self._candidates["allgather"] = Allgather(place)
        # Without nodes it serves for the bound on memory alone.
        self._candidates["hierarchical"] = Hierarchical(Place(place.ranks, place.rank))
        self._candidates["scatter_reduce"] = ScatterReduce(place)
        # Seconds of the small size, and of each coordinate more, once they are measured.
        self._lines: dict[str, tuple[float, float]] = {}
        self._told: set[str] = set()

    @property
    def settled(self) -> bool:
        return bool(self._lines)

    def settle(
        self, world: World, compressor: StagedCodec, name: str, device: torch.device
    ) -> None:
        self.know_nodes(self.place.nodes or find_nodes(world, name), compressor)
        # Candidates want second stages of different bits; a loaded one must not be lost to them.
        compressor = copy.copy(compressor)
        own = [
            [
                measure(exchange, world, compressor, size, f"{name}.auto.{label}", device)
                for size in SIZES
            ]
            for label, exchange in self._candidates.items()
        ]
        everyone = world.gather_equal(
            torch.tensor([own], dtype=torch.float32, device="cpu"), f"{name}.auto.seconds"
        )
        slowest = everyone.amax(dim=(0, 1)).numpy().reshape(-1)
        agreed = world.broadcast(slowest, f"{name}.auto.agreed").reshape(-1, len(SIZES))
        self.choose_by(dict(zip(self._candidates, agreed.tolist(), strict=True)))

    def know_nodes(self, nodes: tuple[int, ...], compressor: StagedCodec) -> None:
        """Keep "hierarchical" where there are several nodes of several ranks."""
        del self._candidates["hierarchical"]
        several = 1 < len(set(nodes)) < self.ranks
        if several and compressor.settings.error_feedback is None:
            place = Place(self.ranks, self.rank, nodes)
            last = self._candidates.pop("scatter_reduce")
            self._candidates |= {"hierarchical": Hierarchical(place), "scatter_reduce": last}

    def choose_by(self, seconds: Mapping[str, Sequence[float]]) -> None:
        """Take these seconds of each candidate for groups of ``SIZES``."""
        # Both average on the way, but among different numbers of ranks: the faster one stays, so
        # that averages have one codec.
        rivals = [label for label in ("hierarchical", "scatter_reduce") if label in seconds]
        for slower in sorted(rivals, key=lambda label: seconds[label][-1])[1:]:
            del self._candidates[slower]
        for label in self._candidates:
            small, large = seconds[label]
            self._lines[label] = small, max(large - small, 0.0) / (SIZES[1] - SIZES[0])
        told = [f"{label} {1e3 * a:.2f} and {1e3 * b:.2f}" for label, (a, b) in seconds.items()]
        logger.info(
            "exchange='auto': over %d ranks groups of %d and %d coordinates take, in milliseconds: "
            "%s",
            self.ranks,
            *SIZES,
            ", ".join(told),
        )

    def forecast(self, coordinates: int) -> dict[str, float]:
        """Seconds of each candidate for a group of so many coordinates."""
        more = max(0, coordinates - SIZES[0])
        return {label: least + slope * more for label, (least, slope) in self._lines.items()}

    def choice(self, coordinates: int) -> str:
        """What such a group travels by: the most exact of those that are about the fastest."""
        seconds = self.forecast(coordinates)
        best = min(seconds.values())
        return next(label for label in seconds if seconds[label] <= TOLERANCE * best)

    def arrange(self, groups: Sequence[Group]) -> None:
        """Groups that travel plain quantise nothing: no table is fitted to them."""
        chosen: dict[str, list[int]] = {}
        for group in groups:
            label = self.choice(group.coordinates)
            chosen.setdefault(label, []).append(group.coordinates)
            if isinstance(self._candidates[label], Plain):
                group.quantize_nothing()
        for label, sizes in chosen.items():
            figures = self.forecast(max(sizes)).items()
            told = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in figures)
            told = f"{len(sizes)} groups by {label}; the largest, {max(sizes)} coordinates: {told}"
            if told not in self._told:
                logger.info("exchange='auto': %s", told)
                self._told.add(told)

    def share(self, rank: int, quantized: int, full: int, bucket_size: int) -> Share:
        chosen = self._candidates[self.choice(quantized + full)]
        return chosen.share(rank, quantized, full, bucket_size)

    def prepare(self, compressor: StagedCodec, labels: Sequence[str], step: int) -> None:
        for exchange in self._candidates.values():
            exchange.prepare(compressor, labels, step)

    def in_flight_bytes(
        self, codec: StagedCodec, quantized: int, full: int, dtype: torch.dtype
    ) -> int:
        # Groups are cut before anything is measured: no candidate may exceed the bound.
        kinds = list(self._candidates.values())
        if self.settled:
            kinds = [self._candidates[self.choice(quantized + full)]]
        return max(kind.in_flight_bytes(codec, quantized, full, dtype) for kind in kinds)

    def working_bytes(self, codec: StagedCodec, quantized: int, full: int) -> int:
        chosen = self._candidates[self.choice(quantized + full)]
        return chosen.working_bytes(codec, quantized, full)

    def goes_on_early(self, coordinates: int) -> bool:
        # Beside routes of more stages ranks could come to wait for each other.
        if "hierarchical" in self._candidates:
            return False
        return self._candidates[self.choice(coordinates)].goes_on_early(coordinates)

    def encode(
        self, shipment: Shipment, flat: torch.Tensor, values: torch.Tensor
    ) -> list[Outgoing]:
        return self._chosen(shipment).encode(shipment, flat, values)

    def route(self, shipment: Shipment, sent: Sequence[Outgoing]) -> Route:
        return self._chosen(shipment).route(shipment, sent)

    def _chosen(self, shipment: Shipment) -> Exchange:
        return self._candidates[self.choice(shipment.quantized + shipment.full)]


def measure(
    exchange: Exchange,
    world: World,
    compressor: StagedCodec,
    size: int,
    name: str,
    device: torch.device,
) -> float:
    """Seconds of this rank for one group of ``size`` float32 coordinates: the least of several,
    after one for the compiler."""
    once = references(compressor.settings.bucket_size)[0]
    flat = once.repeat(-(-size // once.numel()))[:size].to(device)
    shipment = Shipment(
        codec=compressor,
        dtype=torch.float32,
        quantized=size,
        full=0,
        layout=0,
        key=lambda rank: stream_key(compressor.settings.seed, rank, size, Use.AUTO),
        factor=lambda: 1.0 / exchange.ranks,
        time=lambda field: nullcontext(),
        count=lambda size: None,
    )
    seconds = []
    for repeat in range(1 + REPEATS):
        wait_for(device)
        begin = time.perf_counter()
        route = exchange.route(shipment, exchange.encode(shipment, flat, flat))
        _carry_out(route, world, f"{name}.{size}.{repeat}")
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def _carry_out(route: Route, world: World, name: str) -> None:
    """All stages of one group, each waited for."""
    request = next(route)
    for stage in itertools.count():
        received = request.receive(world, request.submit(world, f"{name}.{stage}"))
        try:
            request = route.send(received)
        except StopIteration:
            return
