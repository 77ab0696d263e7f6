"""Define what Horovod reduces instead of gradients, and read its sums.

Ranks compare a *position*, a vector, once a step (agreement.py), as the sum of

float64 [1, rank, 1 on rank 0, slot, slot**2, step, step**2, progress, progress**2, low, low**2,
high, high**2, groups, groups**2, number, number**2, compares, +-2**40]. ``progress`` is a checksum
of the attempt at the step, of how often tables were fitted, and of whether they are now. ``low``
and ``high`` are the halves of a 32-bit fingerprint. ``groups`` is a checksum of how parameters are
cut into groups. ``number`` is that of the compressor (instances.py). ``compares`` is 1 if ranks are
to compare their parameters. The first entry shows how many ranks took part: a rank that has called
hvd.join() adds zeros. A variance above zero shows that ranks disagree. The numbers are taken modulo
2**16, so that sums of squares over 1,000 ranks are exact in float64.

If Horovod's optimizer calls, the op is known, and a gradient's placeholder is one number: 1 if
backward has not reached the parameter on this rank. Without an optimizer (``hvd.allreduce``) the
placeholder is the position itself, which shows the op, too. The first entry distinguishes Average
from Sum. The next two expose Min, Max, Product and other factors. The last entry, negative on odd
ranks, makes neighbours' vectors point in opposite ways, where Adasum is far from any average.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import numpy as np
import torch

from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.transport.horovod_world import reference

MODULUS = 1 << 16
OPPOSED = float(1 << 40)
_SETTINGS = "settings, parameters or package version"
# Whoever disagrees on settings may disagree on the rest, too, so settings are reported first.
_STEP, _PROGRESS, _GROUPS, _NUMBER = 1, 2, 5, 6
_TOPICS = (
    (4, _SETTINGS),
    (3, _SETTINGS),
    (0, "the order of their gradients"),
    (_STEP, "the step"),
    (_PROGRESS, "the step"),
)


class Reduction(NamedTuple):
    """The reduction that Horovod applied to a position.

    Attributes:
        factor: Turns a sum over ranks into its result: 1/size or 1.
        active: Number of ranks that took part; fewer than all if some have called hvd.join().
        same_groups: Whether ranks cut their parameters into the same groups.
        same_number: Whether the compressor has the same number on all ranks.
        compares: Whether a rank wants ranks to compare their parameters.
    """

    factor: float
    active: int
    same_groups: bool = True
    same_number: bool = True
    compares: bool = False


class StepsDiffer(RankMismatchError):
    """Ranks agree on all but the step, or whether tables are fitted at it."""

    def __init__(self, mismatch: str, read: Reduction) -> None:
        super().__init__(mismatch)
        self.read = read


def position(
    rank: int,
    slot: int,
    step: int,
    fingerprint: int,
    progress: int = 0,
    groups: int = 0,
    number: int = 0,
    compares: bool = False,
) -> torch.Tensor:
    """Return a rank's position: the sum over ranks shows whether all positions are equal.

    Args:
        slot: The gradient, for a placeholder; 0 for a step.
        fingerprint: 32 bits of what must be equal on all ranks in every step.
        progress: What must be equal on all ranks in this step, besides ``step``.
        groups: Number of the groups; if it differs between ranks, they change their groups.
        number: Number of the compressor; if it differs between ranks, they agree on another one.
        compares: Whether ranks are to compare their parameters.
    """
    values = [1.0, float(rank), float(rank == 0)]
    for entry in (slot, step, progress, fingerprint, fingerprint >> 16, groups, number):
        values += [float(entry % MODULUS), float((entry % MODULUS) ** 2)]
    values += [float(compares), -OPPOSED if rank % 2 else OPPOSED]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


class Placeholders:
    """The numbers that Horovod's optimizer reduces instead of gradients: 1 if one is missing on
    this rank, and zeros replace it.

    New tensors for each of thousands of gradients would cost time in each step.
    """

    def __init__(self, count: int) -> None:
        self._numbers = np.zeros((count, 1))
        # Not views of one tensor, to which ``reference`` would refer instead.
        self.tensors = [torch.from_numpy(row) for row in self._numbers]
        self._references = list(map(reference, self.tensors))

    def begin(self) -> None:
        """Begin a step. Horovod must have reduced all placeholders of the one before."""
        self._numbers.fill(0.0)

    def mark_absent(self, slot: int) -> None:
        """Note that a gradient is missing on this rank."""
        self._numbers[slot] = 1.0


def check_reduced(
    reduced: torch.Tensor, size: int, any_step: bool = False, own: torch.Tensor | None = None
) -> Reduction:
    """Read a position after its reduction over ``size`` ranks.

    Args:
        reduced: The reduced position.
        any_step: Whether ranks may differ in the step.
        own: This rank's position, if the reduction is known to be a sum.

    Raises:
        StepsDiffer: Ranks differ only in the step; not raised if ``any_step``.
        RankMismatchError: Ranks differ in something else; with the same message on every rank.
        ValueError: The reduction was neither a sum nor an average.
    """
    # Numbers whose sum and sum of squares are those of equal numbers are equal.
    if own is not None and reduced[0] == size and torch.equal(reduced[3:-2], size * own[3:-2]):
        return Reduction(1.0, size, compares=bool(reduced[-2] > 0))
    read, whole = _read(reduced, size)
    pairs = zip(whole[:-1:2], whole[1:-1:2], strict=True)
    alike = [read.active * squares == total * total for total, squares in pairs]
    for pair, topic in _TOPICS:
        if alike[pair]:
            continue
        mismatch = (
            f"ranks disagree on {topic}: every rank must construct the same compressor for the "
            "same parameters and take the same steps"
        )
        if pair not in (_STEP, _PROGRESS):
            raise RankMismatchError(mismatch)
        if not any_step:
            raise StepsDiffer(mismatch, read)
    return read._replace(
        same_groups=alike[_GROUPS], same_number=alike[_NUMBER], compares=whole[-1] > 0
    )


def disagreement(reduced: torch.Tensor, size: int) -> str | None:
    """Return a name for what ranks disagree on, which does not depend on the position that a rank
    reads first. It is None if some ranks have called hvd.join(), or if only the order differs,
    which others may not show.
    """
    read, whole = _read(reduced, size)
    sums = whole[2 : 2 * _GROUPS]
    pairs = zip(sums[::2], sums[1::2], strict=True)
    if read.active < size or all(size * square == total**2 for total, square in pairs):
        return None
    return f"{zlib.crc32(repr(sums).encode()):08x}"


def _read(reduced: torch.Tensor, size: int) -> tuple[Reduction, list[int]]:
    """Return the reduction, and the sums over ranks of the other numbers."""
    ones, ranks, first, *pairs, opposed = reduced.tolist()
    entries = [ones, ranks, first, opposed / OPPOSED]
    finite = all(map(math.isfinite, [*entries, *pairs]))
    for factor, scale in ((1.0 / size, size), (1.0, 1)):
        active = finite and _active([entry * scale for entry in entries], size)
        if active:
            return Reduction(factor, active), [round(value * scale) for value in pairs]
    raise ValueError(
        f"op=hvd.{_op(entries, size)}: must be hvd.Average or hvd.Sum, without other factors, over "
        f"the {size} ranks of the compressor's process set, to compress gradients (entries "
        f"{ones:g}, {ranks:g}, {first:g})"
    )


def _active(sums: list[float], size: int) -> int:
    """Return the number of ranks whose sums of 1, rank, [rank = 0], ±1 these are, or 0."""
    if not all(map(_is_whole, sums)):
        return 0
    active, total, first, balance = map(round, sums)
    if active == size:
        return size if (total, first, balance) == (size * (size - 1) // 2, 1, size % 2) else 0
    others = active - first  # ranks from 1 on
    odd, rest = divmod(active - balance, 2)
    least, most = others * (others + 1) // 2, others * (2 * size - others - 1) // 2
    possible = (
        0 < active < size
        and first in (0, 1)
        and 0 <= odd <= others
        and least <= total <= most
        and rest == (total - odd) % 2 == 0
    )
    return active if possible else 0


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) <= 1e-9 * max(1.0, abs(value))


def _op(entries: list[float], size: int) -> str:
    """Return the op that gave these entries, as far as they show it."""
    known: dict[tuple[float, float, float], str]
    known = {(0, 0, -1): "Min", (size - 1, 1, 1): "Max", (0, 0, 0): "Product"}
    ranks, first, balance = entries[1:]
    kind = (ranks, first, balance if abs(balance) <= 1 else 0)
    return known.get(kind, "Adasum or another")
