"""Define TorchWorld, the ranks of a torch.distributed process group.

torch.distributed pairs collectives by their order, so these ranks have a process group of their
own: a thread of the compressor may use it while the program uses the model's group.

Horovod's allgather and alltoall accept any lengths. In torch.distributed every receiver must know
the lengths. Exchanging them before each message would cost a wait for the slowest rank, so lengths
are exchanged once for each name. Afterwards a rank sends frames. A frame contains the length of the
message, whether any message of this rank is longer than its frame, and as much of the message as
fits. If messages of some rank are longer, all ranks see it: ``poll`` then returns False, and
``synchronize``, which ranks must call at the same place in their order of collectives, exchanges
the rests. Frames become larger. ``forget_lengths`` starts over.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import weakref
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvd_adaptive.base.tensors import from_host
from hvd_adaptive.transport.world import World

logger = logging.getLogger("hvd_adaptive")

HEAD = 16  # bytes of a frame before its message: two int64
# Frames that were too short get a share of the length and these bytes more.
SLACK, LEAST_SLACK = 32, 64
# Seconds until a rank that waits for others in its first step logs a warning.
LATE = 60.0
NOT_BEGUN = (
    "rank %d still waits for other ranks, which have not begun their first compressed step: every "
    "rank must register the hook, or call the same function"
)


@dataclass
class _Handle:
    """A collective in flight; it keeps the memory that it reads and writes.

    ``room`` is int64 [sender, receiver], bytes of a message that fit into a frame. Once frames have
    been received, ``lengths`` holds the length of each message, and ``has_rests`` whether any
    message of any rank is longer than its frame.
    """

    name: str
    parts: Sequence[torch.Tensor]
    room: torch.Tensor
    work: Any
    sent: torch.Tensor | None
    frames: Sequence[torch.Tensor]
    gathers: bool
    lengths: torch.Tensor | None = None
    has_rests: bool = False

    def read_heads(self) -> None:
        """Read the frames' heads, which have been received."""
        if self.lengths is None:
            heads = torch.cat([frame[:HEAD] for frame in self.frames]).view(torch.int64).view(-1, 2)
            self.lengths, exceeded = heads.cpu().T
            self.has_rests = bool(exceeded.any())


class TorchWorld(World):
    """Ranks of a process group, the default one if None; see World.

    Collectives are paired by their order, which must be the same on every rank, not by name.
    Construction is a collective of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError("process_group: the default group is not initialized")
        self._given = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("process_group: this process is not a member of it")
        left = _left.get(group)
        self.group = left.pop() if left else _group_like(group)
        self._rooms: dict[str, torch.Tensor] = {}
        self._outgrown: set[str] = set()
        self._is_closed = False

    @functools.cached_property
    def _device(self) -> torch.device:
        """Return the device of small arrays, at the first collective that sends some."""
        return _device_of(self.group)

    def is_current(self) -> bool:
        try:
            now = dist.get_world_size(self._given), dist.get_rank(self._given)
        except ValueError:  # the program has destroyed its groups, and perhaps made others
            return False
        return now == (self.size, self.rank)

    def close(self) -> None:
        """Leave this world's process group to the next world of the same ranks.

        Every rank must call this at the same place, and not use this world afterwards. The group is
        not destroyed: PyTorch 2.13 then fails to make another of the same ranks.
        """
        if self.is_current() and not self._is_closed:
            self._is_closed = True
            _left.setdefault(self._given, []).append(self.group)

    @property
    def knows_lengths(self) -> bool:
        return bool(self._rooms)

    def forget_lengths(self) -> None:
        """Exchange lengths anew; every rank must call this before the same collective."""
        self._rooms.clear()

    # Small host arrays ----------------------------------------------------------------------------

    def gather_equal(self, values: torch.Tensor, name: str) -> torch.Tensor:
        own = values.contiguous().to(self._device)
        everyone = own.new_empty(self.size, *own.shape)
        dist.all_gather(list(everyone), own, group=self.group)
        return everyone.to(values.device)

    def begin_gather(self, values: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Start ``gather_equal`` without waiting; ``end_gather`` returns the result."""
        with self._aside():
            own = values if self._device.type == "cpu" else from_host(values, self._device)
            everyone = own.new_empty(self.size, *own.shape)
            return dist.all_gather(list(everyone), own, group=self.group, async_op=True), everyone

    @staticmethod
    def is_gathered(begun: tuple[Any, torch.Tensor]) -> bool:
        """Return whether ``end_gather`` would not wait for other ranks."""
        return begun[0].is_completed()

    def end_gather(self, begun: tuple[Any, torch.Tensor]) -> torch.Tensor:
        """Return the result of ``begin_gather`` on the CPU."""
        work, everyone = begun
        with self._aside():
            work.wait()
            return everyone.cpu()

    def _aside(self) -> AbstractContextManager[Any]:
        """Return the context of a stream in which the host's arrays wait for no gradient."""
        return nullcontext() if self._device.type == "cpu" else torch.cuda.stream(self._stream)

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def gather_objects(self, own: Any) -> list[Any]:
        """Return all ranks' objects, which are sent pickled."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.group)
        return everyone

    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        data = torch.from_numpy(values.view(np.uint8).copy()).to(self._device)
        dist.broadcast(data, dist.get_global_rank(self.group, 0), group=self.group)
        return data.cpu().numpy().view(values.dtype)

    def average_all(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        works = []
        for tensor in tensors:
            tensor.div_(self.size)
            works.append(dist.all_reduce(tensor, group=self.group, async_op=True))
        for work in works:
            work.wait()

    # Collectives of payloads ----------------------------------------------------------------------

    def node(self) -> tuple[int, int]:
        """Return World.node; a collective."""
        own = torch.tensor([zlib.crc32(socket.gethostname().encode())], device="cpu")
        hosts = self.gather_equal(own, "nodes")[:, 0].tolist()
        here = hosts[self.rank]
        return list(dict.fromkeys(hosts)).index(here), hosts.count(here)

    def poll(self, handle: _Handle) -> bool:
        """Return whether a collective has ended and ``synchronize`` only reads its result."""
        if not handle.work.is_completed():
            return False
        if handle.frames[0].is_cpu:
            handle.read_heads()
        return not handle.has_rests

    def allgather(self, data: torch.Tensor, name: str) -> _Handle:
        parts = [data] * self.size
        if name not in self._rooms:
            self._lengths(name, parts)
        most = self._rooms[name].max()  # all frames are of one size
        size = int(most)
        frame = _frame(data, size, data.numel() > size)
        frames = list(frame.new_empty(self.size, frame.numel()))
        work = dist.all_gather(frames, frame, group=self.group, async_op=True)
        return _Handle(name, parts, most.expand(self.size, self.size), work, frame, frames, True)

    def alltoall(self, data: torch.Tensor, splits: torch.Tensor, name: str) -> _Handle:
        parts = data.split(splits.tolist())
        if name not in self._rooms:
            self._lengths(name, parts)
        room = self._rooms[name]
        own = room[self.rank].tolist()
        pairs = list(zip(parts, own, strict=True))
        exceeded = any(part.numel() > size for part, size in pairs)
        sent = torch.cat([_frame(part, size, exceeded) for part, size in pairs])
        sizes = (HEAD + room[:, self.rank]).tolist()
        received = sent.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            received, sent, sizes, [HEAD + size for size in own], group=self.group, async_op=True
        )
        return _Handle(name, parts, room, work, sent, received.split(sizes), False)

    def alltoall_equal(self, data: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(data)
        dist.all_to_all_single(received, data, group=self.group)
        return received

    def synchronize(self, handle: _Handle) -> Any:
        """Return what each rank sent; on a GPU end to end, so that headers are read in one copy."""
        handle.work.wait()
        handle.read_heads()
        lengths, parts = handle.lengths, []
        assert lengths is not None
        for frame, length in zip(handle.frames, lengths.tolist(), strict=True):
            parts.append(frame[HEAD : HEAD + length])  # or as much as is there
        if handle.has_rests:
            rests = self._exchange_rests(handle)
            parts = [torch.cat(both) for both in zip(parts, rests, strict=True)]
        if parts[0].is_cpu:
            return parts
        data = torch.cat(parts)
        return data if handle.gathers else (data, lengths.to(torch.int32))

    def _lengths(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Exchange lengths, int64 [sender, receiver], and enlarge frames that were too short."""
        own = torch.tensor([part.numel() for part in parts], device="cpu")
        lengths = self.gather_equal(own, name)
        slack = (lengths // SLACK + LEAST_SLACK) * (lengths > 0) if name in self._outgrown else 0
        self._rooms[name] = (lengths + slack + 7) // 8 * 8
        return lengths

    def _exchange_rests(self, flight: _Handle) -> list[torch.Tensor]:
        """Return the part of each rank's message that did not fit into its frame."""
        self._outgrown.add(flight.name)
        rests = (self._lengths(flight.name, flight.parts) - flight.room).clamp(min=0)
        own = [
            part[room:]
            for part, room in zip(flight.parts, flight.room[self.rank].tolist(), strict=True)
        ]
        data, sizes = torch.cat(own), rests[:, self.rank].tolist()
        received = data.new_empty(sum(sizes))
        dist.all_to_all_single(received, data, sizes, rests[self.rank].tolist(), group=self.group)
        return list(received.split(sizes))


# Groups of closed worlds by the group that they were made for.
_left: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _group_like(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of the same ranks, backends and time limit, which only they create.

    It is made in the first step, so a warning is logged if this takes longer than ``LATE`` seconds.
    """
    late = threading.Timer(LATE, logger.warning, (NOT_BEGUN, dist.get_rank(group)))
    late.daemon = True
    late.start()
    try:
        return _made_like(group)
    finally:
        late.cancel()


def _made_like(group: dist.ProcessGroup) -> dist.ProcessGroup:
    device = torch.device("cpu" if "cpu:" in str(dist.get_backend_config(group)) else "cuda")
    options = getattr(group._get_backend(device), "options", None)
    fillers = _fillers(group)
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=getattr(options, "_timeout", None),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
    )
    for filler in fillers:
        dist.destroy_process_group(filler)
    return made


def _fillers(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Return groups of this rank alone, with which all ranks of ``group`` have as many groups.

    PyTorch includes the number of a process's groups in the name under which the ranks of a new
    group find each other, and programs may have groups of which not all ranks are members.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    counts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(counts, count, group=group)
    alone = [dist.get_rank()]
    return [
        dist.new_group(alone, backend="gloo", use_local_synchronization=True)
        for _ in range(max(counts) - count)
    ]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device of small arrays that the group's backend accepts."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _frame(message: torch.Tensor, room: int, exceeded: bool) -> torch.Tensor:
    frame = message.new_empty(HEAD + room)
    head = frame[:HEAD].view(torch.int64)
    head[0], head[1] = message.numel(), exceeded
    size = min(message.numel(), room)
    frame[HEAD : HEAD + size] = message[:size]
    frame[HEAD + size :] = 0
    return frame
