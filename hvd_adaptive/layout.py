"""Define fusion groups: which coordinate of which parameter is in which payload.

The layout depends only on the parameters' names, shapes, dtypes and order, and on settings.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

LONGEST_NAME = 48  # characters of a parameter's name in a group's label
# A member of at least this fraction of a group has its own groups: copying takes longer than
# sending one more group.
ALONE = 4
# The first group, which the backward pass completes last, is at most this fraction of others.
FIRST = 8
# A group is at most this fraction of all coordinates, so that most of them are sent before the
# backward pass ends, or has at most LEAST: sending one more group takes longer than waiting.
PARTS, LEAST = 8, 2**19


@dataclass(frozen=True)
class Member:
    """A tensor of the layout, in which its index is its slot; ``part`` is the label of the codec
    that quantises it, None for full precision.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: str | None = ""

    @functools.cached_property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Piece:
    """Coordinates ``start`` to ``stop`` of the member in ``slot``, at ``at`` in the group."""

    slot: int
    start: int
    stop: int
    at: int

    @functools.cached_property
    def numel(self) -> int:
        return self.stop - self.start

    @functools.cached_property
    def in_group(self) -> slice:
        """Return the range of these coordinates in their group."""
        return slice(self.at, self.at + self.numel)


@dataclass(frozen=True)
class Group:
    """The coordinates of one payload, of one dtype: ``quantized`` ones, then those in ``full``
    precision.

    ``part`` is the label of the codec that encodes the group; only groups of part "", that of the
    compressor itself, contain members in full precision.
    """

    dtype: torch.dtype
    quantized: int = 0
    full: int = 0
    pieces: tuple[Piece, ...] = ()
    part: str = ""

    @functools.cached_property
    def coordinates(self) -> int:
        return self.quantized + self.full

    @functools.cached_property
    def slots(self) -> frozenset[int]:
        return frozenset(piece.slot for piece in self.pieces)

    @functools.cached_property
    def sizes(self) -> list[int]:
        return [piece.numel for piece in self.pieces]

    def moved(self, slots: int) -> Group:
        """Return the group of a layout that has ``slots`` more members before these."""
        pieces = tuple(replace(piece, slot=piece.slot + slots) for piece in self.pieces)
        return replace(self, pieces=pieces)


@dataclass(frozen=True)
class Layout:
    """Members and their groups, of which the last one is launched first.

    Slots number members in natural order of their names, whatever the order of registration, on
    which groups depend. Ranks compare ``fingerprint``, 64 bits of names, shapes, dtypes and groups.
    """

    members: list[Member]
    groups: list[Group]
    fingerprint: int

    @functools.cached_property
    def identity(self) -> int:
        """Return 64 bits that cover names, shapes and dtypes, but not groups."""
        return digest([(m.name, m.shape, str(m.dtype)) for m in self.members])

    @functools.cached_property
    def pieces_of(self) -> list[list[tuple[int, Piece]]]:
        """Return the (group, piece) pairs of each slot, in the order of its coordinates."""
        pieces: list[list[tuple[int, Piece]]] = [[] for _ in self.members]
        for index, group in enumerate(self.groups):
            for piece in group.pieces:
                pieces[piece.slot].append((index, piece))
        return pieces

    @functools.cached_property
    def counts(self) -> list[int]:
        """Return the number of members of each group."""
        return [len(group.slots) for group in self.groups]

    @functools.cached_property
    def labels(self) -> list[str]:
        """Return each group's name in Horovod's timeline: its number, first and last member."""
        plain = [re.sub(r"[^\w.-]", "_", m.name)[-LONGEST_NAME:] for m in self.members]
        ends = [dict.fromkeys((min(group.slots), max(group.slots))) for group in self.groups]
        return [f"group{i}.{'-'.join(plain[slot] for slot in of)}" for i, of in enumerate(ends)]


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
    by_name: bool = False,
    as_given: bool = False,
    before: int | None = 0,
    total: int | None = None,
) -> Layout:
    """Cut members into groups of at most ``most_coordinates`` (rounded to whole buckets).

    A group holds members of one dtype and part. Members of fewer than ``min_numel`` coordinates and
    those without a part join their neighbours of part "" in full precision. A member of at least a
    quarter of ``most_coordinates`` (ALONE), or more than a group holds, has groups of its own,
    which need not be gathered, cut evenly at bucket boundaries.

    The backward pass reaches members in reverse order and completes a group with its first member.
    A group holds at most as many coordinates as there are before it (at least a FIRST-th of
    ``most_coordinates``), so little is left to exchange after the backward pass. It holds at most a
    PARTS-th of all, or LEAST, so the exchange begins early.

    Args:
        members: The tensors, in the order in which the model registers them.
        min_numel: Least number of coordinates of a quantised member.
        tail: "quantize" or "full", for a group's partial last bucket.
        by_name: Cut in natural order of names instead.
        as_given: Slots number members in the given order, not in that of names.
        before: Number of coordinates that the backward pass reaches after these members. None: all
            gradients arrive at the same time, and groups are as large as possible.
        total: Number of all coordinates, if there are others than these members'.
    """
    given = list(members)
    ordered = given if as_given else sorted(given, key=lambda m: (natural_order(m.name), m.name))
    first = most = max(bucket_size, most_coordinates // bucket_size * bucket_size)
    alone = -(-most // ALONE)
    if before is not None:
        first = max(bucket_size, most // FIRST)
        whole = sum(member.numel for member in given) if total is None else total
        most = min(most, max(bucket_size, LEAST, whole // PARTS) // bucket_size * bucket_size)
        alone = min(alone, most)
    slots = {id(member): slot for slot, member in enumerate(ordered)}
    groups: list[Group] = []
    open_groups: dict[tuple[torch.dtype, str], _Builder] = {}
    before = before or 0
    position: dict[int, int] = {}
    for member in ordered if by_name else given:
        slot = slots[id(member)]
        position[slot] = len(position)
        quantize = member.part is not None and member.numel >= min_numel
        kind = (member.dtype, (member.part or "") if quantize else "")
        if kind not in open_groups:
            open_groups[kind] = _Builder(*kind, most, first, alone, bucket_size, tail, groups)
        open_groups[kind].add(slot, member.numel, quantize, before)
        before += member.numel
    for builder in open_groups.values():
        builder.close()
    # Backward completes a group with its first member: that one's order is the launch's.
    groups.sort(key=lambda g: (min(position[slot] for slot in g.slots), g.pieces[0].start))
    described = (
        [(m.name, m.shape, str(m.dtype)) for m in ordered]
        + [(str(g.dtype), g.quantized, g.full, list(g.pieces)) for g in groups]
        + [(index, g.part) for index, g in enumerate(groups) if g.part]
    )
    return Layout(ordered, groups, digest(described))


def digest(described: object) -> int:
    """Return 64 bits of what ``repr`` shows."""
    return int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:8], "little")


@dataclass
class _Builder:
    """Append groups of one dtype and part to ``groups``, one member at a time. A group has at most
    ``most`` coordinates, the one that begins with the first member at most ``first``. Members of
    ``alone`` coordinates or more have groups of their own.
    """

    dtype: torch.dtype
    part: str
    most: int
    first: int
    alone: int
    bucket_size: int
    tail: str
    groups: list[Group]
    # Slot, first and last coordinate of the pieces of the open group, and whether to quantise them.
    pieces: list[tuple[int, int, int, bool]] = field(default_factory=list)
    size: int = 0
    limit: int = 0

    def add(self, slot: int, numel: int, quantize: bool, before: int) -> None:
        """Add a member; ``before``: the number of coordinates of all members before it."""
        if numel >= self.alone:
            self._add_alone(slot, numel, quantize, before)
            return
        if self.size + numel > self.limit:
            self.close()
            self.limit = self._limit(before)
        self.pieces.append((slot, 0, numel, quantize))
        self.size += numel

    def close(self) -> None:
        if self.pieces:
            self._put(self.pieces)
        self.pieces, self.size = [], 0

    def _limit(self, before: int) -> int:
        return min(self.most, max(self.first, before))

    def _add_alone(self, slot: int, numel: int, quantize: bool, before: int) -> None:
        size = min(self.most, max(self._limit(before), -(-numel // ALONE)))
        buckets, of_group = -(-numel // self.bucket_size), -(-size // self.bucket_size)
        count = -(-buckets // of_group)
        edges = [min(numel, buckets * k // count * self.bucket_size) for k in range(count + 1)]
        for start, stop in itertools.pairwise(edges):
            self._put([(slot, start, stop, quantize)])

    def _put(self, own: Sequence[tuple[int, int, int, bool]]) -> None:
        """Append a group of these pieces, quantised ones first."""
        pieces, at, quantized = [], 0, 0
        for slot, start, stop, quantize in sorted(own, key=lambda piece: not piece[3]):
            pieces.append(Piece(slot, start, stop, at))
            at += stop - start
            quantized += stop - start if quantize else 0
        if self.tail == "full":  # the partial last bucket belongs to the section after it
            quantized -= quantized % self.bucket_size
        self.groups.append(Group(self.dtype, quantized, at - quantized, tuple(pieces), self.part))
