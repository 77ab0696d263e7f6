"""Average a step while some ranks are in ``hvd.join()`` because they have no more data.

Gradients travel by Horovod's own allreduce. It is the only collective in which a joined rank takes
part; the rank adds zeros. Gradients are summed in float32 (float64 if they are float64). Averages
are over all ranks, as in stock Horovod. Nothing is quantised, no table is fitted, and residuals do
not change. Such a step is not counted, so all ranks have the same count when the joined ranks
return.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.base.finite import wide_of

if TYPE_CHECKING:
    from hvd_adaptive.run.rank_context import RankContext


class JoinedStep:
    """Take the place of Step for gradients, by slot, that all active ranks have."""

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

    def renumber(self, number: int) -> None:
        """See ``Step.renumber``."""
        self.number = number

    def launch_all(self, factor: float) -> None:
        """Submit every gradient. factor: scale of sums over ranks."""
        self._factor = factor
        world, meter = self.binding.world, self.binding.compressor._training.meter
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
        return all(map(self.binding.world.poll, self._handles.values()))

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
