"""Average models every few steps, compressed, instead of gradients at every step.

    optimizer = LocalSGD(torch.optim.AdamW(model.parameters()), every=20, compression=ALQ(bits=4))
    ...
    optimizer.step()    # each rank alone; every 20th step averages
    ...
    optimizer.finish()  # at the end of training

The ranks are Horovod's or torch.distributed's.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from hvd_adaptive import states
from hvd_adaptive.base.checks import check_choice, check_integer
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.hooks.anchors import Anchors
from hvd_adaptive.hooks.background import Background
from hvd_adaptive.hooks.fragments import Fragments, is_due
from hvd_adaptive.hooks.horovod import elastic
from hvd_adaptive.hooks.local_checks import (
    check_arguments,
    check_mixing,
    check_own,
    moved_of,
    names_of,
    own_checksum,
)
from hvd_adaptive.hooks.local_round import Outcome, Pending, Round
from hvd_adaptive.hooks.round_agreement import TrainingPosition
from hvd_adaptive.hooks.rounds import RoundExchange, find_world
from hvd_adaptive.hooks.wrapped_optimizer import WrappedOptimizer

logger = logging.getLogger("hvd_adaptive")
_numbers = itertools.count()
Parameter = torch.nn.Parameter


class LocalSGD(WrappedOptimizer):
    """Optimizer whose ranks train alone for some steps, and then average what they have learned.

    A round is ``every`` steps of ``optimizer`` on each rank. At its end

    1. each rank encodes how far its parameters have moved since the round began;
    2. the averages of these differences are the gradients of an outer SGD, which moves the
       parameters that the round began with;
    3. every rank continues from there. Parameters are bitwise equal on all ranks.

    With momentum 0 and rate 1 the parameters become the ranks' mean (local SGD, Stich 2019).
    DiLoCo (Douillard et al. 2023) has Nesterov momentum 0.9 and rate 0.7. Buffers, such as those of
    batch normalisation, and the state of ``optimizer`` stay each rank's own.

    Streaming DiLoCo (Douillard et al. 2025, Algorithm 2) averages the model in parts. Each of the
    ``fragments`` has a round every ``every`` steps, in turn, and outer momentum of its own. With a
    ``delay`` of τ a round that begins after step t runs in the background, and is applied after
    step t + τ:

        Δ(t) = mean over ranks m of φ - θ_m(t)
        φ ← OuterSGD(φ, Δ(t))
        θ_m(t + τ) ← α θ_m(t + τ) + (1 - α) φ

    φ are the fragment's parameters that all ranks share, θ_m those of a rank, and α is ``mixing``.
    With α = 0 the τ steps are discarded. With α > 0 ranks differ between rounds.

    A round averages the parameters that the groups of ``optimizer`` hold then and that require a
    gradient. One that was added, replaced or unfrozen is averaged in full precision in its first
    round. A frozen one keeps its bits, after it has adopted the next average if ranks differ in it.

    Ranks must call ``step`` equally often, or ``skip`` in its place. ``torch.amp.GradScaler`` does:
    a step that it skips on one rank counts for the round, and changes nothing on that rank.

    Learning rate schedules take this object or ``optimizer``. For elastic Horovod give this object
    to ``hvd.elastic.TorchState(model=model, optimizer=...)``. When workers join or leave, all
    continue from the first rank's parameters and state.

    Args:
        optimizer: A torch optimizer. Its parameters must be equal on all ranks.
        every: Steps of a round, >= 1.
        compression: A compressor that serves only this object; None averages in float32, or in
            float64 if the parameters have it.
        momentum: Nesterov momentum of the outer SGD, at least 0 and below 1.
        lr: Rate of the outer SGD, above 0.
        fragments: Number of parts of the model that are averaged in turn, from 1 to ``every``.
        delay: Steps between a round's beginning and its application, from 0 to
            ``every // fragments``; 0 averages at once.
        mixing: Share of its own parameters that a rank keeps when a delayed round is applied, at
            least 0 and below 1. None is 0.5 with a delay.
        named_parameters: As from ``model.named_parameters()``; parameter_bits, scope="tensor" and
            residuals in checkpoints refer to these names. If None, parameters are numbered.
        process_group: A group of torch.distributed.
        process_set: A process set of Horovod. If both are None, all ranks of Horovod take part if
            it is initialised, else those of torch.distributed's default group, else this process.
        on_nonfinite: What a round does if a rank's parameters contain NaN or Inf. "raise" raises
            ``FloatingPointError`` on all ranks, before anything changes. "skip" leaves that rank
            out of the mean, from which it continues.

    Raises:
        ValueError: An argument is not allowed.

    Examples:
        >>> from hvd_adaptive import EDEN, LocalSGD
        >>> inner = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> optimizer = LocalSGD(inner, every=8, compression=EDEN(bits=4))
        >>> net(inputs).sum().backward()
        >>> optimizer.step()  # every eighth one averages the ranks' models
        >>> optimizer.finish()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        compression: GradientCompressor | None = None,
        momentum: float = 0.0,
        lr: float = 1.0,
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        process_set: Any = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        check_arguments(optimizer, compression, momentum, lr)
        super().__init__(optimizer)
        self.compressor = compression
        self.every = check_integer("every", every, 1)
        self.fragments = check_integer("fragments", fragments, 1, self.every)
        self.delay = check_integer("delay", delay, 0, self.every // self.fragments)
        self.mixing = check_mixing(mixing, self.delay)
        self.on_nonfinite = check_choice("on_nonfinite", on_nonfinite, ("raise", "skip"))
        self.rounds = self._agreements = self._counted = 0
        self._has_moved = [False] * self.fragments
        self._fragments = Fragments(self._parameters(), self.fragments)
        trained = [p for p in self._parameters() if p.requires_grad]
        self._anchors = Anchors(trained, float(momentum), float(lr))
        outer = float(momentum), float(lr)
        streams = self.fragments, self.delay, self.mixing
        settings = (self.every, *outer, *streams, compression is None, on_nonfinite)
        self._settings = zlib.crc32(repr(settings).encode())
        self._ranks = process_group, process_set, f"hvd_adaptive.local{next(_numbers)}"
        self._names = names_of(named_parameters, compression)
        self._pending: Pending | None = None
        self.connect()
        elastic.register_handler(LocalSGD, elastic.LocalStateHandler)

    # Steps ----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of this rank alone; the last one of a round averages, a collective.

        Raises:
            RankMismatchError: Ranks differ in settings, rounds or parameter groups, or began with
                different parameters.
            FloatingPointError: A rank's parameters are not finite, and ``on_nonfinite="raise"``.
        """
        loss, taken = self._step_optimizer(closure)
        if taken:
            self._has_moved = [True] * self.fragments
        self._count()
        return loss

    def skip(self) -> None:
        """Count a step that this rank does not take; the last one of a round averages.

        Call it in the place of ``step``, so that all ranks end a round together.
        """
        self._count()

    def _count(self) -> None:
        """Apply the round that is due, and begin the next one."""
        if self._pending is not None:
            self._pending.steps -= 1
            if not self._pending.steps:
                self._complete()
        self._counted += 1
        step = self._counted
        self._counted %= self.every
        if is_due(step, self.every, self.fragments):
            if self.delay:
                self._begin_delayed()
            else:
                self._round_at_once(finished=False)

    def average(self) -> None:
        """End the round of each fragment now. Every rank must end them, too.

        A rank whose last step ends a round of the whole model need not call this. Ranks that took
        no step since the last round do not count.
        """
        self._complete()
        self._counted = 0
        for _ in range(self.fragments):
            self._round_at_once(finished=False)

    def finish(self) -> None:
        """End the training of this rank; call it once on every rank.

        What was learned since the last round is averaged. Ranks may have taken different numbers of
        steps: those that finish early take part in the others' rounds without counting, and return
        when all have finished, with equal parameters.
        """
        self._complete()
        self._counted = ended = 0
        while ended < self.fragments:
            ended = ended + 1 if self._round_at_once(finished=True) else 0

    # Rounds ---------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Find the ranks, which elastic Horovod may have changed; they compare their models next.

        ``hvd.elastic.TorchState`` calls this.
        """
        self._wait()
        if self._pending is not None and self._pending.has_failed:
            self._pending, self._has_moved = None, [True] * self.fragments
        self._compared = False
        self._exchange: RoundExchange | None = None
        if self.compressor is not None:
            self.compressor.close()
        world = find_world(*self._ranks)
        if world is None:
            return
        averaged: list[list[Parameter]] = [[] for _ in range(self.fragments)]
        for parameter in self._anchors:
            averaged[self._fragments[parameter]].append(parameter)
        self._exchange = RoundExchange(world, averaged, self._name_of, self.compressor, self._wait)

    def _wait(self) -> None:
        """Wait until no round is in progress; its outcome is applied later."""
        if self._pending is not None:
            self._pending.join()

    def _round_at_once(self, finished: bool) -> bool:
        """Average the next fragment; return whether all ranks have finished."""
        outcome = self._begin(finished).run()
        self._apply(outcome, 0.0)
        return outcome.over

    def _begin_delayed(self) -> None:
        """Begin to average the next fragment in the background."""
        self._complete()
        device = next((p.device for p in self._anchors), torch.device("cpu"))
        run = self._begin(finished=False).run
        result = Background(run, device, "hvd_adaptive.local_sgd")
        self._pending = Pending(result, self.delay)

    def _complete(self) -> None:
        """Apply the round in the background, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._apply(pending.outcome(), self.mixing)

    @torch.no_grad()
    def _begin(self, finished: bool) -> Round:
        """Return the round of the next fragment."""
        parameters = self._parameters()
        fragment = self._agreements % self.fragments
        self._fragments.keep(parameters)
        self._anchors.keep(parameters)
        position = self._position(parameters, fragment, finished)
        self._agreements += 1
        self._has_moved[fragment] = False
        self._compared = True
        return Round(self._exchange, fragment, parameters, self._anchors, position)

    def _position(
        self, parameters: list[Parameter], fragment: int, finished: bool
    ) -> TrainingPosition:
        mine = [self._fragments[p] == fragment for p in parameters]
        kinds = [(p.dtype, p.shape, self._fragments[p]) for p in parameters]
        pairs = list(zip(parameters, mine, strict=True))
        return TrainingPosition(
            settings=self._settings,
            start=[] if self._compared else self._start(parameters),
            reached=0 if self._compared else _reached([p for p, m in pairs if m]),
            round=self._agreements,
            has_moved=self._has_moved[fragment],
            finished=finished,
            broken=next((i for i, (p, m) in enumerate(pairs) if m and not _is_finite(p)), -1),
            skips=self.on_nonfinite == "skip",
            kinds=zlib.crc32(repr(kinds).encode()),
            anchored=[p in self._anchors for p in parameters],
            takes_part=[m and (p.requires_grad or self._anchors.has_moved(p)) for p, m in pairs],
        )

    @torch.no_grad()
    def _apply(self, outcome: Outcome, mixing: float) -> None:
        """Move parameters and anchors to where a round ends.

        Args:
            outcome: The outcome.
            mixing: Share of itself that a parameter keeps.
        """
        if outcome.broken:
            self._raise_not_finite(outcome.broken)
        if not outcome.applies:
            return
        outcome.apply(self._anchors, mixing)
        self._has_moved[outcome.fragment] = mixing > 0
        if not outcome.is_finite:
            self._forget_broken_state()
        self.rounds += 1

    def _start(self, parameters: list[Parameter]) -> list[tuple[str, int]]:
        """Return the names of the parameters that have anchors, with checksums of these."""
        known = [p for p in parameters if p in self._anchors]
        sums = self._anchors.checksums(known)
        return list(zip(map(self._name_of, known), sums, strict=True))

    def _name_of(self, parameter: Parameter) -> str:
        """Return the name of a parameter, or its number."""
        number = self._fragments.number_of(parameter)
        return self._names.get(parameter, f"parameter {number}" if self._names else str(number))

    def _raise_not_finite(self, broken: dict[int, int]) -> None:
        parameters = self._parameters()
        told = ", ".join(
            f"{self._name_of(parameters[index])} of rank {rank}" for rank, index in broken.items()
        )
        raise FloatingPointError(
            f"LocalSGD: parameters are not finite: {told}. Nothing was averaged. Load a checkpoint "
            "on every rank, or set on_nonfinite='skip'"
        )

    def _forget_broken_state(self) -> None:
        """Drop this rank's optimizer state that would bring NaN back."""
        for parameter in self._parameters():
            values = [v for v in self.state.get(parameter, {}).values() if torch.is_tensor(v)]
            if not all(bool(value.isfinite().all()) for value in values):
                del self.state[parameter]
        logger.warning(
            "LocalSGD: this rank's parameters were not finite after round %d: it continues from "
            "the others' mean, and its optimizer's state that was not finite begins anew",
            self.rounds,
        )

    @property
    def _rank(self) -> int:
        return 0 if self._exchange is None else self._exchange.world.rank

    # State ----------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the compressor's figures of the last round, and more.

        The further keys are rounds (how many there were) and wire_bytes_per_step.
        """
        told = {} if self.compressor is None else self.compressor.report()
        ranks = 1 if self._exchange is None else self._exchange.world.size
        ring = 2 * (ranks - 1) / ranks * self._anchors.full_bytes / self.fragments
        per_step = told.get("wire_bytes", ring) * self.fragments / self.every
        return told | {"rounds": self.rounds, "wire_bytes_per_step": per_step}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the model's parameters.

        Within a round, parameters and this state are each rank's own, so every rank must save both.
        A round in the background is waited for, and its result is saved. With
        torch.distributed.checkpoint use ``hvd_adaptive.checkpoint.PerRank``.
        """
        parameters, pending = self._parameters(), self._pending
        self._wait()
        self._fragments.keep(parameters)
        inner = self.optimizer.state_dict()
        saved = None if pending is None else pending.state_dict(parameters)
        return (
            self._anchors.state_dict(parameters)
            | self._fragments.state_dict(parameters)
            | {
                "optimizer": inner,
                "steps": self._counted,
                "moved": list(self._has_moved),
                "rounds": self.rounds,
                "agreements": self._agreements,
                "pending": saved,
                "own": {"rank": self._rank, "checksum": own_checksum(self._rank, inner, saved)},
                "compressor": None if self.compressor is None else self.compressor.state_dict(),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; load the model's parameters as well.

        Raises:
            ValueError: The state is of another model or compressor, incomplete, or was saved within
                a round by another rank.
        """
        check_own(state, self._rank)
        self.load_from(state)

    def load_from(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned on another rank, whose parameters this one has, too."""
        anchors, parameters = states.entry(state, "anchors"), self._parameters()
        if len(anchors) != len(parameters) or any(
            anchor is not None and getattr(anchor, "shape", None) != p.shape
            for anchor, p in zip(anchors, parameters, strict=True)
        ):
            raise ValueError("state: anchors are not those of this optimizer's parameters")
        counted = states.whole(state, "steps", 0, self.every - 1)
        rounds, agreements = states.whole(state, "rounds"), states.whole(state, "agreements")
        moved, fragments = (
            moved_of(state, self.fragments),
            self._fragments.loaded(parameters, state),
        )
        pending = states.entry(state, "pending")
        if pending is not None:
            pending = Pending.loaded(pending, parameters, self.fragments)
        compressor = states.entry(state, "compressor")
        inner, outer = states.entry(state, "optimizer"), states.entry(state, "outer")
        if (compressor is None) != (self.compressor is None):
            raise ValueError("state: compressor: only one of the state and this object has one")
        self._wait()
        if self.compressor is not None:
            self.compressor.load_state_dict(compressor)
        self.optimizer.load_state_dict(inner)
        self._anchors.load(parameters, anchors, outer)
        self._counted, self.rounds, self._agreements = counted, rounds, agreements
        self._has_moved, self._fragments, self._pending = moved, fragments, pending
        self._compared = False


def _reached(parameters: list[Parameter]) -> int:
    """Return 32 bits of parameters, which are not 0."""
    return zlib.crc32(repr(states.checksums(parameters)).encode()) or 1


def _is_finite(parameter: Parameter) -> bool:
    return bool(parameter.isfinite().all())
