"""Compare ranks before they end a round of LocalSGD."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.run.agreement import format_ranks, places_that_differ
from hvd_adaptive.run.worker import gather_patiently

if TYPE_CHECKING:
    from hvd_adaptive.transport.horovod_world import HorovodRounds
    from hvd_adaptive.transport.torch_world import TorchWorld

logger = logging.getLogger("hvd_adaptive")

LATE = (
    "LocalSGD: rank %d still waits for other ranks to end round %d: every rank must call step() "
    "equally often, and skip() where it takes no step; a rank that logs no such line is late"
)
ALIKE = (
    "LocalSGD: all ranks have moved their parameters in the same way: gradients are averaged at "
    "every step already (by DistributedDataParallel, as in a Trainer and after "
    "accelerator.prepare(model)), or ranks have the same data. Use the plain model"
)


@dataclass(frozen=True)
class TrainingPosition:
    """Position of a rank at the end of a round.

    Attributes:
        settings: Checksum of LocalSGD's keywords.
        start: (name, checksum) of the parameters that training began with; empty if they were
            compared before.
        reached: Checksum of the fragment's parameters; 0 if they were compared before.
        round: Number of rounds that ranks have agreed on before.
        has_moved: Whether the rank has moved parameters of the fragment since its last round.
        finished: Whether the rank called ``finish``.
        broken: Number of the first parameter that is not finite, or -1.
        skips: Whether ranks that are not finite are left out; if not, they end the round.
        kinds: Checksum of the parameters' dtypes, shapes and fragments.
        anchored: For each parameter, whether the round's beginning is known.
        takes_part: For each parameter, whether this rank has a reason to average it.
    """

    settings: int
    start: Sequence[tuple[str, int]]
    reached: int
    round: int
    has_moved: bool
    finished: bool
    broken: int
    skips: bool
    kinds: int
    anchored: Sequence[bool]
    takes_part: Sequence[bool]


@dataclass(frozen=True)
class Agreed:
    """Facts that all ranks know.

    Attributes:
        fails: Whether parameters that are not finite end the round.
        share: The number of ranks over that of those that count in the mean: they took a step, and
            are finite; 0 if none does.
        counts: Whether this rank does.
        is_finite: Whether this rank's parameters are.
        over: Whether all ranks have finished.
        broken: By rank, the number of its first parameter that is not finite.
        takes_part: For each parameter, whether some rank has a reason to average it.
    """

    fails: bool
    share: float
    counts: bool
    is_finite: bool
    over: bool
    broken: dict[int, int]
    takes_part: Sequence[bool]


def agree(world: TorchWorld | HorovodRounds | None, own: TrainingPosition) -> Agreed:
    """Return what all ranks know, a collective; ``world`` is None for this rank alone.

    Raises:
        RankMismatchError: Ranks differ, on every rank.
    """
    start = zlib.crc32(repr([c for _, c in own.start]).encode()) if own.start else 0
    numbers = [own.settings, own.kinds, own.round, start, own.has_moved, own.finished, own.broken]
    everyone, rank = [list(map(int, [*numbers, own.reached]))], 0
    if world is not None:
        if not world.is_current():
            remedy = "give it to hvd.elastic.TorchState(optimizer=...)"
            raise RuntimeError(f"LocalSGD: ranks have changed; {remedy}")
        rank = world.rank
        warn = functools.partial(logger.warning, LATE, rank, own.round)
        row = torch.tensor(everyone[0], device="cpu")
        everyone = gather_patiently(world, row, warn).tolist()
    settings, kinds, rounds, starts, moved, finished, broken, reached = zip(*everyone, strict=True)
    _check_equal(settings, kinds, rounds)
    counts = [bool(has) and index < 0 for has, index in zip(moved, broken, strict=True)]
    takes_part = own.takes_part
    if world is not None:
        flags = torch.tensor([own.takes_part, own.anchored], dtype=torch.uint8, device="cpu")
        both = world.gather_equal(flags.reshape(-1), "parts").view(world.size, 2, -1)
        if (both[:, 1] != both[0, 1]).any():
            what = "added, replaced or unfrozen different parameters"
            raise RankMismatchError(f"ranks have {what} in a round")
        if len(set(starts)) > 1:
            raise RankMismatchError(_different_starts(world, own, starts))
        if all(moved) and all(reached) and len(set(reached)) == 1:
            logger.warning("%s", ALIKE)
        takes_part = both[:, 0].any(dim=0).tolist()
    return Agreed(
        fails=max(broken) >= 0 and not (own.skips and any(counts)),
        share=len(everyone) / sum(counts) if any(counts) else 0.0,
        counts=counts[rank],
        is_finite=broken[rank] < 0,
        over=all(finished),
        broken={r: index for r, index in enumerate(broken) if index >= 0},
        takes_part=takes_part,
    )


def _check_equal(settings: Sequence[int], kinds: Sequence[int], rounds: Sequence[int]) -> None:
    """Raise RankMismatchError if ranks differ in what must be equal."""
    if len(set(settings)) > 1:
        raise RankMismatchError(
            "ranks disagree on LocalSGD's every, fragments, delay, mixing, momentum, lr or "
            "on_nonfinite, or on whether it compresses"
        )
    if len(set(kinds)) > 1:
        raise RankMismatchError(
            "ranks have different parameters in the optimizer's groups: add and replace parameters "
            "on all ranks, in one order, in the same round"
        )
    if len(set(rounds)) > 1:
        raise RankMismatchError(
            f"ranks have ended different numbers of rounds, {list(rounds)}: load states on all "
            "ranks or on none"
        )


def _different_starts(
    world: TorchWorld | HorovodRounds, own: TrainingPosition, starts: Sequence[int]
) -> str:
    """Return how ranks' beginnings differ, a collective of ranks with the same parameters."""
    first = ""
    if all(starts):
        found = places_that_differ(world, [checksum for _, checksum in own.start], "starts")
        place, ranks = next(iter(found.items()), (0, [0]))
        first = f" ({own.start[place][0]} of {format_ranks(ranks)} is not the first rank's)"
    return (
        f"ranks began with different parameters{first}: broadcast the first rank's before LocalSGD "
        "is constructed, and load states on all ranks or on none"
    )
