"""Machines whose constants are made up, for tests of the cost model."""

from __future__ import annotations

import dataclasses

from hvd_adaptive.tools.plan.model import Cluster, Cost, Job, Machine, predict

AVERAGES = Cost("averages", 5.0, 0.0, 0.0, 0.0)
FREE = Cost("ALQ(bits=3)", 3.0, 0.0, 0.0, 0.2, second=AVERAGES)
N = 1_000_000  # of 4 bytes: one group
LINK = 1e6


def machine(*codecs: Cost, **changes) -> Machine:
    """Whose processor takes no time, but for what is given."""
    copies = {"allreduce": 0.0, "allgather": 0.0}
    base = Machine("mpi", copies, 0.0, 0.0, codecs or (FREE,))
    return dataclasses.replace(base, **changes)


def seconds(cluster: Cluster, job: Job, own: Machine) -> dict[str, float]:
    """Of a step, by method and exchange."""
    return {f"{p.method} {p.exchange}": p.step_s for p in predict(cluster, job, own)}
