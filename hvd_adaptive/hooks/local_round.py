"""Define Round: ranks compare their positions, and average what they have learned of a fragment."""

from __future__ import annotations

import functools
import itertools
import logging
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_adaptive import states
from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.base.tensors import wide_of
from hvd_adaptive.hooks.fragments import Anchors, Fragments, clones
from hvd_adaptive.hooks.local_checks import tensors_like
from hvd_adaptive.hooks.rounds import RoundExchange
from hvd_adaptive.run.agreement import format_ranks, places_that_differ
from hvd_adaptive.run.driver import gather_patiently
from hvd_adaptive.transport.horovod_world import HorovodRounds
from hvd_adaptive.transport.torch_world import TorchWorld

Parameter = torch.nn.Parameter
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


@dataclass
class Outcome:
    """Result of a round, for ``Anchors``.

    Attributes:
        applies: Whether any rank counted; if not, nothing changes.
        is_finite: Whether this rank's parameters were finite.
        over: Whether all ranks have finished.
        broken: If parameters that are not finite end the round: by rank, the number of the first.
        ways: Averages of the ways of parameters that have an anchor.
        values: Averages of parameters that had none.
    """

    fragment: int
    applies: bool
    is_finite: bool
    over: bool = False
    broken: dict[int, int] = field(default_factory=dict)
    ways: dict[Parameter, torch.Tensor] = field(default_factory=dict)
    values: dict[Parameter, torch.Tensor] = field(default_factory=dict)

    def apply(self, anchors: Anchors, mixing: float) -> None:
        """Move anchors and parameters to where the round ends; see ``Anchors.move``."""
        mixing = mixing if self.is_finite else 0.0
        if self.ways:
            anchors.move(self.ways, mixing)
        if self.values:
            anchors.start_at(self.values, mixing)


class Round:
    """One average of a fragment.

    ``run`` may be called in another thread: what this rank has learned is copied before, and its
    parameters may change meanwhile. ``exchange`` is None for one rank.
    """

    def __init__(
        self,
        exchange: RoundExchange | None,
        fragments: Fragments,
        fragment: int,
        parameters: Sequence[Parameter],
        anchors: Anchors,
        position: TrainingPosition,
    ) -> None:
        self._exchange, self._fragments, self._fragment = exchange, fragments, fragment
        self._parameters, self._position = parameters, position
        mine = [p for p, part in zip(parameters, position.takes_part, strict=True) if part]
        self._ways = {p: anchors.way(p) for p in mine if p in anchors}
        self._values = {p: _wide(p) for p in mine if p not in anchors}

    @torch.inference_mode(False)
    @torch.no_grad()
    def run(self) -> Outcome:
        """Average, a collective; raise RankMismatchError if ranks differ (``agree``)."""
        world = None if self._exchange is None else self._exchange.world
        outcome, counts, takes_part = agree(world, self._position, self._fragment)
        if not outcome.applies:
            return outcome
        chosen = list(itertools.compress(self._parameters, takes_part))
        anchored = set(itertools.compress(self._parameters, self._position.anchored))
        old = [p for p in chosen if p in anchored]
        new = [p for p in chosen if p not in anchored]
        share = len(counts) / sum(counts)
        own = counts[0 if world is None else world.rank]
        ways = [self._ways[p] if own and p in self._ways else torch.zeros_like(p) for p in old]
        if self._exchange is not None and ways:
            self._fragments.averaged[self._fragment] = old
            self._exchange.lay_out(self._fragments)
            ways = self._exchange.average(old, ways)
        outcome.ways = {p: way.mul_(share) for p, way in zip(old, ways, strict=True)}
        values = [self._values[p] if p in self._values else _wide(p) for p in new]
        values = [value.mul_(share) if own else torch.zeros_like(value) for value in values]
        if self._exchange is not None and values:
            values = self._exchange.average_plainly(values)
        outcome.values = dict(zip(new, values, strict=True))
        return outcome


class Pending:
    """A round whose outcome is applied after some steps that this rank takes meanwhile."""

    def __init__(self, result: Future[Outcome], steps: int) -> None:
        self._result, self.steps = result, steps

    def join(self) -> None:
        """Wait until the round has ended, in whatever way."""
        self._result.exception()

    @property
    def has_failed(self) -> bool:
        """Return whether the round has ended with an error."""
        return self._result.done() and self._result.exception() is not None

    def outcome(self) -> Outcome:
        """Return the outcome, or raise the round's error."""
        return self._result.result()

    def state_dict(self, parameters: Sequence[Parameter]) -> dict[str, Any]:
        """Return the outcome and the steps as plain values; waits for the round."""
        outcome = self.outcome()
        return {
            "steps": self.steps,
            "fragment": outcome.fragment,
            "applies": outcome.applies,
            "is_finite": outcome.is_finite,
            "ways": clones(outcome.ways, parameters),
            "values": clones(outcome.values, parameters),
        }

    @classmethod
    def loaded(cls, state: Any, parameters: Sequence[Parameter], fragments: int) -> Pending | None:
        """Return what ``state_dict`` returned, or None for None; raise ValueError if it is of
        another model.
        """
        if state is None:
            return None
        of = "state: pending"
        result: Future[Outcome] = Future()
        result.set_result(
            Outcome(
                states.whole(state, "fragment", 0, fragments - 1, of=of),
                states.flag(state, "applies", of),
                states.flag(state, "is_finite", of),
                ways=_by_parameter(state, "ways", parameters),
                values=_by_parameter(state, "values", parameters),
            )
        )
        return cls(result, states.whole(state, "steps", 1, of=of))


def agree(
    world: TorchWorld | HorovodRounds | None, own: TrainingPosition, fragment: int
) -> tuple[Outcome, list[bool], Sequence[bool]]:
    """Return the outcome without averages, a collective; ``world`` is None for this rank alone.

    The second result says by rank whether it counts in the mean: it took a step, and is finite. The
    third one says for each parameter whether some rank has a reason to average it.

    Raises:
        RankMismatchError: Ranks differ, on every rank.
    """
    start = zlib.crc32(repr([c for _, c in own.start]).encode()) if own.start else 0
    numbers = [own.settings, own.kinds, own.round, start, own.has_moved, own.finished, own.broken]
    everyone, rank = [list(map(int, [*numbers, own.reached]))], 0
    if world is not None:
        if not world.is_current():
            raise RuntimeError(
                "LocalSGD: ranks have changed; call connect() on every rank, or give it to "
                "hvd.elastic.TorchState(optimizer=...), which does"
            )
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
            raise RankMismatchError(
                "ranks have added, replaced or unfrozen different parameters in a round"
            )
        if len(set(starts)) > 1:
            raise RankMismatchError(_different_starts(world, own, starts))
        if all(moved) and all(reached) and len(set(reached)) == 1:
            logger.warning("%s", ALIKE)
        takes_part = both[:, 0].any(dim=0).tolist()
    fails = max(broken) >= 0 and not (own.skips and any(counts))
    outcome = Outcome(
        fragment,
        applies=any(counts) and not fails,
        is_finite=broken[rank] < 0,
        over=all(finished),
        broken={r: index for r, index in enumerate(broken) if fails and index >= 0},
    )
    return outcome, counts, takes_part


def _check_equal(settings: Sequence[int], kinds: Sequence[int], rounds: Sequence[int]) -> None:
    """Raise RankMismatchError if ranks differ in what must be equal."""
    differ = {
        "ranks disagree on LocalSGD's every, fragments, delay, mixing, momentum, lr or "
        "on_nonfinite, or on whether it compresses": settings,
        "ranks have different parameters in the optimizer's groups: add and replace parameters "
        "on all ranks, in one order, in the same round": kinds,
        f"ranks have ended different numbers of rounds, {list(rounds)}: load states on all "
        "ranks or on none": rounds,
    }
    for message, numbers in differ.items():
        if len(set(numbers)) > 1:
            raise RankMismatchError(message)


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


def position_of(
    parameters: Sequence[Parameter],
    fragments: Fragments,
    anchors: Anchors,
    fragment: int,
    compares: bool,
    **known: Any,
) -> TrainingPosition:
    """Return this rank's position at the end of a fragment's round; ranks have not compared their
    models yet if ``compares``. ``known`` are the attributes that no parameter shows.
    """
    pairs = [(p, fragments[p] == fragment) for p in parameters]
    kinds = [(p.dtype, p.shape, fragments[p]) for p in parameters]
    start, reached = [], 0
    if compares:
        old = [p for p in parameters if p in anchors]
        start = list(zip(map(fragments.name_of, old), anchors.checksums(old), strict=True))
        own = states.checksums(p for p, mine in pairs if mine)
        reached = zlib.crc32(repr(own).encode()) or 1
    broken = (i for i, (p, mine) in enumerate(pairs) if mine and not bool(p.isfinite().all()))
    return TrainingPosition(
        start=start,
        reached=reached,
        broken=next(broken, -1),
        kinds=zlib.crc32(repr(kinds).encode()),
        anchored=[p in anchors for p in parameters],
        takes_part=[mine and (p.requires_grad or anchors.has_moved(p)) for p, mine in pairs],
        **known,
    )


def not_finite(names: Mapping[int, str]) -> FloatingPointError:
    """Return the error about parameters, by rank, that end a round because they are not finite."""
    listed = ", ".join(f"{name} of rank {rank}" for rank, name in names.items())
    return FloatingPointError(
        f"LocalSGD: parameters are not finite: {listed}. Nothing was averaged. Load a checkpoint "
        "on every rank, or set on_nonfinite='skip'"
    )


def _wide(parameter: Parameter) -> torch.Tensor:
    return parameter.detach().to(wide_of(parameter.dtype), copy=True)


def _by_parameter(
    state: Mapping[str, Any], name: str, parameters: Sequence[Parameter]
) -> dict[Parameter, torch.Tensor]:
    tensors = tensors_like(parameters, state, name, "state: pending")
    pairs = zip(parameters, tensors, strict=True)
    return {p: tensor.to(p.device, copy=True) for p, tensor in pairs if tensor is not None}
