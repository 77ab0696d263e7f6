"""Save what LocalSGD's state has of each rank, and find states that are mixed up."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from hvd_adaptive import states

ADVICE = (
    "torch.distributed.checkpoint keeps one rank's tensors, and reads those that a new state has: "
    "save PerRank(model=model, optimizer=optimizer) of hvd_adaptive.checkpoint, or a file of each "
    "rank by torch.save"
)


def check_own(state: Mapping[str, Any], rank: int) -> None:
    """Raise ValueError unless a state is whole and may be loaded on this rank."""
    own, moved = states.entry(state, "own"), states.entry(state, "moved")
    inner, pending = states.entry(state, "optimizer"), states.entry(state, "pending")
    saver = states.whole(own, "rank", of="state: own")
    if states.entry(own, "checksum", "state: own") != own_checksum(saver, inner, pending):
        raise ValueError(f"state: the optimizer's state is lost, or of several ranks. {ADVICE}")
    if saver != rank and (pending is not None or any(moved)):
        raise ValueError(
            f"state: rank {saver} saved it within a round, and this is rank {rank}, which has "
            f"parameters and a state of its own. {ADVICE}"
        )


def moved_of(state: Mapping[str, Any], fragments: int) -> list[bool]:
    """Return by fragment whether the rank had moved its parameters."""
    moved = states.entry(state, "moved")
    if not isinstance(moved, list) or len(moved) != fragments:
        raise ValueError(f"state: moved={moved!r}: must be a list for fragments={fragments}")
    return list(map(bool, moved))


def own_checksum(rank: int, inner: Any, pending: Any) -> int:
    """Return 32 bits of what a rank has for itself."""
    tensors: list[torch.Tensor] = []
    others: list[Any] = [rank]

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, Mapping):
            for name, one in value.items():
                others.append(name)
                visit(one)
        elif isinstance(value, list | tuple):
            for one in value:
                visit(one)
        else:
            others.append(value)

    visit((states.entry(inner, "state", "state: optimizer"), pending))
    return zlib.crc32(repr((others, states.checksums(tensors))).encode())
