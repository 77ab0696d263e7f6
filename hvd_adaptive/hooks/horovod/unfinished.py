"""Steps that some ranks do not take: they have given them up, or are in ``hvd.join()``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from hvd_adaptive.base.tensors import wide_of
from hvd_adaptive.coding.payload import OwnedBuffer
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.transport.collectives import AllGather, AllToAll, InFlight
from hvd_adaptive.transport.horovod_world import HorovodWorld

# Substitutes, by kind, for collectives that a rank never sent. Horovod pairs them by name and
# operation. If tensors then differ in dtype or shape, both end with an error, which is enough.
KINDS: dict[str, Callable[[HorovodWorld, str, OwnedBuffer], Any]] = {
    "payloads": lambda world, name, nothing: AllGather(nothing).submit(world, name),
    "parts": lambda world, name, nothing: AllToAll([nothing] * world.size).submit(world, name),
    "allgather": lambda world, name, nothing: world.allgather(nothing.bytes, name),
    "broadcast": lambda world, name, nothing: world.broadcast_from_root(nothing.bytes, name),
}


class AbandonedSteps:
    """Complete the collectives in flight of one compressor's steps that were given up before they
    had ended.

    A rank sends groups as soon as it knows that all ranks take part. It may have sent a group of
    such a step before another rank reached that group. Horovod then waits for the other rank. It
    would warn of that from then on, and pair the collective with the next one of the same name.
    Each attempt at a step therefore has its own names. Once all ranks are known to take part in the
    same attempt, they exchange lists of what is in flight, and each submits a substitute for what
    it had not sent. The step ends after all of these collectives; then its names may be used again.

    ``attempt`` is the number of the attempt at the step in progress, from 0; ``flying`` is in
    flight.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self._names: set[str] = set()
        self.flying: list[InFlight] = []
        self._substitutes: list[Any] = []
        self._generation: Any = None

    def add_step(self, step: Any, generation: Any) -> None:
        """Add a step that is given up, and that began in ``generation`` of Horovod."""
        self._bury(generation)
        self.flying += step.abandon()  # its worker then adds no more names
        self._names |= step.names
        self.attempt += 1

    def add(self, sent: InFlight, generation: Any) -> None:
        """Add a collective for which this rank no longer waits."""
        self._bury(generation)
        self._names.add(sent.name)
        self.flying.append(sent)

    def _bury(self, generation: Any) -> None:
        """Forget what was in flight in an earlier generation of Horovod."""
        if generation is not self._generation:
            self._generation, self.flying, self._substitutes = generation, [], []

    def complete(self, world: HorovodWorld, label: str, device: torch.device) -> None:
        """Complete what is in flight on any rank. All ranks call this at the same attempt.

        A rank may give this attempt up before it has read the other ranks' lists. A collective
        therefore remains in its list until it ends. ``label`` ends the names of this method's
        collectives.
        """
        self._bury(world.generation)
        nothing = OwnedBuffer.copy_of(torch.zeros(4, dtype=torch.uint8, device=device))
        flying = [sent for sent in self.flying if not world.poll(sent.handle)]
        own = [(sent.name, sent.kind) for sent in flying]
        everyone = world.gather_objects(own, f"hvd_adaptive.abandoned.{label}")
        # In one order on all ranks.
        for name, kind in sorted({(name, kind) for of_rank in everyone for name, kind in of_rank}):
            if name not in self._names:
                self._substitutes.append(KINDS[kind](world, name, nothing))
                self._names.add(name)

    def end(self, world: HorovodWorld) -> None:
        """End the step, after what was in flight when it drained."""
        self._bury(world.generation)
        for handle in [sent.handle for sent in self.flying] + self._substitutes:
            with suppress(RuntimeError):  # no rank reads the result
                world.synchronize(handle)
        self.attempt, self._names, self.flying, self._substitutes = 0, set(), [], []


class JoinedStep:
    """Average while some ranks are in ``hvd.join()`` because they have no more data, in place of
    Step; all other ranks have these gradients, by slot.

    Gradients travel by Horovod's own allreduce. It is the only collective in which a joined rank
    takes part; the rank adds zeros. Gradients are summed in float32 (float64 if they are float64).
    Averages are over all ranks, as in stock Horovod. Nothing is quantised, no table is fitted, and
    residuals do not change. Such a step is not counted, so all ranks have the same count when the
    joined ranks return.
    """

    counts = False
    names: frozenset[str] = frozenset()
    layout = None
    device = torch.device("cpu")

    def __init__(
        self, binding: RankContext, gradients: Mapping[int, torch.Tensor], name: str, attempt: int
    ) -> None:
        self.binding = binding
        self.number = binding.compressor.step
        self._factor = 1.0
        self._gradients = dict(gradients)
        self._name = f"{name}.joined.{attempt}"
        self._handles: dict[int, Any] = {}
        self._ranks: Any = None  # the handle of their number

    def launch_all(self, factor: float) -> None:
        """Submit every gradient. factor: scale of sums over ranks."""
        self._factor = factor
        world, meter = self.binding.world, self.binding.compressor._training.meter
        one = torch.ones(1, dtype=torch.float64, device="cpu")
        self._ranks = world.allreduce(one, f"{self._name}.ranks", world.hvd.Sum)
        for slot, gradient in sorted(self._gradients.items()):
            data = gradient.detach().to(wide_of(gradient.dtype)).contiguous().view(-1)
            self._handles[slot] = world.allreduce(data, f"{self._name}.{slot}", world.hvd.Sum)
            bytes_ = data.numel() * data.element_size()
            meter.add(
                payload_bytes=bytes_,
                coordinates=data.numel(),
                uncompressed_bytes=data.numel() * gradient.element_size(),
                wire_bytes=2 * bytes_ * (world.size - 1) // world.size,  # of a ring
            )

    @property
    def is_received(self) -> bool:
        """Return whether all sums are there."""
        return all(map(self.binding.world.poll, [self._ranks, *self._handles.values()]))

    def check_ranks(self, active: int) -> None:
        """Raise ValueError unless ``active`` ranks, as many as reduced the position, add gradients.

        If a user's own code calls ``compress`` and reduces over a process set, the ranks outside of
        it look as if they had called hvd.join().
        """
        world = self.binding.world
        ranks = round(world.synchronize(self._ranks).item())
        if ranks != active:
            raise ValueError(
                f"process_set: has ranks {world.process_set.ranks}, but what compress() returned "
                f"was reduced over {active} of them: give the compressor the process set of that "
                "reduction"
            )

    def describe(self) -> str:
        """Return what the step waits for."""
        return f"step {self.number}: allreduces of the ranks that have not called hvd.join()"

    def result(self, slot: int, absent: bool = False) -> torch.Tensor:
        """Return the reduced gradient, in its own shape and dtype."""
        gradient = self._gradients.pop(slot)
        begin = time.perf_counter()
        total = self.binding.world.synchronize(self._handles.pop(slot))
        seconds = time.perf_counter() - begin
        self.binding.compressor._training.meter.add(exchange_s=seconds)
        return total.mul_(self._factor).to(gradient.dtype).view(gradient.shape)

    def abandon(self) -> list[Any]:
        """Give up the step. Allreduces in flight end once every active rank has submitted them."""
        return []

    def commit(self) -> None:
        """End the step, which changes nothing."""
