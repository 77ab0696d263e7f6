"""Copy tensors to the host without blocking, find NaN and Inf in them, and handle CUDA's streams.

No function waits for a whole device. What concerns streams does nothing for tensors on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Keywords for this package's tensors, independent of torch's defaults.
HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


class HostCopy:
    """Copy of a small tensor to the host; ``get`` waits for it and its stream's earlier work."""

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
    """Return ``tensor``, made by another library on the default stream, ready for the current one,
    which waits for the default one. This use of the memory is recorded, so that it is not reused
    too early.
    """
    if tensor.is_cuda:
        current = torch.cuda.current_stream(tensor.device)
        default = torch.cuda.default_stream(tensor.device)
        if current != default:
            current.wait_stream(default)
            tensor.record_stream(current)
    return tensor


class Finite:
    """Whether no checked tensor contains NaN or Inf; ``bool`` waits for a GPU's answer."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._known = True
        self._flags: list[torch.Tensor] = []
        self._answer: HostCopy | None = None
        for tensor in tensors:
            self.look(tensor)

    def look(self, tensor: torch.Tensor) -> None:
        """Check one more tensor."""
        if not tensor.numel():
            return
        if tensor.is_cuda:
            # This takes one pass and no copy: the norm of a tensor with NaN or Inf is one of them.
            largest = torch.linalg.vector_norm(tensor, torch.inf)
            self._flags.append(largest.isfinite())
            self._answer = None
        else:
            # One pass if the sum is finite, which is the usual case.
            is_finite = tensor.sum(dtype=wide_of(tensor.dtype)).isfinite()
            self._known = self._known and bool(is_finite or tensor.isfinite().all())

    def ask(self) -> Finite:
        """Start the copy of the result to the host; return this object."""
        if self._flags:
            self._copied()
        return self

    def is_there(self) -> bool:
        """Return whether ``bool`` would return without waiting."""
        return not self._known or not self._flags or self._copied().is_there()

    def __bool__(self) -> bool:
        if self._known and self._flags:
            self._known = bool(self._copied().get().all())
            self._flags = []
        return self._known

    def _copied(self) -> HostCopy:
        """Return the copy of the flags, of which there is at least one; start it if necessary."""
        if self._answer is None:
            first = self._flags[0].device
            self._answer = stacked([flag.to(first) for flag in self._flags])
        return self._answer


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no tensor contains NaN or Inf."""
    return bool(Finite(tensors))


@functools.cache
def wide_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are summed, float32 or float64: sums in
    float16 overflow beyond 65,504, and Horovod reduces no bfloat16.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def narrowed(wide: torch.Tensor, quantized: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an average of gradients of ``dtype`` in that dtype; ``wide`` may be changed.

    The exact average a lies in [-M, M], M the dtype's largest value. Quantising may move a value X
    of the first ``quantized`` coordinates outside. It is then clamped to -M or M, so |error| never
    grows. This costs unbiasedness: the bias is at most E(|X| - M)+, which is at most what
    quantising adds to a. The other coordinates are unchanged, including Inf. NaN stays NaN.
    """
    if dtype.itemsize < wide.dtype.itemsize:
        limit = torch.finfo(dtype).max
        wide[:quantized].clamp_(-limit, limit)
    return wide.to(dtype)
