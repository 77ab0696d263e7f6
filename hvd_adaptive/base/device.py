"""Copy tensors to the host without blocking, and handle CUDA's streams.

No function waits for a whole device, and all are no-ops for tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Keywords for this package's tensors, independent of torch's defaults.
HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


class HostCopy:
    """Small tensor that is being copied to the host; ``get`` waits for this copy and for earlier
    work of its stream alone.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            # Allocated from torch's cache of pinned memory, which keeps it until the copy ends.
            self._host = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True
            )
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def is_there(self) -> bool:
        """Return whether ``get`` would return without waiting."""
        return self._event is None or self._event.query()

    def get(self) -> torch.Tensor:
        """Return the copy, a CPU tensor; wait if necessary."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def __index__(self) -> int:
        """Return the value of a tensor of one integer, after waiting."""
        return int(self.get())


def check_supported(device: torch.device) -> None:
    """Raise ValueError unless tensors on a device can be exchanged."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensors on {device.type}: must be on the CPU or a GPU of CUDA or ROCm")


def stacked(tensors: Sequence[torch.Tensor]) -> HostCopy:
    """Start to copy tensors of equal shape and device to the host, as the rows of one tensor."""
    return HostCopy(torch.stack(list(tensors)))


def from_host(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a small CPU tensor on ``device``, without waiting for the copy."""
    return put(data, torch.empty(data.shape, dtype=data.dtype, device=device))


def put(data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy a small CPU tensor to ``target`` without waiting; return ``target``."""
    return target.copy_(data.pin_memory() if target.is_cuda else data, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until the current stream has completed all its work; for measurements."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@contextmanager
def finished_on(device: torch.device) -> Iterator[None]:
    """Run a block on ``device``, and wait at its end for all of its work there."""
    with torch.cuda.device(device):
        yield
        torch.cuda.current_stream(device).synchronize()


def stream_of(device: torch.device) -> Hashable:
    """Return the scope within which memory may be reused: on CUDA, the current stream."""
    if device.type != "cuda":
        return device
    return device, torch.cuda.current_stream(device).cuda_stream


def taken_over(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, made by another library on the default stream, ready for the current one.

    The current stream waits for the default one, and its use of the memory is recorded, so that the
    memory is not reused too early.
    """
    if tensor.is_cuda:
        current = torch.cuda.current_stream(tensor.device)
        default = torch.cuda.default_stream(tensor.device)
        if current != default:
            current.wait_stream(default)
            tensor.record_stream(current)
    return tensor
