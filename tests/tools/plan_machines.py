"""Machines whose constants are made up, for tests of the cost model."""

from __future__ import annotations

import dataclasses

from hvd_adaptive.tools.plan.model import predict
from hvd_adaptive.tools.plan.quantities import (
    Averages,
    Cluster,
    Codec,
    Collective,
    Job,
    Machine,
    Reached,
)

NOTHING = Collective(0.0, 0.0)
FREE = Codec("ALQ(bits=3)", 3.0, 0.0, 0.0, 0.2, Averages(5.0, 0.0, 0.0), Averages(4.0, 0.0, 0.0))
N = 1_000_000  # of 4 bytes: one group
LINK = 1e6

WHOLE = Reached((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), hidden=0.0)
AVERAGES = Averages(16.0, 4e-6, 8e-6)


def machine(*codecs: Codec, **changes) -> Machine:
    """Whose processor takes no time, but for what is given."""
    nothing = {4: NOTHING, 2: NOTHING}, NOTHING, NOTHING, NOTHING, 0.0, 0.0, 0.0
    base = Machine(*nothing, codecs or (FREE,), WHOLE)
    return dataclasses.replace(base, **changes)


def seconds(cluster: Cluster, job: Job, own: Machine) -> dict[str, float]:
    """Of a step, by method and exchange."""
    return {f"{p.method} {p.exchange}": p.step_s for p in predict(cluster, job, own)}
