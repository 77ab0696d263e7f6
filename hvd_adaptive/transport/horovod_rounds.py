"""Define HorovodRounds, Horovod's ranks for sessions in which all gradients arrive at once."""

from __future__ import annotations

import json
from typing import Any

import torch

from hvd_adaptive.transport.horovod_world import HorovodWorld


class HorovodRounds(HorovodWorld):
    """Ranks of a Horovod process set, with the collectives of ``TorchWorld`` that World lacks.

    Args:
        process_set: The process set; all ranks if None.
        label: Beginning of the names of collectives, the same on all ranks. No other object of this
            process may have it.
    """

    def __init__(self, process_set: Any, label: str) -> None:
        super().__init__(process_set)
        self.label = label

    def gather_equal(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return super().gather_equal(values.contiguous(), f"{self.label}.{name}")

    def begin_gather(self, values: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
        """Start ``gather_equal`` without waiting; ``end_gather`` returns the result."""
        return self.allgather(values, f"{self.label}.begun"), (self.size, *values.shape)

    def is_gathered(self, begun: tuple[Any, tuple[int, ...]]) -> bool:
        """Return whether ``end_gather`` would not wait for other ranks."""
        return self.poll(begun[0])

    def end_gather(self, begun: tuple[Any, tuple[int, ...]]) -> torch.Tensor:
        """Return the result of ``begin_gather``."""
        handle, shape = begun
        return self.synchronize(handle).view(shape)

    def gather_objects(self, own: Any) -> list[Any]:
        """Return all ranks' objects, which JSON can represent."""
        data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        sizes = self.gather_equal(torch.tensor([data.numel()], device="cpu"), "sizes")
        everyone = self.synchronize(self.allgather(data, f"{self.label}.objects"))
        parts = everyone.split(sizes.view(-1).tolist())
        return [json.loads(bytes(part.tolist())) for part in parts]

    def forget_lengths(self) -> None:
        """Do nothing: Horovod's messages may have any length."""
