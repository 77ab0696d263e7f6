"""Define what the connections of all frameworks have in common (connection.Connection)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist

from hvd_adaptive.training import rank_and_size

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.connection import Connection
    from hvd_adaptive.layout import Layout
    from hvd_adaptive.run.rank_context import RankContext


def is_first_rank(group: Any = None) -> bool:
    """Return whether this process is the first rank of ``group``, or of all ranks.

    Before torch.distributed is running they are those that torchrun has started.
    """
    if group is not None:
        return dist.get_rank(group) == 0
    rank, size = rank_and_size()
    return rank == 0 if size else os.environ.get("RANK", "0") == "0"


class Connected:
    """Base of connections, which bind a compressor to ranks."""

    compressor: GradientCompressor
    _binding: RankContext | None  # until the ranks are known
    _driver: Any = None  # a Driver, if it takes gradients through the steps

    @property
    def layout(self) -> Layout | None:
        return None if self._binding is None else self._binding.layout

    @property
    def exchange(self) -> str | None:
        return None if self._binding is None else self._binding.exchange_name

    def describe(self) -> str:
        """Return what the step in progress waits for; see ``Driver.describe``."""
        return "" if self._driver is None else self._driver.describe()


class ApartFromHorovod(Connected):
    """Base of connections whose gradients do not come from Horovod's optimizer."""

    serves: ClassVar[tuple[str, str]]

    def compress(self, tensor: torch.Tensor) -> Any:
        """Refuse a gradient of Horovod's."""
        kind, own = self.serves
        raise RuntimeError(
            f"one compressor serves one optimizer or {kind} at a time, and this one serves {own}: "
            "construct another (or close() this one)"
        )

    def decompress(self, output: torch.Tensor, ctx: Any) -> Any:
        """Refuse a gradient of Horovod's."""
        return self.compress(output)

    def reconnect(self) -> None:
        """Connect the compressor again if it was closed; raise RuntimeError if it serves something
        else.
        """
        if self.compressor._training.connection is None:
            self.compressor._training.connection = cast("Connection", self)
        if self.compressor._training.connection is not self:
            raise RuntimeError("one compressor serves one model, but this one serves another")
