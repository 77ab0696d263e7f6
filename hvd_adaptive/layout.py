"""Define fusion groups: which coordinate of which parameter is in which payload.

The layout depends only on the parameters' names, shapes and dtypes, and on settings.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

LONGEST_NAME = 48  # characters of a parameter's name in a group's label
# A member of at least this fraction of a group has its own groups: copying takes longer than
# sending one more group.
ALONE = 4


@dataclass(frozen=True)
class Member:
    """A tensor of the layout; its slot is its index in the layout.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its dtype.
        part: Label of the codec that quantises it; None for full precision.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: str | None = ""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Piece:
    """Coordinates ``start`` to ``stop`` of the member in ``slot``, at ``at`` in the group."""

    slot: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Group:
    """The coordinates of one payload, of one dtype; quantised coordinates come first.

    Attributes:
        dtype: Their dtype.
        quantized: Number of quantised coordinates.
        full: Number of full-precision coordinates.
        pieces: Where each member's coordinates are.
        part: Label of the codec that encodes the group; "" is the compressor itself. Only groups of
            part "" contain members in full precision.
    """

    dtype: torch.dtype
    quantized: int = 0
    full: int = 0
    pieces: tuple[Piece, ...] = ()
    part: str = ""

    @property
    def coordinates(self) -> int:
        return self.quantized + self.full

    @property
    def slots(self) -> set[int]:
        return {piece.slot for piece in self.pieces}

    def moved(self, slots: int) -> Group:
        """Return the group of a layout that has ``slots`` more members before these."""
        pieces = tuple(replace(piece, slot=piece.slot + slots) for piece in self.pieces)
        return replace(self, pieces=pieces)


@dataclass(frozen=True)
class Layout:
    """Members in natural order of their names, cut into groups.

    ``fingerprint`` (64 bits) covers names, shapes, dtypes and groups; ranks compare it.
    """

    members: list[Member]
    groups: list[Group]
    fingerprint: int

    @functools.cached_property
    def pieces_of(self) -> list[list[tuple[int, Piece]]]:
        """Return the (group, piece) pairs of each slot, in the order of its coordinates."""
        pieces: list[list[tuple[int, Piece]]] = [[] for _ in self.members]
        for index, group in enumerate(self.groups):
            for piece in group.pieces:
                pieces[piece.slot].append((index, piece))
        return pieces

    @functools.cached_property
    def labels(self) -> list[str]:
        """Return each group's name in Horovod's timeline: its number, first and last member."""
        return [self._label(index, group.slots) for index, group in enumerate(self.groups)]

    def _label(self, index: int, slots: set[int]) -> str:
        ends = dict.fromkeys((min(slots), max(slots)))
        names = [re.sub(r"[^\w.-]", "_", self.members[slot].name)[-LONGEST_NAME:] for slot in ends]
        return f"group{index}.{'-'.join(names)}"


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts "layer.2" before "layer.10"."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def build_layout(
    members: Iterable[Member],
    *,
    min_numel: int,
    bucket_size: int,
    tail: str,
    most_coordinates: int,
    in_order: bool = False,
) -> Layout:
    """Cut members into groups of at most ``most_coordinates`` (rounded to whole buckets).

    A group holds members of one dtype and part. Members of fewer than ``min_numel`` coordinates and
    those without a part join their neighbours of part "" in full precision. A member of at least a
    quarter of a group (ALONE) has groups of its own, which need not be gathered, cut evenly at
    bucket boundaries.
    ``in_order`` keeps the given order.
    """
    ordered = list(members)
    if not in_order:
        ordered.sort(key=lambda member: (natural_order(member.name), member.name))
    most = max(bucket_size, most_coordinates // bucket_size * bucket_size)
    groups: list[Group] = []
    open_groups: dict[tuple[torch.dtype, str], _Builder] = {}
    for slot, member in enumerate(ordered):
        quantize = member.part is not None and member.numel >= min_numel
        kind = (member.dtype, (member.part or "") if quantize else "")
        if kind not in open_groups:
            open_groups[kind] = _Builder(*kind, most, bucket_size, groups)
        open_groups[kind].add(slot, member.numel, quantize)
    for builder in open_groups.values():
        builder.close()
    # Backward completes a group with its first member: that one's order is the launch's.
    groups.sort(key=lambda group: (min(group.slots), group.pieces[0].start))
    if tail == "full":
        groups = [_tail_moved(group, bucket_size) for group in groups]
    described = repr(
        [(m.name, m.shape, str(m.dtype)) for m in ordered]
        + [(str(g.dtype), g.quantized, g.full, list(g.pieces)) for g in groups]
        + [(index, g.part) for index, g in enumerate(groups) if g.part]
    )
    digest = hashlib.sha256(described.encode()).digest()
    return Layout(ordered, groups, int.from_bytes(digest[:8], "little"))


class _Builder:
    """Fill the groups of one dtype and part, one member at a time."""

    def __init__(
        self, dtype: torch.dtype, part: str, most: int, bucket_size: int, groups: list[Group]
    ) -> None:
        self.dtype, self.part, self.groups = dtype, part, groups
        self.most, self.bucket_size = most, bucket_size
        self.quantized: list[tuple[int, int, int]] = []
        self.full: list[tuple[int, int, int]] = []
        self.size = 0

    def add(self, slot: int, numel: int, quantize: bool) -> None:
        if ALONE * numel >= self.most:
            self._add_alone(slot, numel, quantize)
            return
        if self.size + numel > self.most:
            self.close()
        (self.quantized if quantize else self.full).append((slot, 0, numel))
        self.size += numel

    def close(self) -> None:
        if not self.quantized and not self.full:
            return
        self._put(self.quantized, self.full)
        self.quantized, self.full, self.size = [], [], 0

    def _add_alone(self, slot: int, numel: int, quantize: bool) -> None:
        buckets, count = -(-numel // self.bucket_size), -(-numel // self.most)
        edges = [min(numel, buckets * k // count * self.bucket_size) for k in range(count + 1)]
        for start, stop in itertools.pairwise(edges):
            piece = [(slot, start, stop)]
            self._put(piece, []) if quantize else self._put([], piece)

    def _put(self, quantized: list[tuple[int, int, int]], full: list[tuple[int, int, int]]) -> None:
        """Append a group of these pieces."""
        pieces, at = [], 0
        for slot, start, stop in [*quantized, *full]:
            pieces.append(Piece(slot, start, stop, at))
            at += stop - start
        count = sum(stop - start for _, start, stop in quantized)
        self.groups.append(Group(self.dtype, count, at - count, tuple(pieces), self.part))


def _tail_moved(group: Group, bucket_size: int) -> Group:
    """Return ``group`` with its partial last bucket in the section in full precision after it."""
    rest = group.quantized % bucket_size
    return replace(group, quantized=group.quantized - rest, full=group.full + rest)


def gather(group: Group, tensors: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
    """Copy the members' tensors, by slot, to ``flat``; None stands for zeros."""
    for piece in group.pieces:
        target = flat[piece.at : piece.at + piece.stop - piece.start]
        tensor = tensors[piece.slot]
        if tensor is None:
            target.zero_()
            continue
        tensor = tensor.detach()  # create_graph=True: payloads carry no graph
        if piece.stop - piece.start == tensor.numel():
            target.view(tensor.shape).copy_(tensor)
        else:
            target.copy_(tensor.reshape(-1)[piece.start : piece.stop])
