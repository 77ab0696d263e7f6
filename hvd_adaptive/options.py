"""Define the settings that are given together: of an exchange, and of memory and threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from hvd_adaptive.base.checks import check_flag, check_integer, check_optional_integer, is_whole
from hvd_adaptive.keywords import Checked, declared, keyword

EXCHANGE_NAMES = ("allgather", "scatter_reduce", "hierarchical", "auto")


def check_second_stage_bits(name: str, value: Any) -> int | None:
    """Return bits of averages as an int, or None; raise ValueError for anything else."""
    if value is None:
        return None
    if not is_whole(value) or not (2 <= value <= 8 or value == 32):
        raise ValueError(
            f"{name}={value!r}: must be an integer from 2 to 8, 32 for full precision, or None"
        )
    return int(value)


@dataclass(frozen=True, kw_only=True, repr=False)
class ScatterReduce(Checked):
    """Settings of ``exchange="scatter_reduce"``.

    Each rank averages one part of a group for all, and sends this average to the others.

    Attributes:
        second_stage_bits: Bits of averages that are sent again, 2 to 8, or 32 for full precision.
            If None, an extra bit goes where it lowers the error more, for normal or Laplacian
            coordinates: to the first stage or to the averages. Averages get bits until the first
            stage gains more. They get 32 if the first stage is lossless.

    Raises:
        TypeError: A keyword is unknown.
        ValueError: A value is not allowed.

    Examples:
        >>> from hvd_adaptive import ALQ, ScatterReduce
        >>> compressor = ALQ(bits=3, exchange=ScatterReduce(second_stage_bits=4))
        >>> compressor.settings.exchange
        ScatterReduce(second_stage_bits=4)
    """

    name: ClassVar[str] = "scatter_reduce"

    second_stage_bits: int | None = keyword(None, check_second_stage_bits)


@dataclass(frozen=True, kw_only=True, repr=False)
class Hierarchical(ScatterReduce):
    """Settings of ``exchange="hierarchical"``.

    Ranks of a node average in full precision; the nodes' averages are compressed between nodes, by
    an allgather between two nodes, and by a scatter-reduce between more.

    Attributes:
        second_stage_bits: As in ScatterReduce. It has no effect between two nodes.
        ranks_per_node: Number of consecutive ranks on a node. If None, nodes are detected.

    Examples:
        >>> from hvd_adaptive import ALQ, Hierarchical
        >>> compressor = ALQ(bits=3, exchange=Hierarchical(ranks_per_node=8))
    """

    name: ClassVar[str] = "hierarchical"

    ranks_per_node: int | None = keyword(None, partial(check_optional_integer, least=1))


@dataclass(frozen=True, kw_only=True, repr=False)
class Auto(Hierarchical):
    """Settings of ``exchange="auto"``, which measures which exchange is fastest for each group.

    Attributes:
        second_stage_bits: As in ScatterReduce.
        ranks_per_node: As in Hierarchical.

    Examples:
        >>> from hvd_adaptive import ALQ, Auto
        >>> compressor = ALQ(bits=3, exchange=Auto(second_stage_bits=4))
    """

    name: ClassVar[str] = "auto"


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuning(Checked):
    """Memory, threads and checksums, which change no average.

    Groups have a size of their own, the keyword ``fusion_bytes`` of schemes.

    Attributes:
        in_flight_bytes: Maximum bytes of payloads, its own and received ones, that a rank holds at
            a time.
        checksum: Payloads contain a checksum of all their bytes, which receivers verify, so that a
            corrupt payload raises PayloadError and is never averaged. If False, corruption that no
            decoder detects becomes wrong numbers.
        worker: Whether a thread of the compressor encodes, sends and decodes groups while the
            backward pass goes on, with gradients on the CPU. If False, the calling thread does so.
            The averages are the same bits. Averages that arrive before the end of the backward
            pass take memory of their own, at most the gradients' size. It may differ between ranks.

    Raises:
        TypeError: A keyword is unknown.
        ValueError: A value is not allowed.

    Examples:
        >>> from hvd_adaptive import ALQ, Tuning
        >>> compressor = ALQ(bits=3, tuning=Tuning(worker=False))
        >>> compressor.settings.tuning.worker
        False
    """

    in_flight_bytes: int = keyword(512 * 2**20, partial(check_integer, least=4096))
    checksum: bool = keyword(True, check_flag)
    worker: bool = keyword(True, check_flag, agreed=False)


KINDS: dict[str, type[Checked]] = {
    kind.__name__: kind for kind in (ScatterReduce, Hierarchical, Auto, Tuning)
}
# How keywords of these classes are written, by name, for errors about unknown keywords.
INSIDE = {
    name: f"{'tuning' if kind is Tuning else 'exchange'}={kind.__name__}({name}=...)"
    for kind in reversed(KINDS.values())
    for name in declared(kind)
}


def check_exchange(name: str, value: Any) -> str | ScatterReduce | None:
    """Return an exchange, by its name if all its settings are defaults, or raise ValueError."""
    if isinstance(value, ScatterReduce):
        return value if value.given() else value.name
    if value is not None and not (isinstance(value, str) and value in EXCHANGE_NAMES):
        allowed = ", ".join(map(repr, EXCHANGE_NAMES))
        raise ValueError(
            f"{name}={value!r}: must be one of {allowed}, an object such as "
            "ScatterReduce(second_stage_bits=4), or None"
        )
    return value


def check_tuning(name: str, value: Any) -> Tuning:
    """Return ``value`` if it is a Tuning; raise ValueError otherwise."""
    if not isinstance(value, Tuning):
        raise ValueError(f"{name}={value!r}: must be a Tuning, such as Tuning(worker=False)")
    return value


def plain(value: Any) -> Any:
    """Return a keyword's value as plain data, for states: {name of the class: keywords}."""
    return {type(value).__name__: value.given()} if isinstance(value, Checked) else value


def from_plain(value: Any) -> Any:
    """Return what ``plain`` was given; raise TypeError or ValueError if its keywords are wrong."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, keywords),) = value.items()
        if name in KINDS and isinstance(keywords, Mapping):
            return KINDS[name](**keywords)
    return value
