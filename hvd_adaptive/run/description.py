"""Describe what must be the same on all ranks, and the differences.

A rank describes itself in topics ("settings", "parameters", ...) of named values.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hvd_adaptive._version import __version__

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor

# Topic -> name -> value.
Description = dict[str, dict[str, str]]

# Differences of a topic that a message lists; characters of a value.
MOST_LISTED, LONGEST = 4, 60
ADVICE = (
    "Every rank must construct the same compressor for the same parameters and take the same steps"
)


def describe(
    compressor: GradientCompressor, named_parameters: Sequence[tuple[str, torch.Tensor]] = ()
) -> Description:
    """Return this rank's description: package version, settings, parameters by name."""
    parameters = sorted(named_parameters, key=lambda pair: pair[0])
    settings = compressor.settings.shared() | compressor.parts.default.scheme_settings()
    settings = {"scheme": type(compressor).__name__} | settings
    # The comparison is a collective.
    settings["Monitor(compare=)"] = getattr(compressor.settings.monitor, "compare", False)
    return {
        "the package version": {"hvd_adaptive": __version__},
        "settings": {name: repr(value) for name, value in settings.items()},
        "parameters": {name: _describe_parameter(p) for name, p in parameters},
    }


def checksum(own: Description) -> int:
    """Return 32 bits that differ between descriptions."""
    return zlib.crc32(json.dumps(own).encode())


def differences(everyone: Sequence[Description], ranks: Sequence[int], advice: str = ADVICE) -> str:
    """Return one sentence for each topic in which descriptions differ; "" if none does.

    ranks: The describing ranks' numbers, in the order of ``everyone``.
    advice: The last sentence.
    """
    topics = list(dict.fromkeys(topic for own in everyone for topic in own))
    sentences = []
    for topic in topics:
        found = _differences_of([own.get(topic, {}) for own in everyone], topic, ranks)
        if found:
            more = len(found) - MOST_LISTED
            listed = "; ".join(found[:MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")
            sentences.append(f"ranks disagree on {topic}: {listed}")
    return ". ".join([*sentences, advice]) if sentences else ""


def _differences_of(
    everyone: Sequence[dict[str, str]], topic: str, ranks: Sequence[int]
) -> list[str]:
    """Return a clause for each name whose values differ, without keywords of other schemes."""
    names = list(dict.fromkeys(name for own in everyone for name in own))
    clauses = []
    for name in names:
        holders: dict[str | None, list[int]] = {}
        for rank, own in zip(ranks, everyone, strict=True):
            holders.setdefault(own.get(name), []).append(rank)
        if len(holders) == 1 or (topic == "settings" and None in holders):
            continue
        parts = [f"{_short(value)} on {format_ranks(held)}" for value, held in holders.items()]
        clauses.append(f"{name} is {', '.join(parts)}")
    return clauses


def _describe_parameter(parameter: torch.Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"


def _short(value: str | None) -> str:
    if value is None:
        return "missing"
    if len(value) <= LONGEST:
        return value
    return (
        f"{value[: LONGEST - 14]}... ({hashlib.blake2b(value.encode(), digest_size=4).hexdigest()})"
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as "rank 1" or "ranks 0, 2-5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
