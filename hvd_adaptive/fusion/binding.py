"""A compressor bound to an optimizer: its ranks, its parameters, its groups and their names."""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.exchange.collectives import LARGEST_COLLECTIVE
from hvd_adaptive.exchange.exchange import Exchange, Place
from hvd_adaptive.exchange.exchanges import EXCHANGES
from hvd_adaptive.exchange.level_sync import LevelSync
from hvd_adaptive.exchange.nodes import nodes_of
from hvd_adaptive.exchange.world import World, horovod
from hvd_adaptive.fusion.layout import Group, Layout, Member, build_layout, parts_among
from hvd_adaptive.fusion.owner import Owner, find_owner
from hvd_adaptive.fusion.prediction import Prediction

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor

logger = logging.getLogger("hvd_adaptive")


class Binding:
    """What stays the same from step to step while the set of ranks does.

    layout: None where no optimizer was found; then each step lays out what arrived.
    """

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self.settings = compressor.settings
        self.owner = _owner_of(compressor)
        self.world = World(self.settings.process_set or (self.owner and self.owner.process_set))
        make = EXCHANGES[self.settings.exchange]
        nodes = nodes_of(self.settings.ranks_per_node, self.world.size)
        self.exchange: Exchange = make(Place(self.world.size, self.world.rank, nodes))
        self.layout: Layout | None = None
        self.parts: list[str] = []
        self.name = ""
        self.prediction = Prediction(0)
        self.given_up: list[Any] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._staging: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._sync: LevelSync | None = None
        if self.owner is not None:
            by_name = dict(self.owner.named_parameters)
            compressor.know_parameters(list(by_name))
            members = [
                Member(n, tuple(p.shape), p.dtype, compressor.part_of(n))
                for n, p in by_name.items()
            ]
            self.layout = self.build_layout(members)
            self.name = _claim_name(self.layout.fingerprint ^ compressor.fingerprint)
            self._parameters = [by_name[member.name] for member in self.layout.members]
            self.prediction = Prediction(len(self._parameters))
            logger.debug("%s: %d tensors in %d groups over %d ranks", self.name,
                         len(members), len(self.layout.groups), self.world.size)  # fmt: skip
            _warn_of_names(len(members) + len(self.layout.groups))

    def slot_of(self, tensor: torch.Tensor) -> int | None:
        """The slot of the parameter whose gradient ``tensor`` is; None where there is none."""
        slot = self.prediction.find(lambda i: self._parameters[i].grad is tensor)
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

    def is_gradient(self, slot: int, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the gradient of the parameter in ``slot``, and an optimizer asked
        for its average, which may then take its place; hvd.allreduce must not change its input."""
        optimizer = self.owner is not None and self.owner.optimizer is not None
        return optimizer and self._parameters[slot].grad is tensor

    def build_layout(self, members: list[Member], in_order: bool = False) -> Layout:
        """A layout whose groups fit Horovod's and the user's bounds: smaller ones as ranks grow."""
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
                if self.exchange.settled:
                    self.exchange.arrange(layout.groups)
                self.parts = parts_among(layout.groups)
                return layout
            if most < self.settings.bucket_size:
                raise ValueError(
                    f"in_flight_bytes={self.settings.in_flight_bytes}: "
                    f"exchange={self.settings.exchange!r} of the smallest group over "
                    f"{self.world.size} ranks takes {largest} bytes, and two must fit; raise it, "
                    "lower bucket_size, or use exchange='scatter_reduce'"
                )
            most //= 2

    def settle(self, layout: Layout, step: int) -> None:
        """Before the first group is sent, and once all ranks agree: what the exchange must know."""
        if self.exchange.settled:
            return
        self.exchange.settle(self.world, self.compressor, self.name)
        self.exchange.arrange(layout.groups)
        self.parts = parts_among(layout.groups)
        self.prepare(step)

    def prepare(self, step: int) -> None:
        """Before a step is asked for an update."""
        if self.exchange.settled:
            self.exchange.prepare(self.compressor, self.parts, step)

    def staging(self, coordinates: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer that is used again for every group; payloads are made from it at once."""
        return self._buffer("gradients", coordinates, dtype, device)

    def zeros(self, coordinates: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Another such buffer, of zeros, for a group's result, which is copied at once."""
        return self._buffer("results", coordinates, dtype, device).zero_()

    def _buffer(
        self, use: str, coordinates: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        buffer = self._staging.get((use, dtype))
        if buffer is None or buffer.numel() < coordinates or buffer.device != device:
            buffer = torch.empty(coordinates, dtype=dtype, device=device)
            self._staging[use, dtype] = buffer
        return buffer[:coordinates]

    def quantized_now(self, group: Group) -> int:
        """Coordinates of a group that are quantised at this step: none while warming up."""
        return 0 if self.compressor.step < self.settings.warmup_steps else group.quantized

    def in_flight_bytes(self, group: Group) -> int:
        """Memory that a group's exchange holds, at most: in full precision if there is a warm-up
        (a loaded state may lead back into it)."""
        quantized = 0 if self.settings.warmup_steps else group.quantized
        codec = self.compressor.part(group.part)
        full = group.coordinates - quantized
        return self.exchange.in_flight_bytes(codec, quantized, full, group.dtype)

    def sweep(self) -> None:
        """Clear away collectives of given-up steps that have ended meanwhile; wait for none."""
        hvd = self.world.hvd
        for handle in list(self.given_up):
            if hvd.poll(handle):
                self.given_up.remove(handle)
                hvd.synchronize(handle)

    def sync(self) -> LevelSync:
        """Level sync over these ranks; every rank must ask for it at the same step."""
        if self._sync is None:
            self._sync = LevelSync(self.world, self.name)
        return self._sync

    def _check_owner(self) -> None:
        owner = find_owner(self.compressor, callers_only=True)
        ours = self.owner.optimizer
        if owner is not None and (ours is None or owner.optimizer() is not ours()):
            raise RuntimeError(
                "one compressor serves one optimizer at a time, but two call this one: construct a "
                "compressor for each (or close() it before it serves another)"
            )


def _owner_of(compressor: GradientCompressor) -> Owner | None:
    owner = find_owner(compressor)
    named = compressor.settings.named_parameters
    if owner is not None:
        _check_op(owner.op)
    elif named is not None:
        owner = Owner([(n, p) for n, p in named if p.requires_grad], None, None)
    return owner


def _check_op(op: Any) -> None:
    hvd = horovod()
    if op not in (hvd.Average, hvd.Sum):
        known = ("Min", "Max", "Product")
        name = next((n for n in known if getattr(hvd, n) is op), "Adasum")
        raise ValueError(f"op=hvd.{name}: must be hvd.Average or hvd.Sum to compress gradients")


def _warn_of_names(count: int) -> None:
    """Each parameter's placeholder and each group is a collective with a name of its own."""
    cached = os.environ.get("HOROVOD_CACHE_CAPACITY", "1024")
    if cached.isdecimal() and 0 < int(cached) < count:
        logger.warning(
            "%d gradients and groups are more than the %s names of Horovod's response cache: "
            "raise HOROVOD_CACHE_CAPACITY, or each step negotiates them anew", count, cached,
        )  # fmt: skip


_taken: Counter[str] = Counter()


def _claim_name(fingerprint: int) -> str:
    """A collective name that no other binding of this process has.

    Bindings of equal layouts and settings are counted in the order in which optimizers took their
    compressors, which is the program's and so the same on all ranks. (The lowest number that is
    free would depend on when each rank collects its garbage.)
    """
    base = f"hvd_adaptive.{fingerprint:016x}"
    _taken[base] += 1
    return f"{base}.{_taken[base] - 1}"
