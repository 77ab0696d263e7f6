"""Compare between ranks which gradients have arrived when a backward pass ends."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.run.description import differences
from hvd_adaptive.run.worker import gather_patiently
from hvd_adaptive.transport.torch_world import TorchWorld

if TYPE_CHECKING:
    import torch.distributed as dist

ADVICE = (
    "Every rank must use the same parameters under the same names; DistributedDataParallel skips "
    "buckets of unused ones with skip_all_reduce_unused_params=True"
)


class Arrived:
    """The ranks' comparison, in a process group of its own.

    Ranks that skip different buckets pair other collectives wrongly, and never receive some.

    Args:
        group: The model's process group; None for the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._world = TorchWorld(group)

    def close(self) -> None:
        """Leave the ranks; see ``TorchWorld.close``."""
        self._world.close()

    def check(self, step: int, names: Sequence[str], warn: Callable[[], None]) -> None:
        """Compare names of the gradients of a step, a collective.

        Args:
            step: The step.
            names: Names of this rank's gradients.
            warn: Called while other ranks let this one wait (``gather_patiently``).

        Raises:
            RankMismatchError: They differ, on all ranks.
        """
        row = torch.tensor([zlib.crc32(repr(names).encode())], device="cpu")
        rows = gather_patiently(self._world, row, warn)
        if (rows == rows[0]).all():
            return
        own = {"the gradients of this step": dict.fromkeys(names, "there")}
        everyone = self._world.gather_objects(own)
        mismatch = differences(everyone, range(len(everyone)), ADVICE)
        raise RankMismatchError(f"step {step}: {mismatch}")
