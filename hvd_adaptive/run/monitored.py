"""Report completed steps to a monitor, and the seconds of the same step without compression."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from hvd_adaptive._version import __version__
from hvd_adaptive.base.tensors import wait_for
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.layout import Group, Layout
from hvd_adaptive.monitor import Monitor
from hvd_adaptive.transport.world import World

REPEATS = 5


def stock_seconds(
    world: World, sizes: Sequence[int], name: str, device: torch.device
) -> dict[str, float]:
    """Return the seconds of one exchange in float32 and in float16, of the slowest rank; a
    collective.

    Each exchange averages tensors of ``sizes`` as training without compression does: Horovod's
    optimizer submits one allreduce for each gradient, and Horovod fuses them; DDP allreduces its
    buckets. All tensors are there when it begins, so no computation hides it. float16 includes both
    conversions. The result is the median of ``REPEATS`` exchanges. One more before them does not
    count.
    """
    tensors = [torch.ones(size, dtype=torch.float32, device=device) for size in sizes]
    own = []
    for dtype in (torch.float32, torch.float16):
        taken = []
        for _ in range(1 + REPEATS):
            wait_for(device)
            begin = time.perf_counter()
            sent = [tensor.to(dtype) for tensor in tensors]  # the tensors themselves, in float32
            world.average_all(sent, f"{name}.stock")
            for tensor, average in zip(tensors, sent, strict=True):
                if average is not tensor:
                    tensor.copy_(average)
            wait_for(device)
            taken.append(time.perf_counter() - begin)
        own.append(statistics.median(taken[1:]))
    everyone = world.gather_equal(
        torch.tensor(own, dtype=torch.float64, device="cpu"), f"{name}.stock.seconds"
    )
    slowest = everyone.amax(dim=0).tolist()
    return dict(zip(("float32", "float16"), slowest, strict=True))


class Monitored:
    """A compressor's monitor on this rank, for the same ranks and optimizer.

    Ranks may have different monitors, or none. Only with ``compare=True``, which all ranks must
    have, is the first ``step_ended`` a collective.
    """

    def __init__(self, compressor: GradientCompressor, rank: int) -> None:
        monitor: Monitor | None = compressor.settings.monitor
        self._compares = monitor is not None and getattr(monitor, "compare", False)
        watches = monitor is not None and monitor.watches(rank)
        self._monitor = monitor if watches else None
        self._reported: int | None = None  # fingerprint of the layout that was reported
        compressor._training.meter.detailed = watches

    def step_ended(
        self, binding: Any, number: int, layout: Layout | None, device: torch.device
    ) -> None:
        """Report a step, whose figures the compressor's meter contains; ``binding`` is a
        RankContext.

        ``layout`` is None for a step without groups, after ranks called hvd.join().
        """
        stock = None
        if self._compares and layout is not None and binding.world.size > 1:
            stock = self._stock(binding, layout, device)
        if self._monitor is None:
            return
        fingerprint = 0 if layout is None else layout.fingerprint
        if self._reported is None or (layout is not None and fingerprint != self._reported):
            self._reported = fingerprint
            begun = facts(binding, number, layout) | {"stock": stock}
            self._monitor.begin(binding.compressor, begun)
        self._monitor.step(binding.compressor, number)

    def _stock(self, binding: Any, layout: Layout, device: torch.device) -> dict[str, float]:
        """Return the seconds of stock exchanges, measured once with these ranks, and kept."""
        monitor, world = binding.settings.monitor, binding.world
        ranks = world.generation, world.size
        seconds = monitor.stock(binding.compressor, ranks)
        if seconds is None:
            seconds = stock_seconds(world, binding.stock_sizes(layout), binding.name, device)
            monitor.keep_stock(binding.compressor, ranks, seconds)
        return seconds


def facts(binding: Any, number: int, layout: Layout | None) -> dict[str, Any]:
    """Return facts about a compressor from step ``number`` on: scheme, versions, ranks, groups."""
    return {
        "scheme": repr(binding.compressor),
        "name": binding.name,
        "version": __version__,
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "rank": binding.world.rank,
        "ranks": binding.world.size,
        "first_step": number,
        "exchange": binding.exchange_name,
        "groups": []
        if layout is None
        else [_group(binding, layout, index) for index in range(len(layout.groups))],
    }


def _group(binding: Any, layout: Layout, index: int) -> dict[str, Any]:
    """Return a group's facts; ``members`` are [name, quantised, full-precision coordinates]."""
    group = layout.groups[index]
    quantized = binding.exchange.quantized(group)
    return {
        "group": index,
        "part": group.part,
        "dtype": str(group.dtype).removeprefix("torch."),
        "coordinates": group.coordinates,
        "quantized": quantized,
        "buckets": -(-quantized // binding.settings.bucket_size),
        "exchange": binding.exchange.choice(group.coordinates) or binding.exchange_name,
        "members": _members(layout, group, quantized),
    }


def _members(layout: Layout, group: Group, quantized: int) -> list[list[Any]]:
    found: dict[int, list[Any]] = {}
    for piece in group.pieces:
        size = piece.stop - piece.start
        count = min(size, max(0, quantized - piece.at))
        entry = found.setdefault(piece.slot, [layout.members[piece.slot].name, 0, 0])
        entry[1] += count
        entry[2] += size - count
    return list(found.values())
