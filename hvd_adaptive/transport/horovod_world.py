"""Define HorovodWorld, the ranks of a Horovod process set; Horovod is imported at first use.

When a collective ends, Horovod's background thread drops its references to the collective's
tensors. If only Python refers to a tensor afterwards, or nothing does, PyTorch acquires the GIL to
update or free the Python object. After a failure, e.g. the death of a rank, the thread does so for
all collectives in flight while it holds the locks that every new collective needs. A thread that
submits a collective waits for these locks with the GIL, and both threads wait forever. A view is
another C++ reference to its tensor, so while views exist, the GIL is not needed (``Handles``).

A collective that a thread submits at the moment in which Horovod ends may stay in Horovod's queue,
because Horovod looks whether it has ended before it locks the queue. After the next hvd.init() it
is carried out, with whatever another rank submits under the same name then, and the name is refused
until it ends. ``Handles`` detects this, and elastic Horovod starts anew, without the collective.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from hvd_adaptive.transport.collectives import InFlight
from hvd_adaptive.transport.world import MOST_DIRECT, World

_PAUSE = 0.0005


class Abandoned(Exception):
    """The step that waited for ``sent``, still in flight, was given up."""

    def __init__(self, name: str, handle: Any, operation: str) -> None:
        super().__init__(name)
        self.sent = InFlight(name, operation, handle)


def horovod() -> Any:
    """Return the module ``horovod.torch``; raise RuntimeError if it is missing or not ready."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise RuntimeError(
            "compress() needs Horovod, which cannot be imported here "
            f"({error}); `hvd-adaptive install-horovod` builds it; over torch.distributed use "
            "hvd_adaptive.average(), or hvd_adaptive.ddp for DistributedDataParallel"
        ) from error
    if not hvd.is_initialized():
        raise RuntimeError(
            "compress() was called before hvd.init(); over torch.distributed use "
            "hvd_adaptive.average(), or hvd_adaptive.ddp for DistributedDataParallel"
        )
    return hvd


def reference(tensor: torch.Tensor) -> torch.Tensor:
    """Return an object that holds a C++ reference to ``tensor`` itself, not to its memory alone.

    If ``tensor`` is a view, the reference is to the tensor that it is a view of.
    It is an empty view: ``view_as`` reads the shape twice, and raises an error if Horovod's thread
    gives an output its size in between.
    """
    return tensor.as_strided((0,), (1,), 0)


class Handles(dict[Any, tuple[str, list[torch.Tensor]]]):
    """Names of collectives that have not ended without error, by handle, and references to their
    tensors.

    Handles belong to a generation of Horovod, see ``HorovodWorld.generation``: its dict of handles
    and their tensors. What failed is dropped with its generation, when Horovod has stopped.
    """

    _generation: Any = None

    def submit(
        self, world: HorovodWorld, function: Any, *arguments: Any, name: str, **keywords: Any
    ) -> Any:
        """Submit a collective of ``world`` by a function of Horovod's, and return its handle.

        Raises:
            ValueError: Another collective of this name is in flight.
            HorovodInternalError: It is one of an earlier generation, which elastic Horovod ends.
        """
        generation = world.hvd.mpi_ops._handle_map
        if generation is not self._generation:
            self._generation = generation
            self.clear()
        begun = object()  # another thread must know the name before Horovod does
        self[begun] = name, []
        try:
            handle = function(*arguments, name=name, process_set=world.process_set, **keywords)
            found, nested = [], [generation[handle]]
            for part in nested:  # which grows meanwhile
                if isinstance(part, torch.Tensor):
                    found.append(reference(part))
                elif isinstance(part, tuple | list):
                    nested += part
            self[handle] = name, found
            return handle
        except ValueError as error:
            known = [known for key, (known, _) in list(self.items()) if key is not begun]
            if name in known or _SAME_NAME not in str(error):
                raise
            from horovod.common.exceptions import HorovodInternalError

            left = f"{name}: an earlier one is left in Horovod's queue since hvd.shutdown()"
            raise HorovodInternalError(left) from error
        finally:
            self.pop(begun, None)


HANDLES = Handles()
_SAME_NAME = "the same name"


class HorovodWorld(World):
    """Ranks of one process set; see World.

    ``hvd`` is the module ``horovod.torch``. ``left`` is set when the step in progress is given up;
    None if none can be.
    """

    left: threading.Event | None = None

    def __init__(self, process_set: Any = None) -> None:
        self.hvd = horovod()
        self.process_set = process_set or self.hvd.global_process_set
        size = None
        with suppress(ValueError):
            size = self.process_set.size()
        if size is None:
            raise RuntimeError(f"{self.process_set} was never added to Horovod, or was removed")
        if not self.process_set.included():
            raise RuntimeError(f"this rank is not a member of {self.process_set}")
        self.size: int = size
        self.rank: int = self.process_set.rank()
        # Open MPI's allgather of long messages is a ring of size - 1 rounds, each as slow as its
        # slowest rank; its alltoall sends all messages at once.
        self.sends_directly = 1 < size <= MOST_DIRECT and self.hvd.mpi_enabled()
        self._generation = self.generation

    def node(self) -> tuple[int, int]:
        return self.hvd.cross_rank(), self.hvd.local_size()

    def allgather(self, data: torch.Tensor, name: str) -> Any:
        return HANDLES.submit(self, self.hvd.allgather_async, data, name=name)

    def alltoall(self, data: torch.Tensor, splits: torch.Tensor, name: str) -> Any:
        return HANDLES.submit(self, self.hvd.alltoall_async, data, splits, name=name)

    def allreduce(self, data: torch.Tensor, name: str, op: Any, **factors: float) -> Any:
        """Submit ``hvd.allreduce_async``, which leaves ``data`` as it is, and return its handle."""
        return HANDLES.submit(self, self.hvd.allreduce_async, data, name=name, op=op, **factors)

    def broadcast_from_root(self, data: torch.Tensor, name: str) -> Any:
        """Submit ``hvd.broadcast_async`` from the first member, and return its handle."""
        root = self.process_set.ranks[0]  # a global rank
        return HANDLES.submit(self, self.hvd.broadcast_async, data, root, name=name)

    def poll(self, handle: Any) -> bool:
        return self.hvd.poll(handle)

    def synchronize(self, handle: Any) -> Any:
        result = self.hvd.synchronize(handle)
        HANDLES.pop(handle, None)
        return result

    @property
    def generation(self) -> Any:
        """Return an object that differs after each hvd.init(), which numbers handles anew."""
        return self.hvd.mpi_ops._handle_map

    def is_current(self) -> bool:
        if not self.hvd.is_initialized() or self.generation is not self._generation:
            return False
        try:
            now = self.process_set.size(), self.process_set.rank()
        except ValueError:  # it was removed
            return False
        return now == (self.size, self.rank)

    def average_all(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        submit, average = self.hvd.allreduce_async_, self.hvd.Average
        handles = [
            HANDLES.submit(self, submit, tensor, name=f"{name}.{index}", op=average)
            for index, tensor in enumerate(tensors)
        ]
        for handle in handles:  # Horovod fuses what waits together
            self.synchronize(handle)

    def wait(self, handle: Any, name: str, operation: str = "allgather") -> Any:
        """Return the result of the collective ``name``; see ``Abandoned``."""
        while self.left is not None and not self.hvd.poll(handle):
            if self.left.is_set():
                raise Abandoned(name, handle, operation)
            time.sleep(_PAUSE)
        return self.synchronize(handle)

    @property
    def is_left(self) -> bool:
        """Return whether the step in progress was given up."""
        return self.left is not None and self.left.is_set()

    def gather_equal(self, values: torch.Tensor, name: str) -> torch.Tensor:
        handle = self.allgather(values, name)
        return self.wait(handle, name).view(self.size, *values.shape)

    def gather_objects(self, own: Any, name: str) -> list[Any]:
        """Return all ranks' objects, which JSON can represent."""
        data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        sizes = self.gather_equal(torch.tensor([data.numel()], device="cpu"), f"{name}.lengths")
        everyone = self.wait(self.allgather(data, name), name)
        parts = everyone.split(sizes.view(-1).tolist())
        return [json.loads(bytes(part.tolist())) for part in parts]

    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        data = torch.from_numpy(values.view(np.uint8).copy())
        handle = self.broadcast_from_root(data, name)
        return self.wait(handle, name, "broadcast").numpy().view(values.dtype)


class HorovodRounds(HorovodWorld):
    """Ranks of a process set, with the collectives of ``TorchWorld`` that World lacks.

    They serve sessions in which all gradients arrive at once.

    Args:
        label: Beginning of the names of collectives, the same on all ranks. No other object of this
            process may have it.
    """

    def __init__(self, process_set: Any, label: str) -> None:
        super().__init__(process_set)
        self.label = label

    def gather_equal(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return super().gather_equal(values.contiguous(), f"{self.label}.{name}")

    def begin_gather(self, values: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
        return self.allgather(values, f"{self.label}.begun"), (self.size, *values.shape)

    def is_gathered(self, begun: tuple[Any, tuple[int, ...]]) -> bool:
        return self.poll(begun[0])

    def end_gather(self, begun: tuple[Any, tuple[int, ...]]) -> torch.Tensor:
        handle, shape = begun
        return self.synchronize(handle).view(shape)

    def gather_objects(self, own: Any, name: str = "objects") -> list[Any]:
        return super().gather_objects(own, f"{self.label}.{name}")

    def forget_lengths(self) -> None:
        """Do nothing: Horovod's messages may have any length."""
