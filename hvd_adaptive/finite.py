"""Whether tensors are finite, on a GPU asked without waiting for the answer; and averages that stay
finite where they are rounded to a narrow dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvd_adaptive.device import Later, stacked


class Finite:
    """Whether no tensor that it was shown holds a NaN or Inf. ``bool`` of it waits for the answer,
    as ``Later.get`` does; on the CPU it is known at once."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._known = True
        self._flags: list[torch.Tensor] = []
        self._told: Later | None = None
        for tensor in tensors:
            self.look(tensor)

    def look(self, tensor: torch.Tensor) -> None:
        """At one more."""
        if not tensor.numel():
            return
        if tensor.is_cuda:
            # One pass and no copy: of NaN and Inf the norm is one of them.
            largest = torch.linalg.vector_norm(tensor, torch.inf)
            self._flags.append(largest.isfinite())
            self._told = None
        else:
            self._known = self._known and _is_finite(tensor)

    def ask(self) -> Finite:
        """Send the answer on its way; itself."""
        if self._flags and self._told is None:
            first = self._flags[0].device
            self._told = stacked([flag.to(first) for flag in self._flags])
        return self

    def is_there(self) -> bool:
        """Whether ``bool`` would not wait."""
        return not self._known or not self._flags or self.ask()._told.is_there()

    def __bool__(self) -> bool:
        if self._known and self._flags:
            self._known = bool(self.ask()._told.get().all())
            self._flags = []
        return self._known


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no tensor holds a NaN or Inf."""
    return bool(Finite(tensors))


def narrowed(wide: torch.Tensor, quantized: int, dtype: torch.dtype) -> torch.Tensor:
    """An average of gradients of ``dtype``, in that dtype; ``wide`` may change.

    The exact average a is one of numbers in [-M, M], M the dtype's largest, and lies there itself.
    Quantising may put a value X of the first ``quantized`` coordinates outside, which becomes -M or
    M: the nearest number that there is, so that |error| never grows. It costs unbiasedness where X
    can be outside: by at most E(|X| - M)+, as much as quantising adds there to a. The other
    coordinates are as they came, Inf included. NaN stays NaN.
    """
    if dtype.itemsize < wide.dtype.itemsize:
        limit = torch.finfo(dtype).max
        wide[:quantized].clamp_(-limit, limit)
    return wide.to(dtype)


def _is_finite(tensor: torch.Tensor) -> bool:
    """One pass where the sum is finite, as it mostly is."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return bool(tensor.sum(dtype=wide).isfinite() or tensor.isfinite().all())
