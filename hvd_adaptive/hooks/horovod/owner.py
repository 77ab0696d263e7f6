"""Find the optimizer that calls compress, with its parameters, op and ranks, or the ranks of a call
of hvd.allreduce."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

FRAMES = 5


@dataclass(frozen=True)
class Owner:
    """Named parameters whose gradients arrive, with the optimizer's op and process set.

    Attributes:
        named_parameters: In the order of registration, as far as the optimizer's groups show it.
        optimizer: A weak reference, or None if the user gave the names.
        frozen: The optimizer's other parameters, which required no gradient when it was made.
        frozen_elsewhere: Further named parameters that require no gradient.
    """

    named_parameters: list[tuple[str, torch.nn.Parameter]]
    op: Any
    process_set: Any
    optimizer: weakref.ref | None = None
    frozen: Sequence[tuple[str, torch.nn.Parameter]] = ()
    frozen_elsewhere: Sequence[tuple[str, torch.nn.Parameter]] = ()


def find_owner(compressor: Any, callers_only: bool = False) -> Owner | None:
    """Return the Horovod optimizer that holds ``compressor``, from inside its call of compress.

    Horovod passes no name. So the optimizer is searched for among the callers (10 us) and then,
    unless ``callers_only``, among all referrers of the compressor (slow).
    """
    frame = calling_frame(compressor)
    optimizer = None if frame is None else frame.f_locals["self"]
    if optimizer is None and not callers_only:
        found = {id(o): o for o in _referring_optimizers(compressor)}
        if len(found) > 1:
            raise RuntimeError(
                "one compressor serves one optimizer at a time, but several hold this one: "
                "construct a compressor for each"
            )
        optimizer = next(iter(found.values()), None)
    return None if optimizer is None else _owner(optimizer)


def calling_parameter(compressor: Any) -> torch.Tensor | None:
    """Return the parameter whose gradient the calling optimizer compresses, if there is one."""
    frame = calling_frame(compressor)
    parameter = None if frame is None else frame.f_locals.get("p")
    return parameter if isinstance(parameter, torch.Tensor) else None


def take_adasums_step_back(compressor: Any) -> None:
    """Restore what Horovod's Adasum optimizer has changed before it calls compress: it steps a
    parameter, replaces it by the difference, and stashes parameter groups.
    """
    frame = calling_frame(compressor)
    if frame is None:
        return
    optimizer = frame.f_locals["self"]
    before = getattr(optimizer, "_starting_models", {})
    if frame.f_locals.get("p") not in before:
        return
    parameter = frame.f_locals["p"]
    with torch.no_grad():
        parameter.copy_(before[parameter])
    for members, group in zip(
        frame.f_locals["stashed_params"], optimizer.param_groups, strict=True
    ):
        group["params"] = members


def _owner(optimizer: Any) -> Owner:
    names = optimizer._parameter_names
    hooked = optimizer._requires_update
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    registered = dict.fromkeys(p for p in (*listed, *names) if p in hooked)
    named = in_modules([(names[parameter], parameter) for parameter in registered])
    op = getattr(optimizer, "op", None)  # Horovod's Adasum optimizer has none
    frozen = [(name, p) for name, p in unhooked(optimizer) if p in names]
    members = getattr(optimizer, "process_set", None)
    held = {*listed, *hooked}
    elsewhere = [(n, p) for p, n in names.items() if p not in held and not p.requires_grad]
    return Owner(named, op, members, weakref.ref(optimizer), frozen, elsewhere)


def unhooked(optimizer: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the optimizer's parameters whose gradients Horovod leaves alone: they required none
    when ``hvd.DistributedOptimizer`` was made, or were added later."""
    names, hooked = optimizer._parameter_names, optimizer._requires_update
    listed = [
        (names.get(p, f"parameter {place} of group {number}"), p)
        for number, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    ]
    return [(name, p) for name, p in listed if p not in hooked]


def in_modules(
    named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return parameters with those of a module together, in the order in which they first appear:
    an optimizer may hold weights in one group and biases in another.
    """
    seen: dict[str, int] = {}

    def place(name: str) -> list[int]:
        prefixes = itertools.accumulate(name.split("."), "{}.{}".format)
        return [seen.setdefault(prefix, len(seen)) for prefix in prefixes]

    places = {name: place(name) for name, _ in named_parameters}
    return sorted(named_parameters, key=lambda pair: places[pair[0]])


def _holds(candidate: Any, compressor: Any) -> bool:
    return (
        isinstance(candidate, torch.optim.Optimizer)
        and getattr(candidate, "_compression", None) is compressor
    )


def calling_frame(compressor: Any) -> FrameType | None:
    """Return the frame of the nearest method of an optimizer that has the compressor (10 us)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("hvd_adaptive."):
        frame = frame.f_back
    for _ in range(FRAMES):
        if frame is None:
            return None
        caller = frame.f_locals.get("self")
        is_optimizer = isinstance(caller, torch.optim.Optimizer)
        if is_optimizer and getattr(caller, "_compression", None) is compressor:
            return frame
        frame = frame.f_back
    return None


def calling_process_set() -> Any:
    """Return the process set of the ``hvd.allreduce``, or the like, that calls; None without."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(3 * FRAMES):  # among them those of this package
        if frame is None:
            return None
        is_horovods = frame.f_globals.get("__name__") == "horovod.torch.mpi_ops"
        if is_horovods and "process_set" in frame.f_locals:
            return frame.f_locals["process_set"]
        frame = frame.f_back
    return None


def _referring_optimizers(compressor: Any) -> Iterator[torch.optim.Optimizer]:
    for referrer in gc.get_referrers(compressor):
        if _holds(referrer, compressor):
            yield referrer
        elif isinstance(referrer, dict) and referrer.get("_compression") is compressor:
            yield from (o for o in gc.get_referrers(referrer) if _holds(o, compressor))
