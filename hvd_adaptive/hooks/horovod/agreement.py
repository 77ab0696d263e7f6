"""Define Agreement: ranks compare their positions once a step, in one small allreduce.

The allreduce is submitted at a step's first gradient, and read before any other wait. It shows
whether all ranks take part, with the same settings, parameters, groups, step, attempt, fits of
tables and number of the compressor. It is an allreduce because a rank in ``hvd.join()`` adds zeros
to it. Every other collective fails on such a rank or, if Horovod has the collective in its response
cache, breaks the job.

If ranks differ, each describes itself in topics ("settings", "parameters", ...) of named values.
Two collectives compare the descriptions: the first compares digests; if these differ, the second
gathers the descriptions, so that every rank can raise the same message. Ranks wait for a limited
time, because another rank may never take part.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
import zlib
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch

from hvd_adaptive.adapt.updates import NOTHING
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.hooks.horovod.owner import Owner
from hvd_adaptive.hooks.horovod.placeholder import disagreement, position
from hvd_adaptive.run.agreement import Description, describe, differences
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.transport.horovod_world import HorovodWorld

logger = logging.getLogger("hvd_adaptive")

SECONDS = 30.0
_PAUSE = 0.0005


class Agreement:
    """Compare what must be the same on all ranks: settings, parameters, and each step's position.

    Attributes:
        conflict: What is wrong with the keyword ``process_set`` on this rank; None if nothing is.
        is_new: Ranks have not agreed in any step yet.
        own: This rank's position in the step in progress.
        due: What is fitted at this step.
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        owner: Owner | None,
        world: HorovodWorld,
        conflict: str | None = None,
    ) -> None:
        self._compressor, self._owner, self._world = compressor, owner, world
        self.conflict = conflict
        # Parameters' names differ between optimizers, as stock Horovod requires.
        names = () if owner is None else [n for n, _ in (*owner.named_parameters, *owner.frozen)]
        self._name = f"hvd_adaptive.agreement.{min(names, default='')}"
        self._checksum = zlib.crc32(json.dumps(self._constant()).encode())
        self.is_new = True
        self.due = NOTHING
        self._tables = 0  # as tables_fitted counts, before this step
        self.own = torch.empty(0, dtype=torch.float64, device="cpu")
        self._handle: Any = None  # of the first position in the queue
        # Names and positions of steps, oldest first. Ranks submit one for each step, also for one
        # that is given up, or they would add up positions of different steps.
        self._queue: deque[tuple[str, torch.Tensor]] = deque()

    def begin_step(self, groups: RankContext) -> None:
        """Note what is fitted at the compressor's step. Wrong ``update_steps`` raise here."""
        step, updates = self._compressor.step, self._compressor._training.updates
        groups.prepare(step)
        self.due = updates.at(step)
        self._tables = tables_fitted(self._compressor)

    def position(self, groups: RankContext, attempt: int, slot: int = 0) -> torch.Tensor:
        """Return the vector that ranks compare in this step; see placeholder.py.

        It covers all that must be the same on all ranks before they wait for each other: the names
        of collectives, the attempt, the tables, which are fitted, and the compressor's number.
        """
        named = "" if groups.layout is None else groups.name
        settings = self._compressor.parts.default.settings_fingerprint
        due = self.due
        fits = due.first or due.second, due.first, due.samples
        return position(
            self._world.rank,
            slot,
            self._compressor.step,
            _crc(settings, self._checksum, named),
            _crc(attempt, *fits, self._tables),
            0 if groups.layout is None else groups.layout.fingerprint,
            self._compressor._training.instance.number or 0,
            groups.wants_comparison,
        )

    def continue_from(self, earlier: Agreement) -> None:
        """Submit and read what another binding of the compressor to the same ranks has begun."""
        self._handle, self._queue = earlier._handle, earlier._queue

    def submit(self, groups: RankContext, attempt: int) -> None:
        """Submit this rank's position in the step that begins."""
        self.own = self.position(groups, attempt)
        if self._world.size > 1:
            self._queue.append((self._name, self.own))
            if self._handle is None:
                self._submit()

    def answer(self) -> torch.Tensor | None:
        """Return the sum of all ranks' positions once it is there; never wait."""
        if self._world.size == 1:
            return self.own
        while self._queue:
            if self._handle is None:
                self._submit()
            if self._handle is None or not self._world.poll(self._handle):
                return None
            handle, self._handle = self._handle, None
            reduced = self._world.synchronize(handle)
            _, position = self._queue.popleft()
            if position is self.own:
                return reduced
        return None

    def _submit(self) -> None:
        """Submit the first position in the queue."""
        name, position = self._queue[0]
        with suppress(ValueError):  # another compressor's of this name has not ended
            self._handle = self._world.allreduce(position, name, self._world.hvd.Sum)

    def find_out(self, groups: RankContext, attempt: int, reduced: torch.Tensor) -> str:
        """Return what ranks disagree on, after ``reduced`` has shown that they do; the same text on
        every rank, and "" if they cannot find out.

        Parameters that only other ranks have are submitted to Horovod here, because these ranks
        wait for them.
        """
        name = disagreement(reduced, self._world.size)
        if name is None:
            return ""
        constant = self._constant()
        own = constant | self._varying(groups, attempt)
        everyone = _everyone(self._world, own, f"{self._name}.{name}")
        if everyone is None:
            return ""
        self._submit_others(everyone)
        ranks = self._world.process_set.ranks
        # Whoever has other settings may be elsewhere, too: settings are reported first.
        settings = [{topic: theirs[topic] for topic in constant} for theirs in everyone]
        return differences(settings, ranks) or differences(everyone, ranks)

    def _constant(self) -> Description:
        """Return what must be the same on all ranks in every step."""
        named = () if self._owner is None else self._owner.named_parameters
        own = describe(self._compressor, named)
        # Ranks that were given a wrong one must not leave the others waiting.
        fits = "None or the caller's" if self.conflict is None else "not the caller's"
        return own | {"settings": own["settings"] | {"process_set": fits}}

    def _varying(self, groups: RankContext, attempt: int) -> Description:
        step, due = self._compressor.step, self.due
        words = {True: "due", False: "not due"}
        return {
            "the step": {
                "its number": str(step),
                "a fit of tables (update_steps)": words[due.first],
                "a fit of averages' tables": words[due.second],
                "samples for a fit": words[due.samples],
                "its attempt": str(attempt),
                "tables fitted so far": str(self._tables),
            },
            "the order of optimizers": {"those before this one": groups.name.rpartition(".")[2]},
        }

    def _submit_others(self, everyone: list[Description]) -> None:
        """Submit placeholders of other ranks' parameters, as these ranks' optimizers do."""
        world, owner = self._world, self._owner
        optimizer = None if owner is None or owner.optimizer is None else owner.optimizer()
        if owner is None or optimizer is None:
            return
        divisor = getattr(optimizer, "gradient_predivide_factor", 1.0)
        factors = (1.0 / divisor, divisor) if owner.op == world.hvd.Average else (1.0, 1.0)
        others = {name for theirs in everyone for name in theirs["parameters"]}
        for name in sorted(others - {name for name, _ in owner.named_parameters}):
            number = torch.zeros(1, dtype=torch.float64, device="cpu")
            world.allreduce(
                number, name, owner.op, prescale_factor=factors[0], postscale_factor=factors[1]
            )


def tables_fitted(compressor: GradientCompressor) -> int:
    """Return the number of fits of tables: of all parts, and of the averages of each."""
    fits, counted = 0, set()
    for codec in compressor.parts.values():
        for one in (codec, None if codec.second is None else codec.second.codec):
            if one is not None and id(one) not in counted:
                counted.add(id(one))
                fits += one.table_version
    return fits


@functools.lru_cache(maxsize=16)
def _crc(*agreed: Hashable) -> int:
    return zlib.crc32(repr(agreed).encode())


def _everyone(world: HorovodWorld, own: Description, name: str) -> list[Description] | None:
    """Return all ranks' descriptions; None if not all ranks answer in time."""
    data = json.dumps(own).encode()
    head = hashlib.blake2b(data, digest_size=8).digest() + len(data).to_bytes(8, "little")
    heads = _waited_for(world, torch.frombuffer(bytearray(head), dtype=torch.uint8), name)
    if heads is None:
        return None
    rows = heads.view(torch.int64).view(world.size, 2)
    if bool((rows == rows[0]).all()):
        return [own] * world.size
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    bodies = _waited_for(world, body, f"{name}.descriptions")
    if bodies is None:
        return None
    return [json.loads(bytes(part.tolist())) for part in bodies.split(rows[:, 1].tolist())]


def _waited_for(world: HorovodWorld, own: torch.Tensor, name: str) -> torch.Tensor | None:
    """Return the result of an allgather; None if a rank does not answer, or has joined."""
    try:
        handle = world.allgather(own, name)
    except ValueError as error:  # an earlier one that was given up has not ended
        logger.debug("%s: %s", name, error)
        return None
    end = time.monotonic() + SECONDS
    while not world.poll(handle):
        if time.monotonic() > end or world.is_left:
            return None
        time.sleep(_PAUSE)
    try:
        return world.synchronize(handle)
    except Exception as error:
        if "Join" not in str(error):
            raise
        return None
