"""Own the memory that is handed to a collective."""

from __future__ import annotations

import torch


class OwnedBuffer:
    """Bytes (uint8, 1-D) that a collective may read while it is in progress.

    Meanwhile the next groups are gathered, encoded and decoded. Therefore a collective accepts no
    tensor, which may be a view of a gradient or of memory that the next group reuses. An object of
    this type always owns its memory. ``OwnedBuffer(size)`` allocates memory, which the caller fills
    before it is sent. ``copy_of`` copies a tensor that others may write to. No method takes over a
    tensor.

    Attributes:
        bytes: All bytes, to be filled or read.
        size: Their number.
    """

    __slots__ = ("bytes", "size")

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device or "cpu")
        self.size = size

    @classmethod
    def copy_of(cls, tensor: torch.Tensor, device: torch.device | None = None) -> OwnedBuffer:
        """Return a copy of a tensor of any dtype, on the same or another device."""
        data = tensor.detach().reshape(-1).view(torch.uint8)
        return cls._around(data.to(device or data.device, copy=True))

    def part(self, begin: int, end: int | None = None) -> OwnedBuffer:
        """Return bytes ``begin`` to ``end`` of the same memory."""
        return self._around(self.bytes[begin:end])

    @classmethod
    def _around(cls, data: torch.Tensor) -> OwnedBuffer:
        made = cls.__new__(cls)
        made.bytes, made.size = data, data.numel()
        return made


def check_owned(name: str, *parts: object) -> None:
    """Raise TypeError if one of ``parts`` is not an OwnedBuffer, and so may be borrowed memory."""
    for part in parts:
        if not isinstance(part, OwnedBuffer):
            raise TypeError(
                f"{name}: a collective sends an OwnedBuffer only, not {type(part).__name__}; "
                "OwnedBuffer.copy_of copies a tensor that may change"
            )
