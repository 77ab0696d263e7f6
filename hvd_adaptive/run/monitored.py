"""What a monitor is told of a step that has ended."""

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
    """What is monitored of a binding."""

    name: str
    compressor: GradientCompressor
    settings: Settings
    exchange: Exchange
    world: Any


class Monitored:
    """A compressor's monitor on this rank, as long as ranks and optimizer are the same.

    Nothing here is a collective: ranks may have different monitors, or none.
    """

    def __init__(self, compressor: GradientCompressor, rank: int) -> None:
        monitor: Monitor | None = compressor.settings.monitor
        watches = monitor is not None and monitor.watches(rank)
        self._monitor = monitor if watches else None
        self._told: int | None = None  # fingerprint of the layout that it knows
        compressor.meter.detailed = watches

    def step_ended(self, binding: Bound, number: int, layout: Layout | None) -> None:
        """The compressor's last figures are those of step ``number``.

        layout: None for a step without groups: some ranks had called hvd.join().
        """
        if self._monitor is None:
            return
        fingerprint = 0 if layout is None else layout.fingerprint
        if self._told is None or (layout is not None and fingerprint != self._told):
            self._told = fingerprint
            self._monitor.begin(binding.compressor, facts(binding, number, layout))
        self._monitor.step(binding.compressor, number)


def facts(binding: Bound, number: int, layout: Layout | None) -> dict[str, Any]:
    """Facts of a compressor at work, from step ``number`` on: scheme (its settings), name (begins
    its collectives' names), version, torch, host, rank, ranks, and its groups."""
    return {
        "scheme": repr(binding.compressor),
        "name": binding.name,
        "version": __version__,
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "rank": binding.world.rank,
        "ranks": binding.world.size,
        "first_step": number,
        "exchange": binding.settings.exchange,
        "groups": []
        if layout is None
        else [_group(binding, layout, index) for index in range(len(layout.groups))],
    }


def _group(binding: Bound, layout: Layout, index: int) -> dict[str, Any]:
    """members: [name, quantised coordinates, full-precision coordinates] of each parameter."""
    group = layout.groups[index]
    return {
        "group": index,
        "part": group.part,
        "dtype": str(group.dtype).removeprefix("torch."),
        "coordinates": group.coordinates,
        "quantized": group.quantized,
        "buckets": -(-group.quantized // binding.settings.bucket_size),
        "exchange": binding.exchange.choice(group.coordinates) or binding.settings.exchange,
        "members": _members(layout, group),
    }


def _members(layout: Layout, group: Group) -> list[list[Any]]:
    found: dict[int, list[Any]] = {}
    for piece in group.pieces:
        size = piece.stop - piece.start
        quantized = min(size, max(0, group.quantized - piece.at))
        entry = found.setdefault(piece.slot, [layout.members[piece.slot].name, 0, 0])
        entry[1] += quantized
        entry[2] += size - quantized
    return list(found.values())
