"""Find, describe and leave out exact zeros, in plain torch: the oracle for the fast kernels."""

from __future__ import annotations

import torch

from hvd_adaptive.base.tensors import HostCopy
from hvd_adaptive.kernels.zeros import Runs, mask_bytes


def has_zeros(flat: torch.Tensor) -> bool:
    """Return whether a coordinate of ``flat`` (float32, (n,)) is 0.0 or -0.0; wait for a GPU."""
    return int(HostCopy(flat.count_nonzero())) < flat.numel()


def mark(flat: torch.Tensor) -> tuple[torch.Tensor, Runs]:
    """Return the mask of ``flat`` (float32, (n,)), which contains a zero, and the runs' numbers.
    Bit i % 8 of byte i // 8 (uint8, mask_bytes(n)) is 1 if coordinate i is not zero.
    """
    there = flat != 0
    starts, ends = _edges(there)
    runs = Runs(flat.numel(), int((ends - starts).sum()), starts.numel())
    return _packed(there, mask_bytes(flat.numel())), runs


def write(mask: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Return the stream (kernels/zeros.py) of a mask: uint8, a multiple of 8 bytes."""
    starts, ends = _edges(_unpacked(mask, runs.coordinates))
    before = torch.cat([ends.new_full((1,), -1), ends[:-1]])
    numbers = torch.stack([starts - before, ends - starts], dim=1) - 1
    bits = runs.gap_bits, runs.length_bits
    low = [_bits_of(column, k) for column, k in zip(numbers.T, bits, strict=True)]
    quotients = torch.stack([n >> k for n, k in zip(numbers.T, bits, strict=True)], dim=1)
    ones = (quotients.reshape(-1) + 1).cumsum(0) - 1
    unary = torch.zeros(int(ones[-1]) + 1, dtype=torch.bool, device=mask.device)
    unary[ones] = True
    stream = torch.cat([torch.cat(low, dim=1).reshape(-1), unary])
    return _packed(stream, -(-stream.numel() // 64) * 8)


def read(stream: torch.Tensor, runs: Runs) -> torch.Tensor | None:
    """Return the mask of a stream (uint8, a multiple of 8 bytes), or None if it is not that of such
    runs, which are possible ones.
    """
    gap_bits, length_bits = runs.gap_bits, runs.length_bits
    at = runs.runs * (gap_bits + length_bits)
    if at + 2 * runs.runs > 8 * stream.numel():
        return None
    bits = _unpacked(stream, 8 * stream.numel())
    low = bits[:at].view(runs.runs, gap_bits + length_bits).to(torch.int64)
    ones = bits[at:].nonzero()[:, 0]
    if ones.numel() != 2 * runs.runs or (at + int(ones[-1])) // 64 != stream.numel() // 8 - 1:
        return None
    quotients = ones.diff(prepend=ones.new_full((1,), -1)) - 1
    gaps, lengths = quotients[::2], quotients[1::2]
    too_large = (gaps > runs.coordinates >> gap_bits) | (lengths > runs.zeros >> length_bits)
    if bool(too_large.any()):
        return None
    gaps = (gaps << gap_bits) + _number_of(low[:, :gap_bits]) + 1
    lengths = (lengths << length_bits) + _number_of(low[:, gap_bits:]) + 1
    ends = (gaps + lengths).cumsum(0) - 1
    if int(ends[-1]) > runs.coordinates or int(lengths.sum()) != runs.zeros:
        return None
    changes = torch.zeros(runs.coordinates + 1, dtype=torch.int8, device=stream.device)
    changes[ends - lengths] = 1
    changes[ends] -= 1
    there = changes[:-1].cumsum(0, dtype=torch.int8) == 0
    return _packed(there, mask_bytes(runs.coordinates))


def take(flat: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> None:
    """Set ``values`` (float32) to the coordinates of ``flat`` that the mask names, in order."""
    values.copy_(flat[_unpacked(mask, flat.numel())])


def put(values: torch.Tensor, mask: torch.Tensor, out: torch.Tensor, clear: bool) -> None:
    """Set the coordinates of ``out`` (float32) that the mask names to ``values``, in order, and
    clear the others to zero if ``clear``.
    """
    if clear:
        out.zero_()
    out[_unpacked(mask, out.numel())] = values


def _edges(there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the runs of False begin and end."""
    outside = there.new_ones(1)
    changes = torch.cat([outside, there, outside]).to(torch.int8).diff()
    return (changes < 0).nonzero()[:, 0], (changes > 0).nonzero()[:, 0]


def _packed(bits: torch.Tensor, size: int) -> torch.Tensor:
    """Return bits (bool, (n,)) in ``size`` bytes, uint8; the others are 0."""
    padded = torch.zeros(8 * size, dtype=torch.uint8, device=bits.device)
    padded[: bits.numel()] = bits
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded.view(-1, 8) << places).sum(dim=1, dtype=torch.uint8)


def _unpacked(data: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first ``count`` bits of bytes: bool (count,)."""
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.view(-1, 1) >> places) & 1).view(-1)[:count].to(torch.bool)


def _bits_of(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` low bits of numbers (int64, (n,)): bool (n, count)."""
    return ((numbers.view(-1, 1) >> torch.arange(count, device=numbers.device)) & 1).to(torch.bool)


def _number_of(bits: torch.Tensor) -> torch.Tensor:
    """Invert ``_bits_of``: bits are int64 (n, count)."""
    return (bits << torch.arange(bits.shape[1], device=bits.device)).sum(dim=1)
