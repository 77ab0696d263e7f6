"""The small tensor that Horovod reduces in a gradient's stead, and what its sum tells.

float64 [1, rank, slot, slot**2, step, step**2, settings, settings**2]. After the reduction the
first entry tells Average from Sum, the ranks' entry gives other ops away, and a variance above zero
shows that ranks disagree. All those numbers are below 2**20, so that the sums of squares over 1,000 ranks
stay exact in float64.
"""

from __future__ import annotations

import numpy as np
import torch

from hvd_adaptive.errors import RankMismatchError

MODULUS = 1 << 20
# Whoever disagrees on settings may disagree on the rest too, so those are told first.
_TOPICS = ("settings, parameters or package version", "the step", "the order of their gradients")


def placeholder(rank: int, slot: int, step: int, fingerprint: int) -> torch.Tensor:
    """The tensor for one gradient; ``fingerprint`` covers settings and layout."""
    values = [1.0, float(rank)]
    for number in (slot, step, fingerprint):
        values += [float(number % MODULUS), float(number % MODULUS) ** 2]
    return torch.tensor(values, dtype=torch.float64)


def check_reduced(reduced: torch.Tensor, size: int) -> float:
    """The factor that turns a sum over ranks into what Horovod was asked for: 1/size or 1.

    Raises RankMismatchError, with the same message on every rank, where ranks disagree, and
    RuntimeError where the reduction was neither a sum nor an average.
    """
    values = reduced.numpy()
    ones, ranks = values[0], values[1]
    average = np.array([1.0, (size - 1) / 2])
    if np.allclose([ones, ranks], average, rtol=1e-9, atol=1e-9):
        factor, means = 1.0 / size, values[2:]
    elif np.allclose([ones, ranks], average * size, rtol=1e-9, atol=1e-9):
        factor, means = 1.0, values[2:] / size
    else:
        raise RuntimeError(
            "gradients can be compressed under op=hvd.Average and op=hvd.Sum only; the reduction "
            f"of this step was neither (entries {ones:g} and {ranks:g} over {size} ranks)"
        )
    spread = size * (means[1::2] - means[0::2] ** 2)
    for topic, deviation in zip(_TOPICS, spread[::-1], strict=True):
        if round(deviation) != 0:
            raise RankMismatchError(
                f"ranks disagree on {topic}: every rank must construct the same compressor for the "
                "same parameters and take the same steps"
            )
    return factor
