"""Compare the parameters of all ranks, and find those that differ.

Averages of gradients are the same on all ranks, so models that begin differently keep their
difference, and nothing else shows it.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hvd_adaptive.run.description import format_ranks
from hvd_adaptive.states import checksums

logger = logging.getLogger("hvd_adaptive")


def warn_of_differences(world: Any, named: Sequence[tuple[str, torch.Tensor]], name: str) -> None:
    """Warn on every rank if ranks have different parameters, a collective.

    Ranks with other names, dtypes or shapes are not compared, on all ranks.

    Args:
        world: The ranks; every one calls this at the same place in its order of collectives.
        named: (name, parameter) pairs.
        name: Beginning of the collectives' names.
    """
    own = checksums(parameter for _, parameter in named)
    kinds = [(label, str(p.dtype), tuple(p.shape)) for label, p in named]
    both = torch.tensor([_crc(kinds), _crc(own)], device="cpu")
    everyone = world.gather_equal(both, f"{name}.replicas")
    if bool((everyone == both).all()) or bool((everyone[:, 0] != both[0]).any()):
        return
    found = differences(world, own, f"{name}.replicas.each")
    first, ranks = next(iter(found.items()))
    logger.warning(
        "ranks have different parameters: parameter %s of %s differs from the first rank's%s. "
        "Averages of gradients keep such differences: load the same state on every rank, or "
        "broadcast the first rank's parameters",
        named[first][0],
        format_ranks(ranks),
        f", and {len(found) - 1} more do" if len(found) > 1 else "",
    )


def differences(world: Any, own: Sequence[int], name: str) -> dict[int, list[int]]:
    """Return the places at which ranks have another number than the first rank, with these ranks; a
    collective.

    Args:
        world: The ranks.
        own: This rank's numbers, as many as every rank has.
        name: Name of the collective.
    """
    everyone = world.gather_equal(torch.tensor(own, device="cpu"), name)
    others = (everyone != everyone[0]).T
    places = others.any(dim=1).nonzero().view(-1).tolist()
    return {place: others[place].nonzero().view(-1).tolist() for place in places}


def _crc(value: Any) -> int:
    return zlib.crc32(repr(value).encode())
