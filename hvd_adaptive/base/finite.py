"""Check whether tensors are finite, without blocking on a GPU; keep averages of them finite."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from hvd_adaptive.base.device import HostCopy, stacked


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
    """Return the dtype in which tensors of ``dtype`` are summed, float32 or float64.

    Sums in float16 overflow beyond 65,504, and Horovod reduces no bfloat16.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def narrowed(wide: torch.Tensor, quantized: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an average of gradients of ``dtype`` in that dtype; ``wide`` may be changed.

    The exact average a lies in [-M, M], M the dtype's largest value, since it is an average of
    numbers in that range. Quantising may move a value X of the first ``quantized`` coordinates
    outside. It is then clamped to -M or M, the nearest representable number, so |error| never
    grows. This costs unbiasedness if X can be outside: the bias is at most E(|X| - M)+, which is at
    most what quantising adds to a. The other coordinates are unchanged, including Inf. NaN stays
    NaN.
    """
    if dtype.itemsize < wide.dtype.itemsize:
        limit = torch.finfo(dtype).max
        wide[:quantized].clamp_(-limit, limit)
    return wide.to(dtype)
