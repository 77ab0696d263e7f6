"""Handle one call of a module's reduce-scatter; compare ranks after all calls of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.base.errors import PayloadError, RankMismatchError
from hvd_adaptive.exchange.exchange import Route
from hvd_adaptive.run.agreement import Failures, differences
from hvd_adaptive.transport.torch_world import TorchWorld

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.monitor import StepMeter

ADVICE = "Every rank must run the same modules, and finish the same steps"


def travelled(
    world: TorchWorld, route: Route, name: str, index: int, meter: StepMeter
) -> torch.Tensor:
    """Return the result of a module's route, whose collectives are performed one by one."""
    request, stage = next(route), 0
    while True:
        sent, begin = request.sent_bytes(world.rank, world.size), time.perf_counter()
        handle = request.submit(world, f"{name}.stage{stage}")
        received = request.waiting().receive(world, handle)
        meter.add(index, wire_bytes=sent, exchange_s=time.perf_counter() - begin)
        try:
            request, stage = route.send(received), stage + 1
        except StopIteration as ended:
            return ended.value


def check_everywhere(
    world: TorchWorld,
    compressor: GradientCompressor,
    name: str,
    failures: Failures,
    calls: int,
    name_of: Mapping[int, str],
) -> None:
    """Compare the ranks' positions and failures, a collective.

    Args:
        name: Name of the collective.
        failures: This rank's failures.
        calls: Checksum of the calls of this step.
        name_of: Names of modules by index.

    Raises:
        PayloadError: A payload arrived corrupt, on any rank.
        RankMismatchError: Ranks have reduced different modules, or differ in the step.
    """
    step = compressor.step
    own = [step, compressor.parts.default.settings_fingerprint, calls]
    failed, rows = failures.everywhere(world, name, own)
    described = [
        {
            "the step": {"its number": str(int(step))},
            "settings": {"all of them": f"{int(settings):08x}"},
            "modules": {"those reduced": f"{int(modules):08x}"},
        }
        for step, settings, modules in rows
    ]
    if mismatch := differences(described, range(len(described)), ADVICE):
        raise RankMismatchError(mismatch) from failures.first
    if failed:
        names = [f"rank {rank} ({name_of[index]})" for rank, index in failed.items()]
        raise PayloadError(
            f"step {step}: a payload arrived corrupt at {', '.join(names)}. No rank takes the "
            "optimizer's step: call zero_grad() and go on"
        ) from failures.first
