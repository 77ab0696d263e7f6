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
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive._version import __version__
from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.fusion.placeholder import check_reduced, disagreement, placeholder

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.exchange.world import World
    from hvd_adaptive.fusion.owner import Owner

logger = logging.getLogger("hvd_adaptive")

# Topic -> name -> value, all as they are told.
Description = dict[str, dict[str, str]]

FIRST_SECONDS, LATER_SECONDS = 30.0, 30.0
# In which ranks that have begun to meet have met.
SOON_SECONDS = 5.0
# Differences of a topic that are told; characters of a value.
MOST_TOLD, LONGEST = 4, 60
ADVICE = (
    "Every rank must construct the same compressor for the same parameters and take the same steps"
)
_DIGEST_BYTES = 8
_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


def describe(compressor: GradientCompressor, owner: Owner | None) -> Description:
    """A rank's own description: package version, settings, parameters by name."""
    parameters = [] if owner is None else sorted(owner.named_parameters, key=lambda pair: pair[0])
    settings = compressor.settings.shared() | compressor.scheme_settings()
    settings = {"scheme": type(compressor).__name__} | settings
    return {
        "the package version": {"hvd_adaptive": __version__},
        "settings": {name: repr(value) for name, value in settings.items()},
        "parameters": {name: _told_parameter(p) for name, p in parameters},
    }


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
        self, world: World, own: Description, label: str, answer: Callable[[str], Any] | None
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


def checksum(own: Description) -> int:
    """32 bits."""
    return zlib.crc32(json.dumps(own).encode())


def compare(world: World, own: Description, name: str, seconds: float) -> str | None:
    """What ranks differ in, the same words on every rank, "" where in nothing; None where not all
    of them answered within ``seconds``.

    name: of the collectives.
    """
    if world.size == 1:
        return ""
    everyone = _everyone(world, own, name, seconds)
    return None if everyone is None else differences(everyone, world.process_set.ranks)


def _everyone(
    world: World, own: Description, name: str, seconds: float
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


def differences(everyone: Sequence[Description], ranks: Sequence[int]) -> str:
    """One sentence for each topic in which descriptions differ.

    ranks: the numbers by which the describing ranks are called.
    """
    topics = list(dict.fromkeys(topic for own in everyone for topic in own))
    sentences = []
    for topic in topics:
        found = _differences_of([own.get(topic, {}) for own in everyone], topic, ranks)
        if found:
            more = len(found) - MOST_TOLD
            told = "; ".join(found[:MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")
            sentences.append(f"ranks disagree on {topic}: {told}")
    return ". ".join([*sentences, ADVICE]) if sentences else ""


def _differences_of(
    everyone: Sequence[dict[str, str]], topic: str, ranks: Sequence[int]
) -> list[str]:
    """A clause for each name whose values differ. Another scheme's keywords are not missed."""
    names = list(dict.fromkeys(name for own in everyone for name in own))
    clauses = []
    for name in names:
        holders: dict[str | None, list[int]] = {}
        for rank, own in zip(ranks, everyone, strict=True):
            holders.setdefault(own.get(name), []).append(rank)
        if len(holders) == 1 or (topic == "settings" and None in holders):
            continue
        told = [f"{_short(value)} on {_told_ranks(held)}" for value, held in holders.items()]
        clauses.append(f"{name} is {', '.join(told)}")
    return clauses


def _waited_for(world: World, own: torch.Tensor, name: str, seconds: float) -> torch.Tensor | None:
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


def _ended(world: World, handle: Any) -> torch.Tensor | None:
    """What a collective gives, however long it takes; None where Horovod has ended."""
    pause = _PAUSE
    while world.is_current():
        if world.hvd.poll(handle):
            return world.hvd.synchronize(handle)
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return None


def _told_parameter(parameter: torch.Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"


def _short(value: str | None) -> str:
    if value is None:
        return "missing"
    if len(value) <= LONGEST:
        return value
    return (
        f"{value[: LONGEST - 14]}... ({hashlib.blake2b(value.encode(), digest_size=4).hexdigest()})"
    )


def _told_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2-5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"rank {told}" if len(ranks) == 1 else f"ranks {told}"
