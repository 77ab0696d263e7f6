"""Memory that may be handed to a collective."""

from __future__ import annotations

import torch


class Sendable:
    """Bytes (uint8, 1-D) that a collective may read for as long as it is under way.

    Meanwhile the next groups are gathered, encoded and decoded. So a collective accepts no tensor:
    it may be a view of a gradient, or of memory that the next group uses again. This type always
    has memory of its own. ``Sendable(size)`` allocates it, and its maker fills it before it is
    sent; ``copy_of`` copies what somebody else may write to. Nothing takes over a tensor.
    """

    __slots__ = ("_bytes",)

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device or "cpu")

    @classmethod
    def copy_of(cls, tensor: torch.Tensor, device: torch.device | None = None) -> Sendable:
        """A copy of a tensor of any dtype, there or on another device."""
        data = tensor.detach().reshape(-1).view(torch.uint8)
        return cls._around(data.to(device or data.device, copy=True))

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, to be filled or read."""
        return self._bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return self._bytes.numel()

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._bytes.device

    def part(self, begin: int, end: int | None = None) -> Sendable:
        """Bytes ``begin`` to ``end`` of the same memory."""
        return self._around(self._bytes[begin:end])

    @classmethod
    def _around(cls, data: torch.Tensor) -> Sendable:
        made = cls.__new__(cls)
        made._bytes = data
        return made


def check_sendable(name: str, *parts: object) -> None:
    """TypeError where one of ``parts`` is something else: borrowed memory, perhaps."""
    for part in parts:
        if not isinstance(part, Sendable):
            raise TypeError(
                f"{name}: a collective sends Sendable memory alone, not {type(part).__name__}; "
                "Sendable.copy_of copies a tensor that may change"
            )
