"""What ranks must have alike: compared when they first meet, and told when they differ later.

Each rank describes itself in topics ("settings", "parameters", ...) of named values. Two
collectives compare the descriptions: digests, and where these differ the descriptions themselves,
so that every rank can raise the same message. They are waited for with a limit: a rank that never
comes, or had no reason to, leaves the others with what they know. No hook waits for them.
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
from hvd_adaptive.hooks.description import Description, checksum, differences
from hvd_adaptive.hooks.horovod.placeholder import check_reduced, disagreement, placeholder

if TYPE_CHECKING:
    from hvd_adaptive.transport.horovod_world import HorovodWorld

logger = logging.getLogger("hvd_adaptive")

FIRST_SECONDS, LATER_SECONDS = 30.0, 30.0
# In which ranks that have begun to meet have met.
SOON_SECONDS = 5.0
_DIGEST_BYTES = 8
_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


class Meeting:
    """Ranks compare their descriptions when they first meet, while backward passes go on.

    Ranks with other parameters would wait for each other's gradients for ever, inside Horovod, and
    never come to ``decompress``. So a thread compares and, where ranks differ, submits a
    placeholder for each parameter that only others have. Then every placeholder comes back, and
    ``decompress`` raises what is ``told`` here, on every rank.

    A rank that does not come (it compiles, or its gradients are not compressed) keeps nobody
    waiting but the thread, which ends with Horovod.

    label: tells optimizers apart, which may meet at once.
    answer: submits a placeholder under a parameter's name, and gives its handle; None where no
    optimizer names gradients.
    told: what ranks differ in; "" where in nothing, or as long as that is not known.
    joined: some ranks had called hvd.join(), and are to be asked later.
    """

    def __init__(
        self, world: HorovodWorld, own: Description, label: str, answer: Callable[[str], Any] | None
    ) -> None:
        self.told, self.joined = "", False
        self._world, self._own, self._answer = world, own, answer
        self._name = f"hvd_adaptive.agreement.{label}"
        self._differ, self._known = False, threading.Event()
        # Submitted before any placeholder of the step: see wait.
        begun = self._submitted()
        threading.Thread(
            target=self._compare, args=(begun,), name="hvd_adaptive.meeting", daemon=True
        ).start()

    def wait(self) -> str:
        """``told``, once all ranks that have come have compared; a placeholder has come back, so
        that all ranks which meet have begun to."""
        if not self._known.wait(SOON_SECONDS) and self._differ:
            self._known.wait(FIRST_SECONDS)
        return self.told

    def _submitted(self) -> Any:
        """A handle; None where an earlier meeting of this label has not ended."""
        world = self._world
        # An allreduce: in any other collective a rank that has joined may crash (roll_call.py).
        try:
            return world.hvd.allreduce_async(
                placeholder(world.rank, 0, 0, checksum(self._own)),
                name=self._name,
                op=world.hvd.Sum,
                process_set=world.process_set,
            )
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
            self._differ, told = True, str(error)
        number, everyone = disagreement(reduced, world.size), None
        if number is not None:
            everyone = _everyone(world, self._own, f"{self._name}.{number}", FIRST_SECONDS)
        if everyone is not None:
            told = differences(everyone, world.process_set.ranks)
        self.told = told
        self._known.set()
        if self._answer is not None:
            own = self._own["parameters"]
            names = {name for theirs in everyone or () for name in theirs["parameters"]}
            for answered in [self._answer(name) for name in sorted(names.difference(own))]:
                _ended(world, answered)


def compare(world: HorovodWorld, own: Description, name: str, seconds: float) -> str | None:
    """What ranks differ in, the same words on every rank, "" where in nothing; None where not all
    of them answered within ``seconds``.

    name: of the collectives.
    """
    if world.size == 1:
        return ""
    everyone = _everyone(world, own, name, seconds)
    return None if everyone is None else differences(everyone, world.process_set.ranks)


def _everyone(
    world: HorovodWorld, own: Description, name: str, seconds: float
) -> list[Description] | None:
    """All ranks' descriptions."""
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
    """What an allgather gives; None where some rank does not answer, or has joined."""
    hvd = world.hvd
    try:
        handle = hvd.allgather_async(own, name=name, process_set=world.process_set)
    except ValueError as error:  # an earlier one that was given up has not ended
        logger.debug("%s: %s", name, error)
        return None
    end = time.monotonic() + seconds
    while not hvd.poll(handle):
        if time.monotonic() > end:
            return None
        time.sleep(_PAUSE)
    try:
        return hvd.synchronize(handle)
    except Exception as error:
        if "Join" not in str(error):
            raise
        return None


def _ended(world: HorovodWorld, handle: Any) -> torch.Tensor | None:
    """What a collective gives, however long it takes; None where Horovod has ended."""
    pause = _PAUSE
    while world.is_current():
        if world.hvd.poll(handle):
            return world.hvd.synchronize(handle)
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return None
