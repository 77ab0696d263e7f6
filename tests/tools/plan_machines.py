"""Machines whose constants are made up, for tests of the cost model."""

from __future__ import annotations

import dataclasses

from hvd_adaptive.tools.plan.model import Cost, Job, Machine, predict

FREE = Cost("ALQ(bits=3)", 3.0, 0.0, 0.0, 0.2, second_bits=5.0)
N = 1_000_000  # of 4 bytes: one group
LINK = 1e6


def machine(*codecs: Cost, **changes) -> Machine:
    """Whose processor takes no time, but for what is given."""
    return dataclasses.replace(Machine("mpi", 0.0, 0.0, 0.0, codecs or (FREE,)), **changes)


def job(ranks: int, bandwidth: float = LINK, latency: float = 0.0, **changes) -> Job:
    """Of N numbers in one tensor."""
    return dataclasses.replace(Job(1, N, ranks, bandwidth, latency=latency), **changes)


def seconds(own: Job, *codecs: Cost, **changes) -> dict[str, float]:
    """Of a step on such a machine, by method and exchange."""
    found = predict(own, machine(*codecs, **changes))
    return {f"{p.method} {p.exchange}": p.step_s for p in found}
