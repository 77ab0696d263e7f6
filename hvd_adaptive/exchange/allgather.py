"""Every rank sends its payload to every other: for small numbers of ranks."""

from __future__ import annotations

from typing import Any

import torch

from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.exchange.world import World

# Horovod counts the bytes of a collective's result in 32-bit signed displacements.
LARGEST_COLLECTIVE = 2**31 - 1


class Allgather:
    """``hvd.allgather`` of payloads; each rank decodes all of them."""

    def __init__(self, world: World) -> None:
        self.world = world

    def in_flight_bytes(self, payload_bytes: int) -> int:
        """Memory of the result that one group's exchange holds on each rank."""
        return payload_bytes * self.world.size

    def wire_bytes(self, payload_bytes: int) -> int:
        """Bytes that this rank sends: its payload reaches every other rank once."""
        return payload_bytes * (self.world.size - 1)

    def start(self, payload: torch.Tensor, name: str) -> Any:
        """Submit a payload (uint8, 1-D); returns a handle for ``finish``."""
        return self.world.hvd.allgather_async(
            payload, name=name, process_set=self.world.process_set
        )

    def finish(self, handle: Any) -> list[torch.Tensor]:
        """Wait; the payloads of all ranks, in rank order."""
        gathered = self.world.hvd.synchronize(handle)
        payloads, at = [], 0
        for _ in range(self.world.size):
            length = read_header(gathered[at:]).length
            payloads.append(gathered[at : at + length])
            at += length
        if at != gathered.numel():
            raise PayloadError(f"received {gathered.numel()} bytes, the payloads say {at}")
        return payloads


EXCHANGES = {"allgather": Allgather}
