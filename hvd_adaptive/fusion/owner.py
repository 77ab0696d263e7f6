"""Whose gradients these are: the optimizer that calls compress, its parameters, op and ranks."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

FRAMES = 5


@dataclass(frozen=True)
class Owner:
    """Named parameters whose gradients arrive, with the optimizer's op and process set.

    optimizer: a weak reference, or None where the names were given by the user.
    """

    named_parameters: list[tuple[str, torch.nn.Parameter]]
    op: Any
    process_set: Any
    optimizer: weakref.ref | None = None


def find_owner(compressor: Any, callers_only: bool = False) -> Owner | None:
    """The Horovod optimizer that holds ``compressor``, seen from inside its call of compress.

    Horovod tells compress no name, so the optimizer is looked up among the callers (10 us), and
    failing that, unless ``callers_only``, among all objects that refer to the compressor (slow).
    """
    optimizer = _calling_optimizer(compressor)
    if optimizer is None and not callers_only:
        found = {id(o): o for o in _referring_optimizers(compressor)}
        if len(found) > 1:
            raise RuntimeError(
                "one compressor serves one optimizer at a time, but several hold this one: "
                "construct a compressor for each"
            )
        optimizer = next(iter(found.values()), None)
    return None if optimizer is None else _owner(optimizer)


def _owner(optimizer: torch.optim.Optimizer) -> Owner:
    names = optimizer._parameter_names
    hooked = optimizer._requires_update
    named = [(name, parameter) for parameter, name in names.items() if parameter in hooked]
    op = getattr(optimizer, "op", None)  # Horovod's Adasum optimizer has none
    return Owner(named, op, getattr(optimizer, "process_set", None), weakref.ref(optimizer))


def _holds(candidate: Any, compressor: Any) -> bool:
    return (
        isinstance(candidate, torch.optim.Optimizer)
        and getattr(candidate, "_compression", None) is compressor
    )


def _calling_optimizer(compressor: Any) -> torch.optim.Optimizer | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("hvd_adaptive."):
        frame = frame.f_back
    for _ in range(FRAMES):
        if frame is None:
            return None
        candidate = frame.f_locals.get("self")
        if _holds(candidate, compressor):
            return candidate
        frame = frame.f_back
    return None


def _referring_optimizers(compressor: Any) -> Iterator[torch.optim.Optimizer]:
    for referrer in gc.get_referrers(compressor):
        if _holds(referrer, compressor):
            yield referrer
        elif isinstance(referrer, dict) and referrer.get("_compression") is compressor:
            yield from (o for o in gc.get_referrers(referrer) if _holds(o, compressor))
