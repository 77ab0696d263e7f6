"""Send messages between ranks by mpi4py, paired by name.

MPI pairs collectives by the order of calls, but ranks may fit the tables of two optimizers in
different orders. Messages are therefore point-to-point, and their tags are hashes of their names.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvd_adaptive.transport.horovod_world import HorovodWorld, wait_until

logger = logging.getLogger("hvd_adaptive")

_DIGEST_BYTES = 8
_GROUP_TAG = 7


class MpiMessages:
    """Gather vectors on the first member of a process set, and broadcast its vector.

    Args:
        mpi: The module ``mpi4py.MPI``.
        communicator: Communicator of the members, in their order.
    """

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi, self._comm = mpi, communicator
        self.size, self.rank = communicator.Get_size(), communicator.Get_rank()

    def gather(self, own: np.ndarray, name: str) -> list[np.ndarray] | None:
        """Return all members' float64 vectors on the first member, and None on the others."""
        if self.rank:
            self._send(own, [0], name)
            return None
        return [own, *(self._receive(sender, name) for sender in range(1, self.size))]

    def broadcast(self, values: np.ndarray | None, name: str) -> np.ndarray:
        """Return the first member's float64 vector of any length; the others pass None."""
        if self.rank:
            return self._receive(0, name)
        assert values is not None
        self._send(values, range(1, self.size), name)
        return values

    def _send(self, values: np.ndarray, receivers: Sequence[int], name: str) -> None:
        data = np.frombuffer(_digest(name) + values.astype("<f8").tobytes(), dtype=np.uint8)
        requests = [
            self._comm.Isend([data, self._mpi.BYTE], dest=receiver, tag=self._tag(name))
            for receiver in receivers
        ]
        wait_until(lambda: self._mpi.Request.Testall(requests), name)

    def _receive(self, sender: int, name: str) -> np.ndarray:
        status, found = self._mpi.Status(), []

        def has_come() -> bool:
            message = self._comm.Improbe(source=sender, tag=self._tag(name), status=status)
            found.append(message)
            return message is not None

        wait_until(has_come, name)
        data = np.empty(status.Get_count(self._mpi.BYTE), dtype=np.uint8)
        found[-1].Recv([data, self._mpi.BYTE])
        if data[:_DIGEST_BYTES].tobytes() != _digest(name):
            raise RuntimeError(
                f"level sync: rank {sender} sent another message than {name!r}; "
                "another seed= changes the names"
            )
        return data[_DIGEST_BYTES:].view("<f8").astype(np.float64)

    def _tag(self, name: str) -> int:
        return zlib.crc32(name.encode()) % self._comm.Get_attr(self._mpi.TAG_UB)


class _Communicator:
    """A communicator that a thread creates.

    Creation blocks until all members call it. In a thread it also completes if this rank gives up
    its step.
    """

    def __init__(self, mpi: Any, numbers: Sequence[int]) -> None:
        self.made: Any = None
        self._error: Exception | None = None
        self._done = threading.Event()
        name = "hvd_adaptive.communicator"
        threading.Thread(target=self._make, args=(mpi, numbers), name=name, daemon=True).start()

    def _make(self, mpi: Any, numbers: Sequence[int]) -> None:
        try:
            world = mpi.COMM_WORLD
            self.made = world.Create_group(world.Get_group().Incl(numbers), _GROUP_TAG)
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self, name: str) -> Any:
        wait_until(self._done.is_set, name)
        if self._error is not None:
            raise self._error
        return self.made


class _Communicators:
    """One communicator for each set of ranks; new ones are created after each ``hvd.init()``."""

    def __init__(self) -> None:
        self._lock, self._generation = threading.Lock(), None
        self._known: dict[tuple[int, ...], _Communicator] = {}
        self._warned = False

    def of(self, world: HorovodWorld, mpi: Any, numbers: Sequence[int]) -> _Communicator:
        """Return the communicator of these ranks of MPI's world; all of them must call this."""
        with self._lock:
            self._start_over(world)
            key = tuple(numbers)
            if key not in self._known:
                self._known[key] = _Communicator(mpi, numbers)
            return self._known[key]

    def warn(self, world: HorovodWorld, message: str, *values: Any) -> None:
        """Log a warning, once after each ``hvd.init()``."""
        with self._lock:
            self._start_over(world)
            if not self._warned:
                logger.warning(message, *values)
            self._warned = True

    def _start_over(self, world: HorovodWorld) -> None:
        if self._generation is not world.generation:
            self._generation, self._known, self._warned = world.generation, {}, False


_COMMUNICATORS = _Communicators()


def mpi_messages(world: HorovodWorld, name: str) -> MpiMessages | None:
    """Return messages among ``world``'s ranks, or None on all of them if one cannot use MPI.

    Ranks exchange their numbers in MPI's world under ``name``, because ``hvd.init(comm=...)`` may
    number them differently.
    """
    mpi = _mpi(world)
    own = torch.tensor([-1 if mpi is None else mpi.COMM_WORLD.Get_rank()], device="cpu")
    numbers = world.gather_equal(own, name)[:, 0].tolist()
    if mpi is not None and min(numbers) >= 0:
        return MpiMessages(mpi, _COMMUNICATORS.of(world, mpi, numbers).wait(name))
    if mpi is not None:
        pairs = zip(world.process_set.ranks, numbers, strict=True)
        without = [rank for rank, number in pairs if number < 0]
        fallback = "ranks %s cannot use mpi4py: tables travel over Horovod"
        _COMMUNICATORS.warn(world, fallback, without)
    return None


def _mpi(world: HorovodWorld) -> Any:
    """Return the module ``mpi4py.MPI`` if it shares Horovod's MPI and threads may use it."""
    hvd = world.hvd
    if not (hvd.mpi_built() and hvd.mpi_enabled() and hvd.mpi_threads_supported()):
        return None
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        missing = "mpi4py cannot be imported (%s): tables travel over Horovod"
        _COMMUNICATORS.warn(world, missing, error)
        return None
    if not MPI.Is_initialized() or MPI.Is_finalized():
        apart = "mpi4py does not share Horovod's MPI: tables travel over Horovod"
        _COMMUNICATORS.warn(world, apart)
        return None
    return MPI


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()
