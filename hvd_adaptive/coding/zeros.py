"""Define Zeros: coordinates that are exactly zero are described, and only the others quantised.

A scheme whose levels do not contain 0 would turn zeros into other numbers. Its payload holds the
places of the zeros instead (kernels/zeros.py), in a section that a payload without zeros does not
have. The body is that of the other coordinates, laid end to end: buckets are cut from them. Zeros
then have no error and take no codes, and a coordinate that is zero on all ranks has the average 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import torch

from hvd_adaptive import kernels
from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.base.tensors import HostCopy
from hvd_adaptive.coding.payload import Payload
from hvd_adaptive.kernels.zeros import Runs, most_stream_bytes

# Bytes of a section before its stream: the number of zeros, and of runs of zeros.
_HEAD = 16


@dataclass(frozen=True)
class Zeros:
    """Which coordinates of a vector are 0.0 or -0.0, at least one; ``mask`` (uint8) has a bit for
    each, 1 if it is not zero.
    """

    runs: Runs
    mask: torch.Tensor

    @classmethod
    def of(cls, flat: torch.Tensor) -> Zeros | None:
        """Return the zeros of ``flat`` (float32, 1-D), or None; the host waits for a GPU."""
        ops = _kernels(flat.device)
        if not ops.has_zeros(flat):
            return None
        mask, runs = ops.mark(flat)
        return cls(runs, mask)

    @classmethod
    def left_out_of(cls, payload: Payload) -> Zeros | None:
        """Return the zeros that a payload leaves out, if any; raise PayloadError if its section of
        them cannot be read.
        """
        if payload.runs is None:
            return None
        mask = _kernels(payload.bytes.device).read(payload.zeros[_HEAD:], payload.runs)
        if mask is None:
            raise PayloadError("payload does not say where its zeros are")
        return cls(payload.runs, mask)

    def stream(self) -> torch.Tensor:
        """Return the places of the zeros as kernels/zeros.py describes: uint8."""
        return _kernels(self.mask.device).write(self.mask, self.runs)

    def section(self) -> torch.Tensor:
        """Return the section of a payload: uint8, a multiple of 8 bytes."""
        stream = self.stream()
        head = torch.tensor([self.runs.zeros, self.runs.runs], device=stream.device)
        return torch.cat([head.view(torch.uint8), stream])

    def others_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the coordinates of ``flat`` (float32, 1-D) that are not zeros, end to end."""
        values = flat.new_empty(self.runs.others)
        _kernels(flat.device).take(flat, self.mask, values)
        return values

    def put(self, others: torch.Tensor, out: torch.Tensor, clear: bool = True) -> torch.Tensor:
        """Invert ``others_of`` and return ``out``, whose zeros are cleared or left as they are."""
        _kernels(out.device).put(others, self.mask, out, clear)
        return out


def most_section_bytes(coordinates: int) -> int:
    """Return the most bytes of a section: 1 bit for each coordinate, and 24 bytes."""
    return _HEAD + most_stream_bytes(coordinates) if coordinates else 0


def runs_in(section: torch.Tensor, coordinates: int) -> Runs | None:
    """Return the numbers with which a payload's section begins, or None if it is empty; raise
    PayloadError if there are no such sections of this number of coordinates.
    """
    if not section.numel():
        return None
    if _HEAD < section.numel() <= most_section_bytes(coordinates):
        numbers = HostCopy(section[:_HEAD].clone()).get().view(torch.int64).tolist()
        runs = Runs(coordinates, *numbers)
        if runs.are_possible and 2 * runs.runs <= 8 * section.numel():
            return runs
    raise PayloadError(f"payload does not say where the zeros of {coordinates} coordinates are")


def alike(opened: Sequence[Payload]) -> Iterator[tuple[Sequence[Payload], Zeros | None]]:
    """Yield neighbouring payloads with the same zeros, and these. If not all payloads have the same
    zeros, each that has any is alone, so that sums have the same order in every coordinate.
    """
    first, rest = opened[0], opened[1:]
    if all(torch.equal(first.zeros, payload.zeros) for payload in rest):
        yield opened, Zeros.left_out_of(first)
        return
    ends = [at for at, payload in enumerate(opened) if payload.runs is not None]
    ends = sorted({0, *ends, *(at + 1 for at in ends), len(opened)})
    for begin, end in pairwise(ends):
        yield opened[begin:end], Zeros.left_out_of(opened[begin])


def _kernels(device: torch.device) -> ModuleType:
    return kernels.for_device(device, "zeros")
