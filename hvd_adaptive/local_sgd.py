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
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_adaptive import states
from hvd_adaptive.checks import check_integer, is_real
from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.finite import wide_of
from hvd_adaptive.hooks.horovod import elastic
from hvd_adaptive.hooks.rounds import Exchange, find_world

_numbers = itertools.count()


class LocalSGD:
    """Optimizer whose ranks train alone for some steps, and then average what they have learned.

    A round is ``every`` steps of ``optimizer`` on each rank. At its end

    1. each rank encodes how far its parameters have moved since the round began;
    2. the averages of these differences are the gradients of an outer SGD, which moves the
       parameters that the round began with;
    3. every rank continues from there. Parameters are bitwise equal on all ranks.

    With momentum 0 and rate 1 the parameters become the ranks' mean (local SGD, Stich 2019).
    DiLoCo (Douillard et al. 2023) has Nesterov momentum 0.9 and rate 0.7. Buffers, such as those of
    batch normalisation, and the state of ``optimizer`` stay each rank's own.

    Give a learning rate schedule ``optimizer`` itself. For elastic Horovod give this object to
    ``hvd.elastic.TorchState(model=model, optimizer=...)``. When workers join or leave, all continue
    from the first rank's parameters and state.

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

    Raises:
        ValueError: An argument is not allowed.
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
    ) -> None:
        self.optimizer, self.compressor = optimizer, compression
        self.every = check_integer("every", every, 1)
        _check(optimizer, compression, momentum, lr)
        self.rounds = self._steps = 0
        given = (p for group in optimizer.param_groups for p in group["params"])
        self._parameters = [p for p in given if p.requires_grad]
        self._anchors = [p.detach().clone() for p in self._parameters]
        self._outer = torch.optim.SGD(self._anchors, lr, momentum, nesterov=momentum > 0)
        settings = (self.every, float(momentum), float(lr), compression is None)
        self._settings = zlib.crc32(repr(settings).encode())
        self._ranks = process_group, process_set, next(_numbers)
        self._named = list(named_parameters or ())
        self.connect()
        elastic.register_handler(LocalSGD, elastic.LocalStateHandler)

    def connect(self) -> None:
        """Find the ranks, which elastic Horovod may have changed; they compare their models next.

        ``hvd.elastic.TorchState`` calls this.
        """
        self._compared, self._exchange = False, None
        if self.compressor is not None:
            self.compressor.close()
        world = find_world(*self._ranks)
        if world is not None:
            self._exchange = Exchange(world, self._parameters, self.compressor, self._named)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of this rank alone; the last one of a round averages, a collective.

        Raises:
            RankMismatchError: Ranks differ in settings, or began with different parameters.
        """
        loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self._steps += 1
        if self._steps >= self.every:
            self.average()
        return loss

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

    def report(self) -> dict[str, Any]:
        """Return the compressor's figures of the last round, and more.

        The further keys are rounds (how many there were) and wire_bytes_per_step.
        """
        told = {} if self.compressor is None else self.compressor.report()
        ranks = 1 if self._exchange is None else self._exchange.world.size
        sent = sum(a.numel() * wide_of(a.dtype).itemsize for a in self._anchors)
        ring = 2 * (ranks - 1) / ranks * sent
        per_step = told.get("wire_bytes", ring) / self.every
        return told | {"rounds": self.rounds, "wire_bytes_per_step": per_step}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the model's parameters.

        Within a round, parameters and this state are each rank's own, so every rank must save both.
        """
        return {
            "optimizer": self.optimizer.state_dict(),
            "outer": self._outer.state_dict(),
            "anchors": [anchor.clone() for anchor in self._anchors],
            "steps": self._steps,
            "rounds": self.rounds,
            "compressor": None if self.compressor is None else self.compressor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; load the model's parameters as well.

        Raises:
            ValueError: The state is of another model or compressor, or incomplete.
        """
        anchors = states.entry(state, "anchors")
        shapes = [getattr(anchor, "shape", None) for anchor in anchors]
        if shapes != [anchor.shape for anchor in self._anchors]:
            raise ValueError("state: anchors are not those of this optimizer's parameters")
        steps, rounds = states.whole(state, "steps"), states.whole(state, "rounds")
        compressor = states.entry(state, "compressor")
        inner, outer = states.entry(state, "optimizer"), states.entry(state, "outer")
        if (compressor is None) != (self.compressor is None):
            raise ValueError("state: compressor: only one of the state and this object has one")
        if self.compressor is not None:
            self.compressor.load_state_dict(compressor)
        self.optimizer.load_state_dict(inner)
        self._outer.load_state_dict(outer)
        with torch.no_grad():
            for anchor, saved in zip(self._anchors, anchors, strict=True):
                anchor.copy_(saved)
        self._steps, self.rounds, self._compared = steps, rounds, False

    @torch.no_grad()
    def _round(self, finished: bool) -> bool:
        """End a round if any rank took a step; return whether all ranks have finished."""
        taken, over = self._taken_by_all(finished)
        active = sum(steps > 0 for steps in taken)
        if active:
            moved = [a - p for a, p in zip(self._anchors, self._parameters, strict=True)]
            if self._exchange is not None:
                moved = self._exchange.average(moved)
            for anchor, average in zip(self._anchors, moved, strict=True):
                anchor.grad = average.mul_(len(taken) / active)
            self._outer.step()
            self._outer.zero_grad()
            for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
                parameter.copy_(anchor)
            self.rounds += 1
        self._steps = 0
        return over

    def _taken_by_all(self, finished: bool) -> tuple[list[int], bool]:
        """Return the steps that each rank took in this round, and whether all have finished."""
        if self._exchange is None:
            return [self._steps], finished
        start = 0 if self._compared else _checksum(self._anchors)
        own = [self._steps, int(finished), self._settings, start]
        world = self._exchange.world
        if not world.is_current():
            raise RuntimeError(
                "LocalSGD: ranks have changed; give it to hvd.elastic.TorchState(optimizer=...)"
            )
        gather = world.gather_equal
        everyone = gather(torch.tensor(own, device="cpu"), "round").tolist()
        steps, ends, settings, starts = zip(*everyone, strict=True)
        if len(set(settings)) > 1:
            raise RankMismatchError(
                "ranks disagree on LocalSGD's every, momentum or lr, or on whether it compresses"
            )
        if len(set(starts)) > 1:
            raise RankMismatchError(
                "ranks began with different parameters: broadcast the first rank's before LocalSGD "
                "is constructed, and load states on all ranks or on none"
            )
        self._compared = True
        return list(steps), all(ends)


def _check(optimizer: Any, compressor: Any, momentum: Any, lr: Any) -> None:
    """Raise ValueError if an argument of LocalSGD is not allowed."""
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "synchronize"):
        raise ValueError(
            "optimizer: must be a torch optimizer, not hvd.DistributedOptimizer, which averages at "
            "every step"
        )
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
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


def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return 32 bits that differ between models."""
    value = 0
    for tensor in tensors:
        words = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        value = zlib.crc32(words.data, value)
    return value
