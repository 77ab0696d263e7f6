"""A compressor at work in training: binds it to its optimizer and runs its steps."""

from __future__ import annotations

import logging
import threading
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.exchange.allgather import EXCHANGES, LARGEST_COLLECTIVE
from hvd_adaptive.exchange.level_sync import LevelSync
from hvd_adaptive.exchange.world import World, horovod
from hvd_adaptive.fusion.layout import Group, Layout, Member, build_layout
from hvd_adaptive.fusion.owner import Owner, find_owner
from hvd_adaptive.fusion.placeholder import check_reduced, placeholder
from hvd_adaptive.fusion.step import Step

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor

logger = logging.getLogger("hvd_adaptive")


@dataclass
class _Batch:
    """One step's gradients: a Step, or tensors without names until the first decompress."""

    step: Step | None
    unnamed: list[torch.Tensor]


@dataclass(frozen=True)
class Ticket:
    """What decompress needs to know of a gradient."""

    batch: _Batch
    slot: int


class Session:
    """Turns Horovod's calls of compress and decompress into steps of fusion groups."""

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self.settings = compressor.settings
        self.world: World
        self.exchange: Any
        self._owner: Owner | None = None
        self._layout: Layout | None = None
        self._parameters: list[torch.nn.Parameter] = []
        self._prediction: Prediction
        self._sync: LevelSync | None = None
        self._name = ""
        self._batch: _Batch | None = None
        self._staging: dict[torch.dtype, torch.Tensor] = {}
        self._lock = threading.RLock()
        self._bound = False
        self._warned = False

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket | None]:
        """See GradientCompressor.compress."""
        if tensor is None:
            raise ValueError("tensor: is None; Horovod gave a group with a missing gradient")
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            return tensor, None
        with self._lock:
            if not self._bound or not self.world.is_current():
                self._bind()
            if self._layout is None:
                return self._compress_unnamed(tensor)
            slot = self._slot_of(tensor)
            if slot is None:
                self._warn_once("a gradient belongs to no known parameter: Horovod reduces it")
                return tensor, None
            batch = self._open_batch(slot)
            batch.step.arrive(slot, tensor)
            return self._placeholder(slot, batch.step.number), Ticket(batch, slot)

    def decompress(self, output: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        """See GradientCompressor.decompress."""
        with self._lock:
            factor = check_reduced(output, self.world.size)
            batch = ticket.batch
            if batch.step is None:
                self._name_by_arrival(batch)
            step = batch.step
            if step.factor is None:
                step.factor = factor
                self._send(step)
            result = step.result(ticket.slot)
            if step.finished:
                self._end(step)
            return result

    # What steps ask for -------------------------------------------------------------------------

    def staging(self, coordinates: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer that is used again for every group; payloads are made from it at once."""
        buffer = self._staging.get(dtype)
        if buffer is None or buffer.numel() < coordinates or buffer.device != device:
            buffer = self._staging[dtype] = torch.empty(coordinates, dtype=dtype, device=device)
        return buffer[:coordinates]

    def quantized_now(self, group: Group) -> int:
        """Coordinates of a group that are quantised at this step: none while warming up."""
        return 0 if self.compressor.step < self.settings.warmup_steps else group.quantized

    def in_flight_bytes(self, group: Group) -> int:
        """Memory that a group's exchange holds."""
        quantized = self.quantized_now(group)
        size = self.compressor.payload_bytes(quantized, group.coordinates - quantized, group.dtype)
        return self.exchange.in_flight_bytes(size)

    def name_of(self, group: int) -> str:
        """Name of a group's collective: the same in every step and on every rank."""
        return f"{self._name}.{group}"

    # Binding ------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Find the parameters and lay them out; again after the set of ranks has changed."""
        owner = find_owner(self.compressor)
        if owner is None and self.settings.named_parameters is not None:
            named = [(n, p) for n, p in self.settings.named_parameters if p.requires_grad]
            owner = Owner(named, None, None)
        elif owner is not None:
            _check_op(owner.op)
        self.world = World(self.settings.process_set or (owner and owner.process_set))
        self.exchange = EXCHANGES[self.settings.exchange](self.world)
        self._owner, self._sync, self._batch, self._bound = owner, None, None, True
        if owner is None:
            self._layout = None
            return
        by_name = dict(owner.named_parameters)
        members = [Member(n, tuple(p.shape), p.dtype) for n, p in by_name.items()]
        self._take_layout(self._build(members, in_order=False))
        self._parameters = [by_name[member.name] for member in self._layout.members]
        self._prediction = Prediction(len(self._parameters))

    def _take_layout(self, layout: Layout) -> None:
        self._layout = layout
        self._name = _claim_name(layout.fingerprint ^ self.compressor.fingerprint)
        logger.debug(
            "%s: %d tensors in %d groups over %d ranks",
            self._name, len(layout.members), len(layout.groups), self.world.size,
        )  # fmt: skip

    def _build(self, members: list[Member], in_order: bool) -> Layout:
        """A layout whose groups fit Horovod's and the user's bounds; smaller groups as ranks grow."""
        bound = min(LARGEST_COLLECTIVE, self.settings.in_flight_bytes // 2)
        most = self.settings.fusion_bytes // 4
        while True:
            layout = build_layout(
                members,
                min_numel=self.settings.min_numel,
                bucket_size=self.settings.bucket_size,
                tail=self.settings.tail,
                most_coordinates=most,
                in_order=in_order,
            )
            largest = max(map(self.in_flight_bytes, layout.groups), default=0)
            if largest <= bound:
                return layout
            if most < self.settings.bucket_size:
                raise ValueError(
                    f"in_flight_bytes={self.settings.in_flight_bytes}: an allgather over "
                    f"{self.world.size} ranks of the smallest group takes {largest} bytes, of which "
                    f"two must fit; raise it, lower bucket_size, or use exchange='scatter_reduce' "
                    "where it is available"
                )
            most //= 2

    # Arrivals -----------------------------------------------------------------------------------

    def _slot_of(self, tensor: torch.Tensor) -> int | None:
        slot = self._prediction.find(lambda i: self._parameters[i].grad is tensor)
        if slot is not None:
            return slot
        self._check_owner()
        # A dense copy of a sparse gradient, known by its shape where that leaves one choice.
        choices = [
            i
            for i, p in enumerate(self._parameters)
            if p.grad is not None and p.grad.is_sparse and p.shape == tensor.shape
        ]
        return choices[0] if len(choices) == 1 else None

    def _check_owner(self) -> None:
        owner = find_owner(self.compressor)
        ours = self._owner.optimizer
        if owner is not None and (ours is None or owner.optimizer() is not ours()):
            raise RuntimeError(
                "one compressor serves one optimizer at a time, but two call this one: construct a "
                "compressor for each (or close() it before it serves another)"
            )

    def _open_batch(self, slot: int) -> _Batch:
        batch = self._batch
        if batch is not None and batch.step.factor is None and not batch.step.has(slot):
            return batch
        if batch is not None:
            batch.step.abandon()
        self._prediction.restart()
        number = self.compressor.step
        step = Step(self, self._layout, number, hold=self.compressor.update_due(number))
        self._batch = _Batch(step, [])
        return self._batch

    def _compress_unnamed(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket]:
        batch = self._batch
        if batch is None or batch.step is not None:
            batch = self._batch = _Batch(None, [])
        batch.unnamed.append(tensor)
        if len(batch.unnamed) > 1:
            self._warn_once(
                "no optimizer holds this compressor: gradients are told apart by the order in which "
                "they arrive, which must be the same on all ranks (or give named_parameters=)"
            )
        slot = len(batch.unnamed) - 1
        return self._placeholder(slot, self.compressor.step), Ticket(batch, slot)

    def _name_by_arrival(self, batch: _Batch) -> None:
        """Lay out tensors without names; ranks first make sure that they have the same."""
        members = [Member(str(i), tuple(t.shape), t.dtype) for i, t in enumerate(batch.unnamed)]
        layout = self._build(members, in_order=True)
        name = f"hvd_adaptive.{self.compressor.fingerprint:08x}.layout"
        own = torch.tensor([layout.fingerprint >> 1], dtype=torch.int64)
        if not bool((self.world.gather_equal(own, name) == own).all()):
            raise RankMismatchError("ranks disagree on the shapes of their gradients or their order")
        self._take_layout(layout)
        self._layout = None
        number = self.compressor.step
        batch.step = Step(self, layout, number, hold=self.compressor.update_due(number))
        for slot, tensor in enumerate(batch.unnamed):
            batch.step.arrive(slot, tensor)

    def _placeholder(self, slot: int, step: int) -> torch.Tensor:
        """Covers all that ranks must agree on before they wait for each other: the collectives'
        names (settings, layout, instance) and whether this is an update step."""
        named = "" if self._layout is None else self._name
        agreed = repr((self.compressor.fingerprint, named, self.compressor.update_due(step)))
        return placeholder(self.world.rank, slot, step, zlib.crc32(agreed.encode()))

    # Steps --------------------------------------------------------------------------------------

    def _send(self, step: Step) -> None:
        """Every gradient is there: refit the table if this is an update step, then exchange."""
        if self.compressor.update_due(step.number):
            if self._sync is None:
                self._sync = LevelSync(self.world, self._name)
            self.compressor.update(step.number, step.samples, self._sync)
        step.launch_all()

    def _end(self, step: Step) -> None:
        step.drain()
        if self._layout is not None:
            self._prediction.learn()
        self.compressor.step = step.number + 1
        self.compressor.meter.finish()
        self._batch = None

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            logger.warning(message)
            self._warned = True


class Prediction:
    """Which slot comes next: the previous step's order is tried before a search through all."""

    def __init__(self, count: int) -> None:
        self._order = list(range(count - 1, -1, -1))
        self._seen: list[int] = []
        self._next = 0

    def restart(self) -> None:
        """A new step begins; the slot found last is its first."""
        self._seen = self._seen[-1:]

    def find(self, matches: Any) -> int | None:
        """The slot for which ``matches(slot)`` holds."""
        count = len(self._order)
        for offset in range(count):
            position = (self._next + offset) % count
            slot = self._order[position]
            if matches(slot):
                self._next = (position + 1) % count
                self._seen.append(slot)
                return slot
        return None

    def learn(self) -> None:
        """The step is over: its order is the next one's prediction."""
        rest = set(self._order) - set(self._seen)
        self._order = list(dict.fromkeys(self._seen)) + [s for s in self._order if s in rest]
        self._seen, self._next = [], 0


def _check_op(op: Any) -> None:
    hvd = horovod()
    if op not in (hvd.Average, hvd.Sum):
        known = ("Adasum", "Min", "Max", "Product")
        name = next((n for n in known if getattr(hvd, n, None) is op), "Adasum")
        raise ValueError(f"op=hvd.{name}: gradients can be compressed under hvd.Average and hvd.Sum")


_taken: Counter[str] = Counter()


def _claim_name(fingerprint: int) -> str:
    """A collective name that no other session of this process has.

    Sessions with equal layouts and settings are counted in the order in which optimizers took
    their compressors, which is the program's and so the same on all ranks. (The lowest number that
    is free would depend on when each rank collects its garbage.)
    """
    base = f"hvd_adaptive.{fingerprint:016x}"
    _taken[base] += 1
    return f"{base}.{_taken[base] - 1}"
