"""Define Round: one average of a fragment, from what this rank has learned until it begins."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_adaptive import states
from hvd_adaptive.base.finite import wide_of
from hvd_adaptive.hooks.anchors import Anchors
from hvd_adaptive.hooks.background import Background
from hvd_adaptive.hooks.fragments import Fragments
from hvd_adaptive.hooks.local_checks import tensors_like
from hvd_adaptive.hooks.round_agreement import TrainingPosition, agree
from hvd_adaptive.hooks.rounds import RoundExchange

Parameter = torch.nn.Parameter


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
            anchors.move(list(self.ways), list(self.ways.values()), mixing)
        if self.values:
            anchors.start_at(list(self.values), list(self.values.values()), mixing)


class Round:
    """One average of a fragment.

    ``run`` may be called in another thread: what this rank has learned is copied before, and its
    parameters may change meanwhile. ``exchange`` is None for one rank.
    """

    def __init__(
        self,
        exchange: RoundExchange | None,
        fragment: int,
        parameters: Sequence[Parameter],
        anchors: Anchors,
        position: TrainingPosition,
    ) -> None:
        self._exchange, self._fragment = exchange, fragment
        self._parameters, self._position = parameters, position
        mine = [p for p, part in zip(parameters, position.takes_part, strict=True) if part]
        self._ways = {p: anchors.way(p) for p in mine if p in anchors}
        self._values = {p: _wide(p) for p in mine if p not in anchors}

    @torch.no_grad()
    def run(self) -> Outcome:
        """Average, a collective; raise RankMismatchError if ranks differ (``agree``)."""
        agreed = agree(None if self._exchange is None else self._exchange.world, self._position)
        share, applies = agreed.share, agreed.share > 0 and not agreed.fails
        outcome = Outcome(self._fragment, applies, agreed.is_finite, agreed.over)
        if agreed.fails:
            outcome.broken = agreed.broken
        elif applies:
            flags = zip(self._parameters, agreed.takes_part, self._position.anchored, strict=True)
            averaged = [(p, is_anchored) for p, takes_part, is_anchored in flags if takes_part]
            old = [p for p, is_anchored in averaged if is_anchored]
            new = [p for p, is_anchored in averaged if not is_anchored]
            outcome.ways = self._average_ways(old, agreed.counts, share)
            outcome.values = self._average_values(new, share if agreed.counts else 0.0)
        return outcome

    def _average_ways(
        self, parameters: list[Parameter], counts: bool, share: float
    ) -> dict[Parameter, torch.Tensor]:
        own = self._ways if counts else {}
        ways = [own[p] if p in own else torch.zeros_like(p) for p in parameters]
        if self._exchange is not None and ways:
            self._exchange.lay_out(self._fragment, parameters)
            ways = self._exchange.average(parameters, ways)
        return {p: way.mul_(share) for p, way in zip(parameters, ways, strict=True)}

    def _average_values(
        self, parameters: list[Parameter], share: float
    ) -> dict[Parameter, torch.Tensor]:
        own = (self._values[p] if p in self._values else _wide(p) for p in parameters)
        values = [value.mul_(share) if share else torch.zeros_like(value) for value in own]
        if self._exchange is not None and values:
            values = self._exchange.average_plainly(values)
        return dict(zip(parameters, values, strict=True))


class Pending:
    """A round, or its outcome, that is applied after some steps that this rank takes meanwhile."""

    def __init__(self, result: Background[Outcome] | Outcome, steps: int) -> None:
        self._result, self.steps = result, steps

    def join(self) -> None:
        """Wait until the round has ended, in whatever way."""
        if isinstance(self._result, Background):
            self._result.join()

    @property
    def has_failed(self) -> bool:
        """Return whether the round, which has ended, has failed."""
        return isinstance(self._result, Background) and self._result.exception() is not None

    def outcome(self) -> Outcome:
        """Return the outcome, or raise the round's error."""
        if isinstance(self._result, Background):
            self.join()
            self._result = self._result.result()
        return self._result

    def state_dict(self, parameters: Sequence[Parameter]) -> dict[str, Any]:
        """Return the outcome and the steps as plain values; waits for the round."""
        outcome = self.outcome()
        return {
            "steps": self.steps,
            "fragment": outcome.fragment,
            "applies": outcome.applies,
            "is_finite": outcome.is_finite,
            "ways": [_cloned(outcome.ways.get(p)) for p in parameters],
            "values": [_cloned(outcome.values.get(p)) for p in parameters],
        }

    @classmethod
    def loaded(cls, state: Any, parameters: Sequence[Parameter], fragments: int) -> Pending | None:
        """Return what ``state_dict`` returned, or None for None; raise ValueError if it is of
        another model.
        """
        if state is None:
            return None
        of = "state: pending"
        outcome = Outcome(
            states.whole(state, "fragment", 0, fragments - 1, of=of),
            states.flag(state, "applies", of),
            states.flag(state, "is_finite", of),
            ways=_by_parameter(state, "ways", parameters),
            values=_by_parameter(state, "values", parameters),
        )
        return cls(outcome, states.whole(state, "steps", 1, of=of))


def position_of(
    parameters: Sequence[Parameter],
    fragments: Fragments,
    anchors: Anchors,
    fragment: int,
    compares: bool,
    **known: Any,
) -> TrainingPosition:
    """Return this rank's position at the end of a fragment's round.

    Ranks have not compared their models yet if ``compares``. ``known`` are the attributes that do
    not follow from the parameters.
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


def _cloned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _by_parameter(
    state: Mapping[str, Any], name: str, parameters: Sequence[Parameter]
) -> dict[Parameter, torch.Tensor]:
    tensors = tensors_like(parameters, state, name, "state: pending")
    pairs = zip(parameters, tensors, strict=True)
    return {p: tensor.to(p.device, copy=True) for p, tensor in pairs if tensor is not None}
