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
from typing import Any

import torch
import torch.distributed as dist

from hvd_adaptive import states
from hvd_adaptive.checks import check_choice, check_integer, is_real
from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.device import check_supported
from hvd_adaptive.finite import wide_of
from hvd_adaptive.hooks.anchors import Anchors
from hvd_adaptive.hooks.horovod import elastic
from hvd_adaptive.hooks.round_agreement import Agreed, Position, agree
from hvd_adaptive.hooks.rounds import Exchange, find_world
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

    A round averages the parameters that the groups of ``optimizer`` hold then and that require a
    gradient. One that was added, replaced or unfrozen is averaged in full precision in its first
    round. A frozen one keeps its bits, unless a rank has moved it since the last round.

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
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        process_set: Any = None,
        on_nonfinite: str = "raise",
    ) -> None:
        _check(optimizer, compression, momentum, lr)
        super().__init__(optimizer)
        self.compressor = compression
        self.every = check_integer("every", every, 1)
        self.on_nonfinite = check_choice("on_nonfinite", on_nonfinite, ("raise", "skip"))
        self.rounds = self._counted = self._taken = 0
        trained = [p for p in self._parameters() if p.requires_grad]
        self._anchors = Anchors(trained, float(momentum), float(lr))
        settings = (self.every, float(momentum), float(lr), compression is None, on_nonfinite)
        self._settings = zlib.crc32(repr(settings).encode())
        self._ranks = process_group, process_set, f"hvd_adaptive.local{next(_numbers)}"
        self._named = list(named_parameters or ())
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
        self._taken += taken
        self._count()
        return loss

    def skip(self) -> None:
        """Count a step that this rank does not take; the last one of a round averages.

        Call it in the place of ``step``, so that all ranks end a round together.
        """
        self._count()

    def _count(self) -> None:
        self._counted += 1
        if self._counted >= self.every:
            self.average()

    def average(self) -> None:
        """End the round now. Every rank must end this round, by this or by its last step.

        Ranks that took no step since the last round do not count.
        """
        self._round(finished=False)

    def finish(self) -> None:
        """End the training of this rank; call it once on every rank.

        What was learned since the last round is averaged. Ranks may have taken different numbers of
        steps: those that finish early take part in the others' rounds without counting, and return
        when all have finished, with equal parameters.
        """
        while not self._round(finished=True):
            pass

    # Rounds ---------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Find the ranks, which elastic Horovod may have changed; they compare their models next.

        ``hvd.elastic.TorchState`` calls this.
        """
        self._compared = False
        self._exchange: Exchange | None = None
        self._exchanged: list[Parameter] = []
        if self.compressor is not None:
            self.compressor.close()
        self._world = find_world(*self._ranks)
        if self._world is not None:
            self._exchange_for(list(self._anchors))

    @torch.no_grad()
    def _round(self, finished: bool) -> bool:
        """End a round if any rank took a step; return whether all ranks have finished."""
        parameters = self._parameters()
        agreed = self._agreed(parameters, finished)
        self._counted = self._taken = 0  # on all ranks, whatever follows
        if agreed.broken and (self.on_nonfinite == "raise" or not agreed.active):
            self._raise_not_finite(parameters, agreed)
        if agreed.active:
            self._average(parameters, agreed)
            self.rounds += 1
        return agreed.over

    def _average(self, parameters: list[Parameter], agreed: Agreed) -> None:
        """Move all parameters that take part to where the round ends."""
        chosen = [p for p, part in zip(parameters, agreed.takes_part, strict=True) if part]
        old = [p for p in chosen if p in self._anchors]
        new = [p for p in chosen if p not in self._anchors]
        share = agreed.ranks / agreed.active
        self._anchors.keep(parameters)
        if old:
            ways = [self._anchors.way(p) for p in old]
            if not agreed.counts:
                ways = [torch.zeros_like(way) for way in ways]
            if self._world is not None:
                ways = self._exchange_for(old).average(ways)
            self._anchors.move(old, [way.mul_(share) for way in ways])
        if new:
            self._average_plainly(new, share if agreed.counts else 0.0)
            self._anchors.add(new)
        if not agreed.is_finite:
            self._forget_broken_state()

    def _average_plainly(self, parameters: list[Parameter], share: float) -> None:
        """Replace parameters by their mean, in full precision."""
        wide = [p.detach().to(wide_of(p.dtype), copy=True) for p in parameters]
        wide = [tensor.mul_(share) if share else torch.zeros_like(tensor) for tensor in wide]
        if self._world is not None:
            wide = Exchange(self._world, parameters, None, ()).average(wide)
        for parameter, average in zip(parameters, wide, strict=True):
            parameter.copy_(average)

    def _agreed(self, parameters: list[Parameter], finished: bool) -> Agreed:
        """Return what all ranks know of the round, a collective."""
        position = Position(
            settings=self._settings,
            start=[] if self._compared else self._start(parameters),
            round=self.rounds,
            taken=self._taken,
            finished=finished,
            broken=next((i for i, p in enumerate(parameters) if not p.isfinite().all()), -1),
            kinds=zlib.crc32(repr([(p.dtype, p.shape) for p in parameters]).encode()),
            anchored=[p in self._anchors for p in parameters],
            takes_part=[p.requires_grad or self._anchors.has_moved(p) for p in parameters],
        )
        agreed = agree(self._world, position)
        self._compared = True
        return agreed

    def _start(self, parameters: list[Parameter]) -> list[tuple[str, int]]:
        """Return the names of the parameters that have anchors, with checksums of these."""
        names, known = self._names_of(parameters), [p for p in parameters if p in self._anchors]
        return list(zip((names[p] for p in known), self._anchors.checksums(known), strict=True))

    def _names_of(self, parameters: list[Parameter]) -> dict[Parameter, str]:
        """Return the names of parameters; those without one have their number."""
        names = {id(parameter): name for name, parameter in self._named}
        return {p: names.get(id(p), str(index)) for index, p in enumerate(parameters)}

    def _exchange_for(self, parameters: list[Parameter]) -> Exchange:
        """Return an exchange of these parameters: the last one, if they are the same."""
        same = len(parameters) == len(self._exchanged) and all(
            one is other for one, other in zip(parameters, self._exchanged, strict=True)
        )
        if self._exchange is None or not same:
            assert self._world is not None
            if self.compressor is not None:
                self.compressor.close()
            self._exchange = Exchange(self._world, parameters, self.compressor, self._named)
            self._exchanged = parameters
        return self._exchange

    def _raise_not_finite(self, parameters: list[Parameter], agreed: Agreed) -> None:
        names = self._names_of(parameters)
        told = ", ".join(
            f"{names[parameters[index]]} of rank {rank}" for rank, index in agreed.broken.items()
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

    # State ----------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the compressor's figures of the last round, and more.

        The further keys are rounds (how many there were) and wire_bytes_per_step.
        """
        told = {} if self.compressor is None else self.compressor.report()
        ranks = 1 if self._world is None else self._world.size
        ring = 2 * (ranks - 1) / ranks * self._anchors.full_bytes
        per_step = told.get("wire_bytes", ring) / self.every
        return told | {"rounds": self.rounds, "wire_bytes_per_step": per_step}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the model's parameters.

        Within a round, parameters and this state are each rank's own, so every rank must save both.
        """
        return self._anchors.state_dict(self._parameters()) | {
            "optimizer": self.optimizer.state_dict(),
            "steps": self._counted,
            "taken": self._taken,
            "rounds": self.rounds,
            "compressor": None if self.compressor is None else self.compressor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; load the model's parameters as well.

        Raises:
            ValueError: The state is of another model or compressor, or incomplete.
        """
        anchors, parameters = states.entry(state, "anchors"), self._parameters()
        if len(anchors) != len(parameters) or any(
            anchor is not None and getattr(anchor, "shape", None) != p.shape
            for anchor, p in zip(anchors, parameters, strict=True)
        ):
            raise ValueError("state: anchors are not those of this optimizer's parameters")
        counted, rounds = states.whole(state, "steps"), states.whole(state, "rounds")
        taken = states.whole(state, "taken")
        compressor = states.entry(state, "compressor")
        inner, outer = states.entry(state, "optimizer"), states.entry(state, "outer")
        if (compressor is None) != (self.compressor is None):
            raise ValueError("state: compressor: only one of the state and this object has one")
        if self.compressor is not None:
            self.compressor.load_state_dict(compressor)
        self.optimizer.load_state_dict(inner)
        self._anchors.load(parameters, anchors, outer)
        self._counted, self._taken, self.rounds = counted, taken, rounds
        self._compared = False


def _check(optimizer: Any, compressor: Any, momentum: Any, lr: Any) -> None:
    """Raise ValueError if an argument of LocalSGD is not allowed."""
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "synchronize"):
        raise ValueError(
            "optimizer: must be a torch optimizer, not hvd.DistributedOptimizer, which averages at "
            "every step"
        )
    if isinstance(optimizer, LocalSGD):
        raise ValueError("optimizer: must not be a LocalSGD itself")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        check_supported(parameter.device)
    if any(map(torch.is_complex, parameters)):
        raise ValueError("optimizer: complex parameters are not supported")
    if not is_real(momentum) or not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum!r}: must be a number of at least 0 and below 1")
    if not is_real(lr) or not 0 < lr < float("inf"):
        raise ValueError(f"lr={lr!r}: must be a number above 0")
    if compressor is None:
        return
    check_compressor("compression", compressor)
    if compressor.connection is not None:
        raise ValueError("compression: already serves an optimizer or a model; create another")
    if compressor.settings.process_set is not None:
        raise ValueError("process_set: give it to LocalSGD, not to the compressor")
