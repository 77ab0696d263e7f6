"""Average models every few steps, compressed, instead of gradients at every step."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from hvd_adaptive import states
from hvd_adaptive.base.checks import check_choice, check_integer
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.hooks import local_checks
from hvd_adaptive.hooks.fragments import Anchors, Fragments, is_due
from hvd_adaptive.hooks.horovod import elastic
from hvd_adaptive.hooks.local_round import Outcome, Pending, Round, not_finite, position_of
from hvd_adaptive.hooks.rounds import Background, RoundExchange, find_world
from hvd_adaptive.hooks.wrapped_optimizer import WrappedOptimizer

_numbers = itertools.count()


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
        **unknown: NoReturn,
    ) -> None:
        local_checks.check_arguments(type(self), unknown, optimizer, compression, momentum, lr)
        super().__init__(optimizer)
        self.compressor = compression
        self.every = check_integer("every", every, 1)
        self.fragments = check_integer("fragments", fragments, 1, self.every)
        self.delay = check_integer("delay", delay, 0, self.every // self.fragments)
        self.mixing = local_checks.check_mixing(mixing, self.delay)
        self.on_nonfinite = check_choice("on_nonfinite", on_nonfinite, ("raise", "skip"))
        self.rounds = self._agreements = self._counted = 0
        self._has_moved = [False] * self.fragments
        names = local_checks.names_of(named_parameters, compression)
        parameters = self._parameters()
        self._fragments = Fragments(parameters, self.fragments, names)
        self._anchors = Anchors(parameters, float(momentum), float(lr))
        own = self.every, float(momentum), float(lr), self.fragments, self.delay, self.mixing
        self._settings = zlib.crc32(repr((*own, compression is None, on_nonfinite)).encode())
        self._ranks = process_group, process_set, f"hvd_adaptive.local{next(_numbers)}"
        self._pending: Pending | None = None
        self._exchange: RoundExchange | None = None
        self.connect()
        elastic.register_handler(LocalSGD, elastic.LocalStateHandler)

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
            self._ending.is_open = self._exchange is not None
        self._count()
        return loss

    def skip(self) -> None:
        """Count a step that this rank does not take; the last one of a round averages.

        Call it in the place of ``step``, so that all ranks end a round together.
        """
        self._count()

    def _count(self) -> None:
        """Apply the round that is due, and begin the next one, with a delay in the background."""
        if self._pending is not None:
            self._pending.steps -= 1
            if not self._pending.steps:
                self._complete()
        step = self._counted + 1
        self._counted = step % self.every
        if is_due(step, self.every, self.fragments):
            if not self.delay:
                self._round_at_once(finished=False)
                return
            self._complete()
            device = next((p.device for p in self._anchors), torch.device("cpu"))
            run = self._begin(finished=False).run
            self._pending = Pending(Background(run, device, "hvd_adaptive.local_sgd"), self.delay)

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

    def connect(self) -> None:
        """Find the ranks, which elastic Horovod may have changed; they compare their models next.

        ``hvd.elastic.TorchState`` calls this.

        Raises:
            RuntimeError: The compressor serves something else.
        """
        self._wait()
        if self._exchange is not None and self._exchange.session is not None:
            self._exchange.session.release()
        world = find_world(*self._ranks)
        exchange = None
        if world is not None and world.size > 1:
            exchange = RoundExchange(world, self.compressor, self._wait)
        self._exchange, self._compared = exchange, False
        if self._pending is not None and self._pending.has_failed:
            self._pending, self._has_moved = None, [True] * self.fragments

    def _wait(self) -> None:
        """Wait until no round is in progress; its outcome is applied later."""
        if self._pending is not None:
            self._pending.join()

    def _round_at_once(self, finished: bool) -> bool:
        """Average the next fragment; return whether all ranks have finished."""
        outcome = self._begin(finished).run()
        self._apply(outcome, 0.0)
        return outcome.over

    def _complete(self) -> None:
        """Apply the round in the background, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._apply(pending.outcome(), self.mixing)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _begin(self, finished: bool) -> Round:
        """Return the round of the next fragment."""
        if self._exchange is None:
            local_checks.check_alone(*self._ranks[:2])
        elif self._exchange.session is not None:
            self._exchange.session.reconnect()
        parameters = self._parameters()
        fragment = self._agreements % self.fragments
        self._fragments.keep(parameters)
        self._anchors.keep(parameters)
        position = position_of(
            parameters,
            self._fragments,
            self._anchors,
            fragment,
            compares=not self._compared,
            settings=self._settings,
            round=self._agreements,
            has_moved=self._has_moved[fragment],
            finished=finished,
            skips=self.on_nonfinite == "skip",
        )
        self._agreements += 1
        self._has_moved[fragment] = False
        self._compared = True
        return Round(self._exchange, self._fragments, fragment, parameters, self._anchors, position)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _apply(self, outcome: Outcome, mixing: float) -> None:
        """Move parameters, which keep a share ``mixing`` of themselves, to where a round ends."""
        if outcome.broken:
            names = list(map(self._fragments.name_of, self._parameters()))
            raise not_finite({rank: names[index] for rank, index in outcome.broken.items()})
        if outcome.applies:
            outcome.apply(self._anchors, mixing)
            self._has_moved[outcome.fragment] = mixing > 0
            if not outcome.is_finite:
                self._drop_broken_state(self.rounds)
            self.rounds += 1
        self._ending.is_open &= self._pending is not None or any(self._has_moved)

    @property
    def _rank(self) -> int:
        return 0 if self._exchange is None else self._exchange.world.rank

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
        self._ending.is_open = False
        self._fragments.keep(parameters)
        inner = self.optimizer.state_dict()
        saved = None if pending is None else pending.state_dict(parameters)
        checksum = local_checks.own_checksum(self._rank, inner, saved)
        state = self._anchors.state_dict(parameters) | self._fragments.state_dict(parameters)
        return state | {
            "optimizer": inner,
            "steps": self._counted,
            "moved": list(self._has_moved),
            "rounds": self.rounds,
            "agreements": self._agreements,
            "pending": saved,
            "own": {"rank": self._rank, "checksum": checksum},
            "compressor": None if self.compressor is None else self.compressor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; load the model's parameters as well.

        Raises:
            ValueError: The state is of another model or compressor, incomplete, or was saved within
                a round by another rank.
        """
        local_checks.check_own(state, self._rank)
        self.load_from(state)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_from(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned on another rank, whose parameters this one has, too."""
        parameters = self._parameters()
        anchors = local_checks.tensors_like(parameters, state, "anchors")
        counted = states.whole(state, "steps", 0, self.every - 1)
        rounds, agreements = states.whole(state, "rounds"), states.whole(state, "agreements")
        moved = local_checks.moved_of(state, self.fragments)
        fragments = self._fragments.loaded(parameters, state)
        pending = Pending.loaded(states.entry(state, "pending"), parameters, self.fragments)
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
