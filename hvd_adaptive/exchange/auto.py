"""Choose the exchange: the one that is named, or the fastest for each group, by one measurement.

In the first step, after the ranks have compared their settings, each candidate exchanges groups of
two sizes, ``SIZES``, with the compressor's codec over the real network. The time of other sizes is
interpolated linearly; smaller groups take as long as the small size. A step's groups overlap, so
these times do not forecast a step; they rank the candidates. The slowest rank's times count. The
first rank combines and broadcasts them, so that all ranks choose alike. Of the candidates within
``TOLERANCE`` of the best, the most exact one is chosen; candidates are listed in that order.

Times vary between runs, and so may choices and bits. To repeat a run, set ``exchange=`` to the
choice in the log.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.base.tensors import wait_for
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.codec.second_stage import FULL_PRECISION, SecondStage, references
from hvd_adaptive.exchange.exchange import AllgatherExchange, Exchange, RankInfo, Route, carry_out
from hvd_adaptive.exchange.hierarchical import HierarchicalExchange
from hvd_adaptive.exchange.parcel import Parcel, RandomStream
from hvd_adaptive.exchange.scatter_reduce import ScatterReduceExchange
from hvd_adaptive.kernels.random import Use
from hvd_adaptive.layout import Group
from hvd_adaptive.settings import Settings
from hvd_adaptive.transport.world import World, find_nodes

logger = logging.getLogger("hvd_adaptive")

SIZES = (1 << 12, 1 << 20)
REPEATS = 3
TOLERANCE = 1.05
# With more ranks an allgather of 3-bit payloads sends more than float32.
MOST_GATHERED = 32


class Plain(ScatterReduceExchange):
    """The scatter-reduce of groups none of whose coordinates is quantised, in their own dtype;
    float32 is sent as ``single``.

    Horovod's own float16 overflows beyond 65,504 and loses gradients below 6e-8; bfloat16 has the
    range of float32, and its rounding, at most 1/512, is small beside any quantiser's.
    """

    def __init__(self, rank_info: RankInfo, single: torch.dtype = torch.float32) -> None:
        super().__init__(rank_info)
        self.averages_of, self._single = (), single

    def quantized(self, group: Group) -> int:
        return 0

    def in_flight_bytes(self, codec: Codec, quantized: int, full: int, dtype: torch.dtype) -> int:
        return super().in_flight_bytes(codec, 0, quantized + full, dtype)

    def reduce(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Average a chunk as the base class does, of gradients that are rounded first."""
        plain = self._plain(parcel)
        begin = time.perf_counter()
        parcel.measure(flat, plain.dtype)
        reducing = super().reduce(plain, flat.to(plain.dtype), values[:0])
        parcel.spent("encode_s", begin)
        del flat, values
        return (yield from reducing)

    def gather(self, parcel: Parcel, mean: torch.Tensor | PayloadError) -> Route:
        """Gather as the base class does, and return the group in its own dtype."""
        result = yield from super().gather(self._plain(parcel), mean)
        return result.to(parcel.dtype)

    def _plain(self, parcel: Parcel) -> Parcel:
        """Return the parcel with all its coordinates in the dtype that is sent."""
        full = parcel.quantized + parcel.full
        dtype = self._single if parcel.dtype == torch.float32 else parcel.dtype
        return replace(parcel, quantized=0, full=full, dtype=dtype)

    def _second_stage(self, codec: Codec) -> SecondStage:
        return SecondStage(self.ranks, FULL_PRECISION, codec)


class AutoExchange(Exchange):
    """One of several exchanges for each group, by its size."""

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__(rank_info)
        # The most exact first.
        self._candidates: dict[str, Exchange] = {
            "float32": Plain(rank_info),
            "bfloat16": Plain(rank_info, torch.bfloat16),
        }
        if rank_info.ranks <= MOST_GATHERED:
            self._candidates["allgather"] = AllgatherExchange(rank_info)
        if rank_info.ranks > 2:  # of two ranks an allgather sends no more, and rounds once
            self._candidates["scatter_reduce"] = ScatterReduceExchange(rank_info)
        # Seconds of the small size and of each further coordinate, after the measurement.
        self._lines: dict[str, tuple[float, float]] = {}
        self.is_set_up = False
        self._logged: set[str] = set()

    def set_up(self, world: World, compressor: Codec, name: str, device: torch.device) -> None:
        self.know_nodes(self.rank_info.nodes or find_nodes(world, name), compressor)
        # Candidates make second stages of different bits, which must not replace a loaded one.
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

    def know_nodes(self, nodes: tuple[int, ...], compressor: Codec) -> None:
        """Add "hierarchical" if there are several nodes of several ranks."""
        if self._may_have([len(set(nodes))], compressor):
            rank_info = RankInfo(self.ranks, self.rank, nodes)
            last = self._candidates.pop("scatter_reduce")
            self._candidates |= {
                "hierarchical": HierarchicalExchange(rank_info),
                "scatter_reduce": last,
            }

    def _may_have(self, nodes: Iterable[int], codec: Codec) -> bool:
        """Return whether "hierarchical" is a candidate for any of these numbers of nodes."""
        return codec.settings.error_feedback is None and any(1 < n < self.ranks for n in nodes)

    def choose_by(self, seconds: Mapping[str, Sequence[float]]) -> None:
        """Choose by each candidate's seconds for groups of ``SIZES``."""
        # Both average different numbers of ranks. Keep the faster one, so that averages have one
        # codec.
        rivals = [label for label in ("hierarchical", "scatter_reduce") if label in seconds]
        for slower in sorted(rivals, key=lambda label: seconds[label][-1])[1:]:
            del self._candidates[slower]
        for label in self._candidates:
            small, large = seconds[label]
            self._lines[label] = small, max(large - small, 0.0) / (SIZES[1] - SIZES[0])
        self.is_set_up = True
        candidates = self._candidates.values()
        self.averages_of = tuple(n for exchange in candidates for n in exchange.averages_of)
        # Beside groups of more collectives, ranks could wait for each other.
        self.overlaps = "hierarchical" not in self._candidates
        listed = [f"{label} {1e3 * a:.2f} and {1e3 * b:.2f}" for label, (a, b) in seconds.items()]
        logger.info(
            "exchange='auto': over %d ranks groups of %d and %d coordinates take, in milliseconds: "
            "%s",
            self.ranks,
            *SIZES,
            ", ".join(listed),
        )

    def forecast(self, coordinates: int) -> dict[str, float]:
        """Return each candidate's seconds for a group of ``coordinates`` coordinates."""
        more = max(0, coordinates - SIZES[0])
        return {label: least + slope * more for label, (least, slope) in self._lines.items()}

    def choice(self, coordinates: int) -> str:
        """Return the most exact candidate of those that are about the fastest."""
        seconds = self.forecast(coordinates)
        best = min(seconds.values())
        return next(label for label in seconds if seconds[label] <= TOLERANCE * best)

    def quantized(self, group: Group) -> int:
        return self._candidates[self.choice(group.coordinates)].quantized(group)

    def log_choices(self, groups: Sequence[Group], codecs: Mapping[str, Codec]) -> None:
        chosen: dict[str, list[Group]] = {}
        for group in groups:
            chosen.setdefault(self.choice(group.coordinates), []).append(group)
        for label, own in chosen.items():
            self._candidates[label].log_choices(own, codecs)
            sizes = [group.coordinates for group in own]
            figures = self.forecast(max(sizes)).items()
            listed = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in figures)
            largest = f"the largest, {max(sizes)} coordinates: {listed}"
            summary = f"{len(sizes)} groups by {label}; {largest}"
            if summary not in self._logged:
                logger.info("exchange='auto': %s", summary)
                self._logged.add(summary)

    def in_flight_bytes(self, codec: Codec, quantized: int, full: int, dtype: torch.dtype) -> int:
        if self.is_set_up:
            kinds = [self._candidates[self.choice(quantized + full)]]
        else:  # groups are cut before the measurement, so no candidate may exceed the bound
            kinds = list(self._candidates.values())
            known = len(set(self.rank_info.nodes))  # else as many ranks on each of any number
            nodes = [known] if known else [n for n in range(1, self.ranks) if not self.ranks % n]
            if self._may_have(nodes, codec):
                kinds.append(HierarchicalExchange(RankInfo(self.ranks, self.rank)))
        return max(kind.in_flight_bytes(codec, quantized, full, dtype) for kind in kinds)

    def working_bytes(self, codec: Codec, quantized: int, full: int) -> int:
        chosen = self._candidates[self.choice(quantized + full)]
        return chosen.working_bytes(codec, quantized, full)

    def collectives(self, coordinates: int) -> int:
        return self._candidates[self.choice(coordinates)].collectives(coordinates)

    def average(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Average a group by the exchange chosen for its size."""
        chosen = self._candidates[self.choice(parcel.quantized + parcel.full)]
        return chosen.average(parcel, flat, values)


def measure(
    exchange: Exchange, world: World, compressor: Codec, size: int, name: str, device: torch.device
) -> float:
    """Return this rank's least seconds for a group of ``size`` float32 coordinates.

    The first exchange compiles kernels and does not count.
    """
    once = references(compressor.settings.bucket_size)[0]
    flat = once.repeat(-(-size // once.numel()))[:size].to(device)
    parcel = Parcel(
        codec=compressor,
        dtype=torch.float32,
        quantized=size,
        full=0,
        device=device,
        stream=RandomStream(0, compressor.settings.seed, size, Use.AUTO),
        factor=1.0 / exchange.ranks,
    )
    seconds = []
    for repeat in range(1 + REPEATS):
        wait_for(device)
        begin = time.perf_counter()
        carry_out(exchange.average(parcel, flat, flat), world, f"{name}.{size}.{repeat}")
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


# Most ranks that use allgather by default. A rank sends (ranks - 1) payloads in an allgather, and
# about two payloads in a scatter-reduce, whatever the number of ranks.
FEW_RANKS = 3

EXCHANGES: dict[str, type[Exchange]] = {
    "allgather": AllgatherExchange,
    "scatter_reduce": ScatterReduceExchange,
    "hierarchical": HierarchicalExchange,
    "auto": AutoExchange,
}


def name_of_exchange(settings: Settings, ranks: int) -> str:
    """Return the settings' exchange. Without ``exchange=`` nothing is measured: runs repeat."""
    return settings.exchange_name or ("allgather" if ranks <= FEW_RANKS else "scatter_reduce")
