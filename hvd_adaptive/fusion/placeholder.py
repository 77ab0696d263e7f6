"""The small tensor that Horovod reduces in a gradient's stead, and what its sum tells.

float64 [1, rank, slot, slot**2, step, step**2, low, low**2, high, high**2, +-2**40], where low and
high are the halves of a 32-bit fingerprint. After the reduction the first entry tells Average from
Sum, the ranks' entry gives Min, Max and Product away, and a variance above zero shows that ranks
disagree. The last entry, negative on odd ranks, makes neighbours' vectors point in opposite ways,
where Adasum is far from any average. The numbers are taken modulo 2**16, so that sums of squares
over 1,000 ranks are exact in float64, with room for the rounding of a gradient_predivide_factor.
"""

from __future__ import annotations

import torch

from hvd_adaptive.errors import RankMismatchError

MODULUS = 1 << 16
OPPOSED = float(1 << 40)
_SETTINGS = "settings, parameters or package version"
# Whoever disagrees on settings may disagree on the rest too, so those are told first.
_TOPICS = ((3, _SETTINGS), (2, _SETTINGS), (1, "the step"), (0, "the order of their gradients"))


def placeholder(rank: int, slot: int, step: int, fingerprint: int) -> torch.Tensor:
    """The tensor for one gradient; ``fingerprint`` (32 bits) covers what ranks must agree on."""
    values = [1.0, float(rank)]
    for number in (slot, step, fingerprint, fingerprint >> 16):
        values += [float(number % MODULUS), float((number % MODULUS) ** 2)]
    values.append(-OPPOSED if rank % 2 else OPPOSED)
    return torch.tensor(values, dtype=torch.float64)


def check_reduced(reduced: torch.Tensor, size: int) -> float:
    """The factor that turns a sum over ranks into what Horovod was asked for: 1/size or 1.

    Raises RankMismatchError, with the same message on every rank, where ranks disagree, and
    RuntimeError where the reduction was neither a sum nor an average.
    """
    *values, opposed = reduced.tolist()
    sums = [size, size * (size - 1) / 2, size % 2]
    found = [values[0], values[1], opposed / OPPOSED]
    if _close(found, [total / size for total in sums]):
        factor, scale = 1.0 / size, size
    elif _close(found, sums):
        factor, scale = 1.0, 1
    else:
        raise RuntimeError(
            "gradients can be compressed under op=hvd.Average and op=hvd.Sum only; the reduction "
            f"of this step was neither (entries {values[0]:g} and {values[1]:g}, {size} ranks)"
        )
    whole = [round(value * scale) for value in values[2:]]
    for pair, topic in _TOPICS:
        total, squares = whole[2 * pair], whole[2 * pair + 1]
        if size * squares != total * total:
            raise RankMismatchError(
                f"ranks disagree on {topic}: every rank must construct the same compressor for the "
                "same parameters and take the same steps"
            )
    return factor


def _close(values: list[float], expected: list[float]) -> bool:
    return all(
        abs(value - other) <= 1e-9 * max(1.0, other)
        for value, other in zip(values, expected, strict=True)
    )
