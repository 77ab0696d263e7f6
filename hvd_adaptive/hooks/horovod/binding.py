"""A compressor bound to an optimizer: its ranks, its parameters, its groups and their names."""

from __future__ import annotations

import gc
import logging
import os
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.hooks.description import Description, checksum, describe
from hvd_adaptive.hooks.horovod.agreement import Meeting
from hvd_adaptive.hooks.horovod.changed import Watch, gradient_dtype, is_laid_out, is_unscaled
from hvd_adaptive.hooks.horovod.given_up import GivenUp
from hvd_adaptive.hooks.horovod.owner import (
    Owner,
    calling_optimizer,
    calling_parameter,
    find_owner,
    take_adasums_step_back,
)
from hvd_adaptive.hooks.horovod.placeholder import placeholder
from hvd_adaptive.hooks.horovod.prediction import Prediction
from hvd_adaptive.hooks.horovod.roll_call import RollCall
from hvd_adaptive.layout import Member
from hvd_adaptive.run.groups import Groups
from hvd_adaptive.transport.horovod_world import HorovodWorld, horovod

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor

logger = logging.getLogger("hvd_adaptive")


class Binding(Groups):
    """A compressor's groups for one Horovod optimizer.

    layout: None if no optimizer was found; then each step lays out the gradients that arrived.
    """

    def __init__(self, compressor: GradientCompressor, known: Binding | None = None) -> None:
        """known: the binding that this one replaces. Ranks that agreed then are not asked again:
        perhaps only some of them have a new one."""
        self.owner = _owner_of(compressor)
        members = compressor.settings.process_set or (self.owner and self.owner.process_set)
        super().__init__(compressor, HorovodWorld(members))
        self._meeting: Meeting | None = None
        self.described = checksum(self.description())
        if self.owner is not None:
            if known is None or not known.serves(self.owner):
                self.meet()
            _check_op(self.owner, compressor)
        self.prediction = Prediction(0)
        kept = known is not None and known.world.is_current()
        self._all_given_up: dict[tuple[int, ...], GivenUp] = known._all_given_up if kept else {}
        ranks = tuple(self.world.process_set.ranks)
        self.given_up = self._all_given_up.setdefault(ranks, GivenUp())
        self._names: dict[int, str] = known._names if kept else {}
        self._parameters: list[torch.nn.Parameter] = []
        self._sparse: set[int] | None = None
        if self.owner is not None:
            by_name = dict(self.owner.named_parameters)
            compressor.know_parameters(list(by_name))
            tensors = [
                Member(n, tuple(p.shape), gradient_dtype(p), compressor.part_of(n))
                for n, p in by_name.items()
            ]
            self.layout = self.build_layout(tensors)
            among = zlib.crc32(repr(self.world.process_set.ranks).encode())
            self.name = self._claimed(self.layout.fingerprint ^ compressor.fingerprint ^ among)
            self._parameters = [by_name[member.name] for member in self.layout.members]
            self.prediction = Prediction(len(self._parameters))
            logger.debug(
                "%s: %d tensors in %d groups over %d ranks",
                self.name,
                len(tensors),
                len(self.layout.groups),
                self.world.size,
            )
            _warn_of_names(len(tensors) + len(self.layout.groups))

    def serves(self, owner: Owner) -> bool:
        """Whether this is a binding to the same optimizer among the same ranks, which agree."""
        ours = None if self.owner is None else self.owner.optimizer
        same = ours is not None and owner.optimizer is not None and ours() is owner.optimizer()
        agreed = self._meeting is None or not self._meeting.told
        return same and agreed and self.world.is_current()

    def is_current(self) -> bool:
        """Whether ranks, optimizer, and dtypes and shapes of parameters are still the same.
        RuntimeError where a second optimizer calls."""
        same = self.world.is_current() and (
            self.owner is None or self._is_called_by_its_optimizer()
        )
        return same and (self.layout is None or is_laid_out(self.layout, self._parameters))

    def meet(self) -> None:
        """Ranks begin to make sure that they agree: see Meeting."""
        if self.world.size == 1:
            return
        # Parameters' names differ between optimizers, as stock Horovod wants it.
        names = [name for name, _ in [*self.owner.named_parameters, *self.owner.frozen]]
        label = min(names, default="")
        answer = None if self.owner.optimizer is None else self._answer
        self._meeting = Meeting(self.world, self.description(), label, answer)

    @property
    def met(self) -> bool:
        """Whether ranks have met, or are about to; not where some had called hvd.join()."""
        return self._meeting is None or not self._meeting.joined

    def told(self) -> str:
        """What ranks differed in when they met, "" where in nothing; waits where they are at it."""
        return "" if self._meeting is None else self._meeting.wait()

    def _answer(self, name: str) -> Any:
        """As Horovod's optimizer would, for a parameter that only other ranks have."""
        optimizer, hvd = self._optimizer(), self.world.hvd
        divisor = getattr(optimizer, "gradient_predivide_factor", 1.0)
        factors = (1.0 / divisor, divisor) if self.owner.op == hvd.Average else (1.0, 1.0)
        return hvd.allreduce_async(
            placeholder(self.world.rank, 0, 0, 0),
            name=name,
            op=self.owner.op,
            prescale_factor=factors[0],
            postscale_factor=factors[1],
            process_set=self.world.process_set,
        )

    def description(self) -> Description:
        """What ranks must have alike, as differences are told."""
        return describe(self.compressor, () if self.owner is None else self.owner.named_parameters)

    def _claimed(self, fingerprint: int) -> str:
        """The name of these groups. Settings that come back have the name that they had: Horovod's
        response cache would overflow with new ones."""
        if fingerprint not in self._names:
            self._names[fingerprint] = _claim_name(fingerprint, self.world.life)
        return self._names[fingerprint]

    def slot_of(self, tensor: torch.Tensor) -> int | None:
        """The slot of the parameter whose gradient ``tensor`` is; None where there is none."""
        slot = self.prediction.find(lambda i: self._parameters[i].grad is tensor)
        if slot is not None:
            return slot
        self._is_called_by_its_optimizer()
        # Perhaps a dense copy of a sparse gradient.
        asked = calling_parameter(self.compressor)
        if asked is None or asked.grad is None or not asked.grad.is_sparse:
            return None
        return self.prediction.find(lambda i: self._parameters[i] is asked)

    def unfrozen(self) -> list[str]:
        """Names of parameters that have gradients by now, but no hook of Horovod's."""
        frozen = () if self.owner is None else self.owner.frozen
        return [name for name, p in frozen if p.requires_grad and p.grad is not None]

    def learn_sparse(self) -> None:
        """After a step: which parameters have sparse gradients."""
        if self._sparse is None:
            gradients = enumerate(p.grad for p in self._parameters)
            self._sparse = {slot for slot, g in gradients if g is not None and g.is_sparse}

    def would_wait(self, slot: int) -> bool:
        """Whether Horovod would wait for ever if this absent gradient were there on other ranks: it
        would be sparse there, and dense zeros here."""
        return slot in (self._sparse or ()) and not self._optimizer().sparse_as_dense

    def is_absent(self, slot: int, tensor: torch.Tensor) -> bool:
        """Whether no backward pass has reached the parameter in ``slot`` since the last step, and
        zeros stand for its gradient: it is frozen or was not used."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        delay = optimizer._allreduce_delay.get(self._parameters[slot])
        return delay == optimizer.backward_passes_per_step and not bool(tensor.any())

    def resolved(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` without the negative bit, which says that memory holds its opposite; then it
        is a copy, which takes the gradient's place: ``set_`` would keep the bit."""
        if not tensor.is_neg():
            return tensor
        plain = tensor.detach().resolve_neg()
        if self.is_gradient(slot, tensor):
            self._parameters[slot].grad = plain
        return plain

    def is_gradient(self, slot: int, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the gradient of the parameter in ``slot``, and an optimizer asked
        for its average, which may then take its place; hvd.allreduce must not change its input."""
        optimizer = self.owner is not None and self.owner.optimizer is not None
        return optimizer and self._parameters[slot].grad is tensor

    def roll_call(self) -> RollCall | None:
        """For one step; None where no optimizer was found."""
        if self.owner is None or self.owner.optimizer is None:
            return None
        return RollCall(self.world.hvd, self.owner.optimizer, self.world.size)

    def watch(self) -> Watch | None:
        """For one step's gradients; None where no optimizer was found."""
        if self.owner is None or self._optimizer() is None:
            return None
        # An optimizer that is dropped with a step in progress must not live on in it.
        find, scaler = self.owner.optimizer, self.settings.grad_scaler

        def unscaled() -> bool:
            optimizer = find()
            return optimizer is not None and is_unscaled(optimizer, scaler)

        return Watch(self.layout.members, unscaled)

    def parameter(self, slot: int) -> torch.nn.Parameter:
        """The parameter in ``slot`` of the layout."""
        return self._parameters[slot]

    def _optimizer(self) -> Any:
        """Its own, as long as there is one."""
        return None if self.owner.optimizer is None else self.owner.optimizer()

    def _is_called_by_its_optimizer(self) -> bool:
        """False where another one calls, because its own is gone or there never was one."""
        caller = calling_optimizer(self.compressor)
        if caller is None or caller is self._optimizer():
            return True
        if self._optimizer() is not None:
            gc.collect()  # Horovod's optimizers are rings of references
        if self._optimizer() is not None:
            raise RuntimeError(
                "one compressor serves one optimizer at a time, but two call this one: construct a "
                "compressor for each (or close() it before it serves another)"
            )
        return False


def _owner_of(compressor: GradientCompressor) -> Owner | None:
    owner = find_owner(compressor)
    named = compressor.settings.named_parameters
    if owner is None and named is not None:
        owner = Owner([(n, p) for n, p in named if p.requires_grad], None, None)
    return owner


def _check_op(owner: Owner, compressor: GradientCompressor) -> None:
    hvd = horovod()
    if owner.optimizer is not None and owner.op not in (hvd.Average, hvd.Sum):
        known = ("Min", "Max", "Product")
        name = next((n for n in known if getattr(hvd, n) is owner.op), "Adasum")
        if name == "Adasum":
            take_adasums_step_back(compressor)
        raise ValueError(f"op=hvd.{name}: must be hvd.Average or hvd.Sum to compress gradients")


def _warn_of_names(count: int) -> None:
    """Each parameter's placeholder and each group is a collective with a name of its own."""
    cached = os.environ.get("HOROVOD_CACHE_CAPACITY", "1024")
    if cached.isdecimal() and 0 < int(cached) < count:
        logger.warning(
            "%d gradients and groups are more than the %s names of Horovod's response cache: "
            "raise HOROVOD_CACHE_CAPACITY, or each step negotiates them anew",
            count,
            cached,
        )


_taken: Counter[str] = Counter()
_taken_in: list[Any] = [None]  # World.life


def forget_names() -> None:
    """Count from zero again: Horovod starts anew, and so do ranks that join it."""
    _taken.clear()


def _claim_name(fingerprint: int, life: Any) -> str:
    """A collective name that no other binding of this process has in this life of Horovod.

    Bindings of equal layouts and settings are counted in the order in which optimizers took their
    compressors, which is the program's and so the same on all ranks. (The lowest number that is
    free would depend on when each rank collects its garbage.)
    """
    if _taken_in[0] is not life:
        forget_names()
        _taken_in[0] = life
    base = f"hvd_adaptive.{fingerprint:016x}"
    _taken[base] += 1
    return f"{base}.{_taken[base] - 1}"
