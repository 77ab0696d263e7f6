"""Where tensors are: copies to the host that nothing waits for, and CUDA's streams.

Nothing here waits for a whole device, and nothing does anything for tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

# What tensors of this package are made with, whatever torch's defaults.
HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


class Later:
    """A small tensor on its way to the host.

    ``get`` waits for this copy and what its stream had to do before it, not for what was queued
    later or on other streams.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            # From torch's cache of pinned memory, which knows how long the copy needs it.
            self._host = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True
            )
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def is_there(self) -> bool:
        """Whether ``get`` would not wait."""
        return self._event is None or self._event.query()

    def get(self) -> torch.Tensor:
        """The copy, a CPU tensor."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def __index__(self) -> int:
        """Of a tensor of one integer, which is waited for: ``tensor[:later]``."""
        return int(self.get())


def stacked(tensors: Sequence[torch.Tensor]) -> Later:
    """Tensors of equal shape and device as the rows of one, on their way to the host."""
    return Later(torch.stack(list(tensors)))


def from_host(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small CPU tensor on ``device``, without waiting for the copy."""
    return put(data, torch.empty(data.shape, dtype=data.dtype, device=device))


def put(data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy a small CPU tensor to ``target``, without waiting for it; returns the target."""
    return target.copy_(data.pin_memory() if target.is_cuda else data, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Until the current stream has done all it was given: for measurements."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def place(device: torch.device) -> Hashable:
    """What memory that is used again must not be shared beyond: on CUDA the current stream."""
    if device.type != "cuda":
        return device
    return device, torch.cuda.current_stream(device).cuda_stream


def taken_over(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, made by another library on the device's default stream, ready for the current
    one, which keeps its memory from being used again too early."""
    if tensor.is_cuda:
        current = torch.cuda.current_stream(tensor.device)
        default = torch.cuda.default_stream(tensor.device)
        if current != default:
            current.wait_stream(default)
            tensor.record_stream(current)
    return tensor


class Streams:
    """The streams on which the gradients of a step became ready: autograd runs each operation's
    backward pass on the stream of its forward pass."""

    def __init__(self) -> None:
        self._of: dict[int, torch.cuda.Stream] = {}

    def arrived(self, slot: int, tensor: torch.Tensor) -> None:
        """``tensor`` is ready once the current stream has done what it was given."""
        if tensor.is_cuda:
            self._of[slot] = torch.cuda.current_stream(tensor.device)

    def join(self, slots: Iterable[int]) -> None:
        """The current stream waits for these gradients."""
        for stream in {self._of[slot] for slot in slots if slot in self._of}:
            current = torch.cuda.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)
