"""A compressor bound to an optimizer: its ranks, its parameters, its groups and their names."""

from __future__ import annotations

import functools
import gc
import logging
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.hooks.description import Description, checksum, describe
from hvd_adaptive.hooks.horovod.agreement import FirstComparison
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
from hvd_adaptive.layout import Layout, Member, build_layout
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
        """Bind ``compressor`` to the optimizer that calls it.

        known: the binding that this one replaces. Ranks that agreed then do not compare again,
            because perhaps only some of them have a new binding.
        """
        self.owner = _owner_of(compressor)
        members = compressor.settings.process_set or (self.owner and self.owner.process_set)
        super().__init__(compressor, HorovodWorld(members))
        self._comparison: FirstComparison | None = None
        self.described = checksum(self.description())
        if self.owner is not None:
            if known is None or not known.serves(self.owner):
                self.start_comparison()
            _check_op(self.owner, compressor)
        self.prediction = Prediction(0)
        kept = known if known is not None and known.world.is_current() else None
        self._all_given_up: dict[tuple[int, ...], GivenUp] = kept._all_given_up if kept else {}
        ranks = tuple(self.world.process_set.ranks)
        self.given_up = self._all_given_up.setdefault(ranks, GivenUp())
        self._names: dict[int, str] = kept._names if kept else {}
        self._parameters: list[torch.nn.Parameter] = []
        self._members: list[Member] = []  # in the order of registration
        self._by_name = False
        self._sparse: set[int] | None = None
        if self.owner is not None:
            by_name = dict(self.owner.named_parameters)
            compressor.parts.warn_of_idle_patterns(list(by_name))
            self._members = [
                Member(n, tuple(p.shape), gradient_dtype(p), compressor.parts.label_of(n))
                for n, p in by_name.items()
            ]
            self.layout = self._laid_out(known is not None and known._by_name)
            among = zlib.crc32(repr(self.world.process_set.ranks).encode())
            settings = compressor.codec.settings_fingerprint
            self.name = self._claimed(self.layout.identity ^ settings ^ among)
            self._parameters = [by_name[member.name] for member in self.layout.members]
            self.prediction = Prediction(len(self._parameters))
            logger.debug(
                "%s: %d tensors in %d groups over %d ranks",
                self.name,
                len(self._members),
                len(self.layout.groups),
                self.world.size,
            )
            _warn_of_names(len(self._members) + len(self.layout.groups))

    def _laid_out(self, by_name: bool) -> Layout:
        self._by_name = by_name
        return self.build_layout(self._members, functools.partial(build_layout, by_name=by_name))

    def lay_out_by_name(self) -> Layout:
        """Return the layout whose groups follow names: ranks register parameters differently.

        Slots stay the same.
        """
        logger.warning(
            "ranks register the model's parameters in different orders: groups follow the "
            "parameters' names, so fewer of them can be sent during the backward pass"
        )
        self.layout = self._laid_out(by_name=True)
        return self.layout

    def serves(self, owner: Owner) -> bool:
        """Return whether this binding is to the same optimizer and ranks, and the ranks agree."""
        ours = None if self.owner is None else self.owner.optimizer
        same = ours is not None and owner.optimizer is not None and ours() is owner.optimizer()
        agreed = self._comparison is None or not self._comparison.mismatch
        return same and agreed and self.world.is_current()

    def is_current(self) -> bool:
        """Return whether ranks, optimizer, and dtypes and shapes of parameters are still the same.

        Raises:
            RuntimeError: A second optimizer calls.
        """
        same = self.world.is_current() and (
            self.owner is None or self._is_called_by_its_optimizer()
        )
        return same and (self.layout is None or is_laid_out(self.layout, self._parameters))

    def start_comparison(self) -> None:
        """Start to compare settings and parameters between ranks: see FirstComparison.

        Without parameters there is nothing to compare before a step's first decompress.
        """
        owner = self.owner
        if owner is None or self.world.size == 1:
            return
        # Parameters' names differ between optimizers, as stock Horovod requires.
        names = [name for name, _ in [*owner.named_parameters, *owner.frozen]]
        label = min(names, default="")
        submit = None if owner.optimizer is None else functools.partial(self._submit, owner.op)
        self._comparison = FirstComparison(self.world, self.description(), label, submit)

    @property
    def is_compared(self) -> bool:
        """Return whether ranks have compared settings or are comparing them.

        It is False if some ranks had called hvd.join() when the others compared.
        """
        return self._comparison is None or not self._comparison.joined

    def mismatch(self) -> str:
        """Return what ranks disagreed on in their first comparison, "" if on nothing. Waits for a
        comparison in progress."""
        return "" if self._comparison is None else self._comparison.wait()

    def _submit(self, op: Any, name: str) -> Any:
        """Submit a placeholder, as Horovod's optimizer would, for a parameter that only other ranks
        have."""
        optimizer, hvd = self._optimizer(), self.world.hvd
        divisor = getattr(optimizer, "gradient_predivide_factor", 1.0)
        factors = (1.0 / divisor, divisor) if op == hvd.Average else (1.0, 1.0)
        return hvd.allreduce_async(
            placeholder(self.world.rank, 0, 0, 0),
            name=name,
            op=op,
            prescale_factor=factors[0],
            postscale_factor=factors[1],
            process_set=self.world.process_set,
        )

    @property
    def unnamed(self) -> str:
        """Return the beginning of the names of collectives if no optimizer was found."""
        return f"hvd_adaptive.{self.compressor.codec.settings_fingerprint:08x}.unnamed"

    def description(self) -> Description:
        """Return what must be the same on all ranks."""
        return describe(self.compressor, () if self.owner is None else self.owner.named_parameters)

    def _claimed(self, fingerprint: int) -> str:
        """Return the name of these groups. Settings that return have their earlier name again,
        because new names would fill Horovod's response cache."""
        if fingerprint not in self._names:
            self._names[fingerprint] = _claim_name(fingerprint, self.world.generation)
        return self._names[fingerprint]

    def slot_of(self, tensor: torch.Tensor) -> int | None:
        """Return the slot of the parameter whose gradient is ``tensor``, or None."""
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
        """Return the names of parameters that have gradients, but no hook of Horovod's."""
        frozen = () if self.owner is None else self.owner.frozen
        return [name for name, p in frozen if p.requires_grad and p.grad is not None]

    def learn_sparse(self) -> None:
        """Note, after a step, which parameters have sparse gradients."""
        if self._sparse is None:
            gradients = enumerate(p.grad for p in self._parameters)
            self._sparse = {slot for slot, g in gradients if g is not None and g.is_sparse}

    def would_wait(self, slot: int) -> bool:
        """Return whether Horovod would wait for ever if another rank had this absent gradient: it
        would be sparse there, and dense zeros here."""
        return slot in (self._sparse or ()) and not self._optimizer().sparse_as_dense

    def is_absent(self, slot: int, tensor: torch.Tensor) -> bool:
        """Return whether no backward pass has reached the parameter in ``slot`` since the last
        step, because it is frozen or was not used. ``tensor`` is then zeros."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        delay = optimizer._allreduce_delay.get(self._parameters[slot])
        return delay == optimizer.backward_passes_per_step and not bool(tensor.any())

    def resolved(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` without the negative bit, which means that memory holds its negative.

        If it has the bit, a copy replaces the gradient, because ``set_`` would keep the bit.
        """
        if not tensor.is_neg():
            return tensor
        plain = tensor.detach().resolve_neg()
        if self.is_gradient(slot, tensor):
            self._parameters[slot].grad = plain
        return plain

    def is_gradient(self, slot: int, tensor: torch.Tensor) -> bool:
        """Return whether the average may be written to ``tensor``: it is the gradient of the
        parameter in ``slot``, in an optimizer's call. hvd.allreduce must not change its input."""
        optimizer = self.owner is not None and self.owner.optimizer is not None
        return optimizer and self._parameters[slot].grad is tensor

    def roll_call(self) -> RollCall | None:
        """Return a roll call for one step; None if no optimizer was found."""
        if self.owner is None or self.owner.optimizer is None:
            return None
        return RollCall(self.world.hvd, self.owner.optimizer, self.world.size)

    def watch(self, members: Sequence[Member]) -> Watch | None:
        """Return a watch of one step's gradients; None if no optimizer was found."""
        find = None if self.owner is None else self.owner.optimizer
        if find is None or find() is None:
            return None
        # A step in progress holds the optimizer weakly, so that it may be dropped meanwhile.
        optimizer, scaler = find, self.settings.grad_scaler

        def unscaled() -> bool:
            current = optimizer()
            return current is not None and is_unscaled(current, scaler)

        return Watch(members, unscaled)

    def parameter(self, slot: int) -> torch.nn.Parameter:
        """Return the parameter in ``slot`` of the layout."""
        return self._parameters[slot]

    def _optimizer(self) -> Any:
        """Return the optimizer of this binding, as long as it exists."""
        find = None if self.owner is None else self.owner.optimizer
        return None if find is None else find()

    def _is_called_by_its_optimizer(self) -> bool:
        """Return False if another optimizer calls because this one is gone, or never existed.

        Raises:
            RuntimeError: Another optimizer calls, and this one still exists.
        """
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
    """Warn if placeholders and groups have more names than Horovod's response cache holds."""
    cached = os.environ.get("HOROVOD_CACHE_CAPACITY", "1024")
    if cached.isdecimal() and 0 < int(cached) < count:
        logger.warning(
            "%d gradients and groups are more than the %s names of Horovod's response cache: "
            "raise HOROVOD_CACHE_CAPACITY, or each step negotiates them anew",
            count,
            cached,
        )


_taken: Counter[str] = Counter()
_taken_in: list[Any] = [None]  # World.generation


def forget_names() -> None:
    """Count from zero again, as ranks that join do: Horovod has been initialised anew."""
    _taken.clear()


def _claim_name(fingerprint: int, generation: Any) -> str:
    """Return a collective name that no other binding has in this generation of Horovod.

    Bindings of equal layouts and settings are counted in the order in which optimizers first call
    their compressors. The program determines this order, so it is the same on all ranks. (The
    lowest unused number would depend on when each rank collects its garbage.)
    """
    if _taken_in[0] is not generation:
        forget_names()
        _taken_in[0] = generation
    base = f"hvd_adaptive.{fingerprint:016x}"
    _taken[base] += 1
    return f"{base}.{_taken[base] - 1}"
