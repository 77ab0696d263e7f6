"""Whole steps, measured on this machine, beside what the cost model's parts add up to.

The parts are measured one at a time, with the processor's caches to themselves. In a step they
follow each other through memory that is new, on cores that other ranks use as well, and take
longer; by how much depends on the method. It is measured: ranks exchange a gradient over TCP on the
loopback device, as many of them to a core as the cluster's hosts have. No wire limits them, so all
of the step is the processor's, and its ratio to the model's sum is what the sum is multiplied by.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence

from hvd_adaptive.bench import exchange
from hvd_adaptive.bench.ranks import Place
from hvd_adaptive.plan.advice import told
from hvd_adaptive.plan.model import GROUP_BYTES, predict
from hvd_adaptive.plan.quantities import Cluster, Conditions, Job, Machine, Prediction

STEPS = 3
NUMBERS = 3 * GROUP_BYTES // 4  # at most: groups that follow each other
MOST_RANKS = 16
AT_ONCE, SECONDS = 8, 900.0  # methods of a launch, and its time-out
_STOCK = {"float32", "float16"}


def ranks_here(cluster: Cluster) -> int:
    """How many ranks crowd this machine's cores as a host's ranks do theirs: two at least."""
    crowd = round(cluster.per_host / cluster.cores * _cores())
    return max(2, min(crowd, cluster.ranks, MOST_RANKS))


def factors(
    machine: Machine, conditions: Conditions, says: Callable[[str], object]
) -> dict[str, dict[str, float]]:
    """{method: {exchange: seconds of a step / those of its parts}}; ``says`` is told what is being
    measured. RanksError where ranks cannot be started here."""
    part = min(1.0, NUMBERS / conditions.coordinates)
    job = Job(
        tensors=max(1, round(part * conditions.tensors)),
        coordinates=min(conditions.coordinates, NUMBERS),
    )
    place = Place(conditions.ranks_here, conditions.launcher, tcp=True)
    predictions = {_written(p): p for p in without_wire(machine, job, place.count)}
    found: dict[str, dict[str, float]] = {}
    for methods in _batches(list(predictions)):
        says(f"steps of {methods[0]}" + (" and others" if len(methods) > 1 else ""))
        measured, _ = exchange.measure(methods, job.tensors, job.coordinates, STEPS, place, SECONDS)
        for step in measured:
            own = predictions[step.method]
            found.setdefault(own.method, {})[own.exchange] = step.seconds / own.step_s
    return found


def without_wire(machine: Machine, job: Job, ranks: int) -> list[Prediction]:
    """What the parts of ranks on this machine add up to."""
    cluster = Cluster(ranks, math.inf, latency=0.0, cores=_cores() / ranks)
    return predict(cluster, job, dataclasses.replace(machine, factors={}))


def _written(prediction: Prediction) -> str:
    """As `bench exchange` takes methods."""
    return prediction.method if prediction.method in _STOCK else told(prediction)


def _batches(methods: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(methods), AT_ONCE):
        yield methods[begin : begin + AT_ONCE]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
