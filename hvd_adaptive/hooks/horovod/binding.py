"""Bind a compressor to an optimizer: its ranks, its parameters, its groups and their names.

No two optimizers of a process share names of collectives.
"""

from __future__ import annotations

import functools
import logging
import os
import zlib
from collections import Counter
from typing import Any

from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.hooks.horovod.agreement import Agreement
from hvd_adaptive.hooks.horovod.owner import (
    Owner,
    calling_process_set,
    find_owner,
    take_adasums_step_back,
)
from hvd_adaptive.hooks.horovod.served import ServedParameters, gradient_dtype
from hvd_adaptive.hooks.horovod.unfinished import AbandonedSteps
from hvd_adaptive.layout import Layout, Member, build_layout
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.transport.horovod_world import HorovodWorld, horovod

logger = logging.getLogger("hvd_adaptive")


_taken: Counter[str] = Counter()
_taken_in: list[Any] = [None]  # World.generation


def forget_names() -> None:
    """Count from zero again, as ranks that join do: Horovod has been initialised anew."""
    _taken.clear()


def claim_name(fingerprint: int, generation: Any) -> str:
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


def warn_of_many(count: int) -> None:
    """Warn if placeholders and groups have more names than Horovod's response cache holds."""
    cached = os.environ.get("HOROVOD_CACHE_CAPACITY", "1024")
    if cached.isdecimal() and 0 < int(cached) < count:
        logger.warning(
            "%d gradients and groups are more than the %s names of Horovod's response cache: "
            "raise HOROVOD_CACHE_CAPACITY, or each step negotiates them anew",
            count,
            cached,
        )


class Binding(RankContext):
    """Bind a compressor's groups to one Horovod optimizer.

    Attributes:
        layout: None if no optimizer was found; then each step lays out the gradients that arrived.
        owner: The optimizer; None if none was found.
        has_optimizer: Horovod's optimizer calls.
        parameters: Its parameters by slot.
        agreement: What ranks must have in common.
        abandoned: What is in flight of steps that were given up, and the attempt at this one.
    """

    def __init__(self, compressor: GradientCompressor, known: Binding | None = None) -> None:
        """Bind ``compressor`` to the optimizer that calls it, in place of the ``known`` binding."""
        self.owner = _owner_of(compressor)
        self.has_optimizer = self.owner is not None and self.owner.optimizer is not None
        own, caller = compressor.settings.process_set, calling_process_set()
        if self.owner is not None and self.has_optimizer:
            caller = self.owner.process_set
        if own is not None and not self.has_optimizer:
            HorovodWorld(own)  # an error at once on a rank outside, whose call may be the only one
        super().__init__(compressor, HorovodWorld(caller or own))
        conflict = _conflict(own, caller, self.has_optimizer)
        self.agreement = Agreement(compressor, self.owner, self.world, conflict)
        if self.owner is not None:
            _check_op(self.owner, compressor)
        kept = known if known is not None and known.world.is_current() else None
        self._all_abandoned: dict[tuple[int, ...], AbandonedSteps] = (
            kept._all_abandoned if kept else {}
        )
        ranks = tuple(self.world.process_set.ranks)
        self.abandoned = self._all_abandoned.setdefault(ranks, AbandonedSteps())
        if kept is not None and kept.abandoned is self.abandoned:
            self.agreement.continue_from(kept.agreement)
            self.compared_at = kept.compared_at
        # By identity: settings that return have their earlier name again, because new names would
        # fill Horovod's response cache.
        self._names: dict[int, str] = kept._names if kept else {}
        self.parameters = ServedParameters(compressor, self.owner, ())
        self._members: list[Member] = []  # in the order of registration
        self._by_name = False
        if self.owner is not None:
            by_name = dict(self.owner.named_parameters)
            frozen = *self.owner.frozen, *self.owner.frozen_elsewhere
            self.named = [*self.owner.named_parameters, *frozen]
            compressor.parts.warn_of_idle_patterns(list(by_name))
            self._members = [
                Member(n, tuple(p.shape), gradient_dtype(p), compressor.parts.label_of(n))
                for n, p in by_name.items()
            ]
            self.layout = self._laid_out(known is not None and known._by_name)
            among = zlib.crc32(repr(self.world.process_set.ranks).encode())
            settings = compressor.parts.default.settings_fingerprint
            identity = self.layout.identity ^ settings ^ among
            if identity not in self._names:
                self._names[identity] = claim_name(identity, self.world.generation)
            self.name = self._names[identity]
            by_slot = [by_name[member.name] for member in self.layout.members]
            self.parameters = ServedParameters(compressor, self.owner, by_slot)
            logger.debug(
                "%s: %d tensors in %d groups over %d ranks",
                self.name,
                len(self._members),
                len(self.layout.groups),
                self.world.size,
            )
            warn_of_many(len(self._members) + len(self.layout.groups))

    def release_name(self) -> bool:
        """Leave the name, under which nothing was sent, to the next binding of this layout: ranks
        that never agreed would count different bindings. Return False if a later one has a name.
        """
        base, _, number = self.name.rpartition(".")
        if _taken[base] != int(number) + 1:
            return False
        _taken[base] -= 1
        for identity in [key for key, name in self._names.items() if name == self.name]:
            del self._names[identity]
        return True

    def serves_caller(self) -> bool:
        """Return whether these are the caller's ranks, if no optimizer calls."""
        wanted = calling_process_set() or self.settings.process_set
        return (wanted or horovod().global_process_set).ranks == self.world.process_set.ranks

    def _laid_out(self, by_name: bool) -> Layout:
        self._by_name = by_name
        return self.build_layout(functools.partial(build_layout, self._members, by_name=by_name))

    def lay_out_by_name(self) -> Layout:
        """Return a layout by names: ranks register parameters differently. Slots stay."""
        logger.warning(
            "ranks register the model's parameters in different orders: groups follow the "
            "parameters' names, so fewer of them can be sent during the backward pass"
        )
        self.layout = self._laid_out(by_name=True)
        return self.layout

    @property
    def unnamed(self) -> str:
        """Return the beginning of the names of collectives if no optimizer was found."""
        return f"hvd_adaptive.{self.compressor.parts.default.settings_fingerprint:08x}.unnamed"


def _owner_of(compressor: GradientCompressor) -> Owner | None:
    owner = find_owner(compressor)
    named = compressor.settings.named_parameters
    if owner is None and named is not None:
        frozen = [(n, p) for n, p in named if not p.requires_grad]
        trained = [(n, p) for n, p in named if p.requires_grad]
        owner = Owner(trained, None, None, frozen_elsewhere=frozen)
    return owner


def _conflict(own: Any, caller: Any, of_optimizer: bool) -> str | None:
    """Return what is wrong with the keyword ``process_set``, given the caller's process set."""
    if own is None or caller is None or own.ranks == caller.ranks:
        return None
    of = "the optimizer" if of_optimizer else "hvd.allreduce"
    return (
        f"process_set: has ranks {own.ranks}; must be None or the process set of {of}, which has "
        f"ranks {caller.ranks}"
    )


def _check_op(owner: Owner, compressor: GradientCompressor) -> None:
    hvd = horovod()
    if owner.optimizer is not None and owner.op not in (hvd.Average, hvd.Sum):
        known = ("Min", "Max", "Product")
        name = next((n for n in known if getattr(hvd, n) is owner.op), "Adasum")
        if name == "Adasum":
            take_adasums_step_back(compressor)
        raise ValueError(f"op=hvd.{name}: must be hvd.Average or hvd.Sum to compress gradients")
