"""Report completed steps to a monitor."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hvd_adaptive._version import __version__
from hvd_adaptive.layout import Group, Layout

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.exchange.exchange import Exchange
    from hvd_adaptive.monitor import Monitor
    from hvd_adaptive.settings import Settings


class Bound(Protocol):
    """Attributes of a binding that are reported."""

    name: str
    compressor: GradientCompressor
    settings: Settings
    exchange: Exchange
    exchange_name: str
    world: Any


class Monitored:
    """A compressor's monitor on this rank, for the same ranks and optimizer.

    No method is a collective, so ranks may have different monitors, or none.
    """

    def __init__(self, compressor: GradientCompressor, rank: int) -> None:
        monitor: Monitor | None = compressor.settings.monitor
        watches = monitor is not None and monitor.watches(rank)
        self._monitor = monitor if watches else None
        self._reported: int | None = None  # fingerprint of the layout that was reported
        compressor.meter.detailed = watches

    def step_ended(self, binding: Bound, number: int, layout: Layout | None) -> None:
        """Report step ``number``, whose figures the compressor's meter contains.

        Args:
            binding: The binding of the step.
            number: The step.
            layout: Its layout; None for a step without groups, after ranks called hvd.join().
        """
        if self._monitor is None:
            return
        fingerprint = 0 if layout is None else layout.fingerprint
        if self._reported is None or (layout is not None and fingerprint != self._reported):
            self._reported = fingerprint
            self._monitor.begin(binding.compressor, facts(binding, number, layout))
        self._monitor.step(binding.compressor, number)


def facts(binding: Bound, number: int, layout: Layout | None) -> dict[str, Any]:
    """Return facts about a compressor from step ``number`` on.

    They are its scheme with settings, the beginning of its collectives' names, versions, host,
    rank, ranks and groups.
    """
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


def _group(binding: Bound, layout: Layout, index: int) -> dict[str, Any]:
    """Return a group's facts.

    ``members`` has [name, quantised coordinates, full-precision coordinates] of each parameter.
    """
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
