"""Compare between ranks what must be the same: before the first step, and after a disagreement.

Each rank describes itself in topics ("settings", "parameters", ...) of named values. Two
collectives compare the descriptions: the first compares digests; if these differ, the second
gathers the descriptions, so that every rank can raise the same message. Ranks wait for a limited
time, because another rank may never take part, or have no reason to. No hook waits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.hooks.horovod.placeholder import check_reduced, disagreement, placeholder
from hvd_adaptive.run.description import Description, checksum, differences

if TYPE_CHECKING:
    from hvd_adaptive.transport.horovod_world import HorovodWorld

logger = logging.getLogger("hvd_adaptive")

FIRST_SECONDS, LATER_SECONDS = 30.0, 30.0
# Within this time ranks that have begun to compare have finished.
SOON_SECONDS = 5.0
_DIGEST_BYTES = 8
_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


class FirstComparison:
    """Compare the ranks' descriptions in a thread, while backward passes continue.

    Ranks with different parameters would wait for each other's gradients for ever, inside Horovod,
    and never reach ``decompress``. If ranks differ, the thread therefore submits a placeholder for
    each parameter that only other ranks have. Then every placeholder is reduced, and
    ``decompress`` raises ``mismatch`` on every rank.

    If a rank does not take part (it compiles, or its gradients are not compressed), only the thread
    waits for it. The thread ends with Horovod.

    label: distinguishes optimizers, which may compare at the same time.
    submit: submits a placeholder under a parameter's name, and returns its handle; None if no
        optimizer names gradients.
    mismatch: what ranks disagree on; "" if on nothing, or if that is not known yet.
    joined: some ranks had called hvd.join(), so ranks must compare again later.
    """

    def __init__(
        self, world: HorovodWorld, own: Description, label: str, submit: Callable[[str], Any] | None
    ) -> None:
        self.mismatch, self.joined = "", False
        self._world, self._own, self._submit = world, own, submit
        self._name = f"hvd_adaptive.agreement.{label}"
        self._differ, self._known = False, threading.Event()
        # Submitted before any placeholder of the step: see wait.
        begun = self._submitted()
        threading.Thread(
            target=self._compare, args=(begun,), name="hvd_adaptive.comparison", daemon=True
        ).start()

    def wait(self) -> str:
        """Return ``mismatch`` once the ranks that take part have compared.

        A placeholder has come back, so all of these ranks have begun.
        """
        if not self._known.wait(SOON_SECONDS) and self._differ:
            self._known.wait(FIRST_SECONDS)
        return self.mismatch

    def _submitted(self) -> Any:
        """Submit the checksum; None if an earlier comparison with this label has not ended."""
        world = self._world
        # An allreduce: in any other collective a rank that has joined may crash (roll_call.py).
        try:
            own = placeholder(world.rank, 0, 0, checksum(self._own))
            return world.allreduce(own, self._name, world.hvd.Sum)
        except ValueError:
            return None

    def _compare(self, handle: Any) -> None:
        try:
            while handle is None and self._world.is_current():
                time.sleep(_LONGEST_PAUSE)
                handle = self._submitted()
            reduced = _ended(self._world, handle)
            if reduced is not None:
                self._read(reduced)
        except Exception as error:  # Horovod ended, or a rank did; training meets the same
            logger.debug("%s: %s", self._name, error)
        finally:
            self._known.set()

    def _read(self, reduced: torch.Tensor) -> None:
        world = self._world
        try:
            self.joined = check_reduced(reduced, world.size).active < world.size
            return
        except RankMismatchError as error:
            self._differ, mismatch = True, str(error)
        number, everyone = disagreement(reduced, world.size), None
        if number is not None:
            everyone = _everyone(world, self._own, f"{self._name}.{number}", FIRST_SECONDS)
        if everyone is not None:
            mismatch = differences(everyone, world.process_set.ranks)
        self.mismatch = mismatch
        self._known.set()
        if self._submit is not None:
            own = self._own["parameters"]
            names = {name for theirs in everyone or () for name in theirs["parameters"]}
            for answered in [self._submit(name) for name in sorted(names.difference(own))]:
                _ended(world, answered)


def compare(world: HorovodWorld, own: Description, name: str, seconds: float) -> str | None:
    """Return what ranks disagree on, the same text on every rank; "" if on nothing.

    None if not all ranks answer within ``seconds``.

    name: the name of the collectives.
    """
    if world.size == 1:
        return ""
    everyone = _everyone(world, own, name, seconds)
    return None if everyone is None else differences(everyone, world.process_set.ranks)


def _everyone(
    world: HorovodWorld, own: Description, name: str, seconds: float
) -> list[Description] | None:
    """Return all ranks' descriptions; None if not all ranks answer in time."""
    data = json.dumps(own).encode()
    digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
    head = torch.tensor(
        list(digest + len(data).to_bytes(8, "little")), dtype=torch.uint8, device="cpu"
    )
    heads = _waited_for(world, head, name, seconds)
    if heads is None:
        return None
    rows = [bytes(row) for row in heads.view(world.size, -1).tolist()]
    if len(set(rows)) == 1:
        return [own] * world.size
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    bodies = _waited_for(world, body, f"{name}.descriptions", seconds)
    if bodies is None:
        return None
    lengths = [int.from_bytes(row[_DIGEST_BYTES:], "little") for row in rows]
    return [json.loads(bytes(part.tolist())) for part in bodies.split(lengths)]


def _waited_for(
    world: HorovodWorld, own: torch.Tensor, name: str, seconds: float
) -> torch.Tensor | None:
    """Return the result of an allgather; None if a rank does not answer, or has joined."""
    try:
        handle = world.allgather(own, name)
    except ValueError as error:  # an earlier one that was given up has not ended
        logger.debug("%s: %s", name, error)
        return None
    end = time.monotonic() + seconds
    while not world.poll(handle):
        if time.monotonic() > end:
            return None
        time.sleep(_PAUSE)
    try:
        return world.synchronize(handle)
    except Exception as error:
        if "Join" not in str(error):
            raise
        return None


def _ended(world: HorovodWorld, handle: Any) -> torch.Tensor | None:
    """Wait for a collective and return its result; None if Horovod has ended."""
    pause = _PAUSE
    while world.is_current():
        if world.poll(handle):
            return world.synchronize(handle)
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return None
