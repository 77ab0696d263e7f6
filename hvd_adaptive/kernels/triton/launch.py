"""Start Triton kernels, and put tables on their device."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton

WARPS = 4
MOST_PROGRAMS = 2**31 - 1


def kernel(function: Callable) -> Any:
    """Make a Triton kernel, compiled once for a set of constants and types, whatever the sizes."""
    parameters = inspect.signature(function).parameters
    names = [name for name, p in parameters.items() if "constexpr" not in str(p.annotation)]
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


def launch(
    started: Any,
    programs: int,
    on: torch.Tensor,
    *args: Any,
    num_warps: int = WARPS,
    **constants: Any,
) -> None:
    """Queue ``programs`` programs on the current stream of the device of ``on``.

    Products and sums are not fused, so that every one is rounded as in the other kernels. Integers
    may wrap around. Raise ValueError if there are more programs than a GPU starts.
    """
    if programs == 0:
        return
    if programs > MOST_PROGRAMS:
        raise ValueError(
            f"{programs} programs for {on.numel()} coordinates: a GPU starts {MOST_PROGRAMS} at"
            " most; take a larger bucket_size"
        )
    guard = torch.cuda.device(on.device) if on.is_cuda else contextlib.nullcontext()
    with guard:
        started[(programs,)](
            *args, **constants, num_warps=num_warps, enable_fp_fusion=False, sanitize_overflow=False
        )


@functools.lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 1 for other devices."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy and wait for the copy, so that kernels on any stream may read it."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def regular_runs(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield payloads as few runs, (first, count, distances), of equal distances in memory.

    A payload is two tensors; distances are counted in their numbers. Views of one gathered buffer
    are one run, and so are any two payloads.
    """
    places = [
        tuple(part.data_ptr() // part.element_size() for part in payload) for payload in payloads
    ]
    first = 0
    while first < len(places):
        end, distances = first + 1, (0, 0)
        while end < len(places):
            (a, b), (c, d) = places[end - 1], places[end]
            if end > first + 1 and (c - a, d - b) != distances:
                break
            distances = (c - a, d - b)
            end += 1
        yield first, end - first, distances
        first = end
