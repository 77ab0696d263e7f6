"""The small tensor that Horovod reduces instead of a gradient, and the meaning of its sum.

float64 [1, rank, 1 on rank 0, slot, slot**2, step, step**2, progress, progress**2, low, low**2,
high, high**2, groups, groups**2, absent, +-2**40]. ``progress`` is a checksum of the attempt at the
step, of how often tables were fitted, and of whether they are now. ``low`` and ``high`` are the
halves of a 32-bit fingerprint. ``groups`` is a checksum of how parameters are cut into groups.
``absent`` is 1 if backward has not reached the parameter. After the reduction the
first entry distinguishes Average from Sum, and shows how many ranks took part: a rank that has
called hvd.join() adds zeros. The next two expose Min, Max, Product and other factors. A variance
above zero shows that ranks disagree. The last entry, negative on odd ranks, makes neighbours'
vectors point in opposite ways, where Adasum is far from any average. The numbers are taken modulo
2**16, so that sums of squares over 1,000 ranks are exact in float64, with room for the rounding of
a gradient_predivide_factor.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import numpy as np
import torch

from hvd_adaptive.errors import RankMismatchError

ENTRIES = 17
MODULUS = 1 << 16
OPPOSED = float(1 << 40)
_SETTINGS = "settings, parameters or package version"
# Whoever disagrees on settings may disagree on the rest, too, so settings are reported first.
_STEP, _PROGRESS, _GROUPS = 1, 2, 5
_TOPICS = (
    (4, _SETTINGS),
    (3, _SETTINGS),
    (0, "the order of their gradients"),
    (_STEP, "the step"),
    (_PROGRESS, "the step"),
)


class Reduction(NamedTuple):
    """The reduction that Horovod applied to a placeholder.

    factor: turns a sum over ranks into its result: 1/size or 1.
    active: the number of ranks that took part; fewer than all if some have called hvd.join().
    same_groups: whether ranks cut their parameters into the same groups.
    """

    factor: float
    active: int
    same_groups: bool = True


class StepsDiffer(RankMismatchError):
    """Ranks agree on all but the step, or whether tables are fitted at it."""

    def __init__(self, mismatch: str, read: Reduction) -> None:
        super().__init__(mismatch)
        self.read = read


class Template:
    """Make the placeholders of one rank in one step.

    Args:
        rank: This rank.
        step: The step, which ranks compare.
        fingerprint: 32 bits of what must be equal on all ranks in every step.
        progress: What must be equal on all ranks in this step, besides ``step``.
        groups: Number of the groups; if it differs between ranks, they change their groups.
    """

    def __init__(
        self, rank: int, step: int, fingerprint: int, progress: int = 0, groups: int = 0
    ) -> None:
        values = [1.0, float(rank), float(rank == 0)]
        for number in (0, step, progress, fingerprint, fingerprint >> 16, groups):
            values += [float(number % MODULUS), float((number % MODULUS) ** 2)]
        values += [0.0, -OPPOSED if rank % 2 else OPPOSED]
        self._values = np.array(values, dtype=np.float64)

    def fill(self, rows: np.ndarray) -> None:
        """Write the placeholder of gradient ``slot`` to ``rows[slot]``, for all slots."""
        rows[:] = self._values
        slots = np.arange(len(rows)) % MODULUS
        rows[:, 3], rows[:, 4] = slots, slots * slots

    def placeholder(self, slot: int, absent: bool = False) -> torch.Tensor:
        """Return the tensor that Horovod reduces in place of a gradient.

        Args:
            slot: The gradient.
            absent: The gradient is missing on this rank, and zeros replace it.
        """
        values, slot = self._values.copy(), slot % MODULUS
        values[3], values[4] = slot, slot * slot
        if absent:
            self.mark_absent(values)
        return torch.from_numpy(values)

    @staticmethod
    def mark_absent(values: np.ndarray) -> None:
        """Note in a placeholder that its gradient is missing on this rank."""
        values[-2] = 1.0


def placeholder(
    rank: int,
    slot: int,
    step: int,
    fingerprint: int,
    absent: bool = False,
    progress: int = 0,
    groups: int = 0,
) -> torch.Tensor:
    """Return a single placeholder; see Template."""
    return Template(rank, step, fingerprint, progress, groups).placeholder(slot, absent)


def check_reduced(reduced: torch.Tensor, size: int, any_step: bool = False) -> Reduction:
    """Read a placeholder after its reduction over ``size`` ranks.

    Raises:
        StepsDiffer: Ranks differ only in the step; not raised if ``any_step``.
        RankMismatchError: Ranks differ in something else; with the same message on every rank.
        ValueError: The reduction was neither a sum nor an average.
    """
    read, whole = _read(reduced, size)
    for pair, topic in _TOPICS:
        total, squares = whole[2 * pair], whole[2 * pair + 1]
        if read.active * squares == total * total:
            continue
        mismatch = (
            f"ranks disagree on {topic}: every rank must construct the same compressor for the "
            "same parameters and take the same steps"
        )
        if pair not in (_STEP, _PROGRESS):
            raise RankMismatchError(mismatch)
        if not any_step:
            raise StepsDiffer(mismatch, read)
    total, squares = whole[2 * _GROUPS :]
    return read._replace(same_groups=read.active * squares == total * total)


class Reader:
    """Call ``check_reduced`` for a step's first placeholder, and compare the others with it.

    Attributes:
        any_step: Ranks have compared their steps, and may differ in them.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.any_step = False
        self._expected: list[float] = []  # if all ranks agree as in the first placeholder
        self._agreed: tuple[Reduction, bool] | None = None

    def read(self, reduced: torch.Tensor, slot: int) -> tuple[Reduction, bool]:
        """Return ``check_reduced``, and whether no rank that took part has this gradient.

        ``slot`` is the slot that this rank sent.
        """
        values, expected, agreed = reduced.tolist(), self._expected, self._agreed
        if agreed is not None:
            slot, scale = slot % MODULUS, expected[0]
            expected[3], expected[4] = slot * scale, slot * slot * scale
            if values == expected:  # if rounding makes them differ, the placeholder is read in full
                return agreed
        read = check_reduced(reduced, self._size, self.any_step)
        self._expected, self._agreed = values, (read, False)
        absent, self._expected[-2] = values[-2], 0.0
        return read, round(absent / read.factor) == read.active


def disagreement(reduced: torch.Tensor, size: int) -> str | None:
    """Return a name for what ranks disagree on.

    The name does not depend on which placeholder of a step a rank reads first. It is None if some
    ranks have called hvd.join(), or if only the order differs, which other placeholders may not
    show.
    """
    read, whole = _read(reduced, size)
    sums = whole[2 : 2 * _GROUPS]
    pairs = zip(sums[::2], sums[1::2], strict=True)
    if read.active < size or all(size * square == total**2 for total, square in pairs):
        return None
    return f"{zlib.crc32(repr(sums).encode()):08x}"


def _read(reduced: torch.Tensor, size: int) -> tuple[Reduction, list[int]]:
    """Return the reduction, and the sums over ranks of the other numbers."""
    ones, ranks, first, *pairs, _, opposed = reduced.tolist()
    entries = [ones, ranks, first, opposed / OPPOSED]
    finite = all(map(math.isfinite, [*entries, *pairs]))
    for factor, scale in ((1.0 / size, size), (1.0, 1)):
        active = finite and _active([entry * scale for entry in entries], size)
        if active:
            return Reduction(factor, active), [round(value * scale) for value in pairs]
    raise ValueError(
        f"op=hvd.{_op(entries, size)}: must be hvd.Average or hvd.Sum, without other factors, to "
        f"compress gradients (entries {ones:g}, {ranks:g}, {first:g} of {size} ranks)"
    )


def _active(sums: list[float], size: int) -> int:
    """Return the number of ranks over which ``sums`` of 1, rank, [rank = 0], ±1 were taken.

    The result is 0 if no subset of ``size`` ranks has these sums.
    """
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
