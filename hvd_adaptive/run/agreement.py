"""Describe what all ranks must have alike in a step before they wait for each other."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.run.description import Description, describe, differences

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.layout import Layout


def compare_settings(world: Any, compressor: GradientCompressor) -> None:
    """Compare the ranks' package versions and settings, and number the compressor; a collective.

    Raises:
        RankMismatchError: They differ, on all ranks.
    """
    everyone = world.gather_objects((describe(compressor), compressor._training.instance.proposed))
    if mismatch := differences([own for own, _ in everyone], range(world.size)):
        raise RankMismatchError(mismatch)
    compressor._training.instance.bind(max(number for _, number in everyone))


def position(
    compressor: GradientCompressor, attempt: int, layout: Layout, held: bool, compares: bool
) -> torch.Tensor:
    """Return what must be alike, int64: settings, step, attempt, due fits, layout, held; and
    ``compares``, which need not be.

    Args:
        compressor: The compressor.
        attempt: The attempt at the step.
        layout: The layout.
        held: Whether the rank sends nothing before all gradients have arrived.
        compares: Whether the rank wants ranks to compare their parameters.
    """
    updates, step = compressor._training.updates, compressor.step
    first, second, samples = updates.at(step)
    due = first + 2 * second + 4 * samples
    settings = compressor.parts.default.settings_fingerprint
    numbers = (settings, step, attempt, due, layout.fingerprint >> 1, int(held), int(compares))
    return torch.tensor(numbers, device="cpu")


def disagreement(positions: torch.Tensor) -> str:
    """Return how the ranks' positions, int64 (ranks, 7), differ; "" if they do not."""
    alike = positions[:, :-1]
    if torch.equal(alike, alike[:1].expand_as(alike)):
        return ""
    described = [_describe(row) for row in positions.tolist()]
    return differences(described, range(len(described)))


def _describe(numbers: Sequence[int]) -> Description:
    """Return a position as topics of named values; see run/description.py."""
    settings, step, attempt, due, layout, held, _ = numbers
    fits = {False: "not due", True: "due"}
    return {
        "the step": {
            "its number": str(step),
            "its attempt": str(attempt),
            "a fit of tables (update_steps)": fits[bool(due & 1)],
            "a fit of averages' tables": fits[bool(due & 2)],
            "samples for a fit": fits[bool(due & 4)],
            "sending": "at the end" if held else "at once",
        },
        "settings": {"all of them": f"{settings:08x}"},
        "buckets": {"parameters": f"{zlib.crc32(repr(layout).encode()):08x}"},
    }
