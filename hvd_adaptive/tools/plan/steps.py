"""Whole steps, measured on this machine, beside what the cost model's parts add up to.

The parts are measured one at a time, with the processor's caches to themselves. In a step they
follow each other through memory that is new, on cores that other ranks use as well, and take
longer; by how much depends on the method. It is measured: ranks exchange a gradient over TCP on the
loopback device, as many of them to a core as the cluster's hosts have. No wire limits them, so all
of the step is the processor's, and its ratio to the model's sum is what the sum is multiplied by.
What else a machine does, and where a process's memory happens to lie, moves a launch's steps by a
tenth and more: so all methods take turns in up to three launches, and medians count.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from hvd_adaptive.tools.bench import exchange
from hvd_adaptive.tools.launch import Ranks, RanksError
from hvd_adaptive.tools.methods import STOCK, read, written
from hvd_adaptive.tools.plan.model import GROUP_BYTES, predict
from hvd_adaptive.tools.plan.quantities import Cluster, Codec, Conditions, Job, Machine, Prediction

logger = logging.getLogger("hvd_adaptive")

STEPS, LAUNCHES = 4, 3
ENOUGH = 100.0  # seconds, after which no further round of launches is begun
NUMBERS = 3 * GROUP_BYTES // 4  # at most: groups that follow each other
MOST_RANKS = 8
AT_ONCE = 10  # methods of a launch at most
SECONDS = 75.0  # a launch may take, and each of its methods
# Of a scheme's keywords, those that decide about later steps, or about other machines.
_LEFT_OUT = ("warmup_steps", "ranks_per_node", "exchange", "second_stage_bits")


def ranks_here(conditions: Conditions) -> int:
    """Return how many ranks (two or more) crowd this machine's cores as a host's ranks do."""
    return max(2, min(round(conditions.crowd * _cores()), conditions.ranks, MOST_RANKS))


def factors(
    machine: Machine, conditions: Conditions, says: Callable[[str], object]
) -> dict[str, dict[str, float]]:
    """Measure whole steps beside the sum of their parts.

    Args:
        machine: the parts.
        conditions: of the plan.
        says: gets the name of what is measured next.

    Returns:
        {method: {exchange: seconds of a step / those of its parts}}. A method of which no step
        could be measured is left out, with a warning.

    Raises:
        RanksError: stock Horovod's steps could not be measured.
    """
    numbers = min(conditions.coordinates, NUMBERS)
    job = Job(min(conditions.tensors, numbers), numbers)
    place = Ranks(ranks_here(conditions), conditions.launcher, tcp=True)
    predictions = without_wire(machine, job, place.count)
    codecs = {codec.label: codec for codec in machine.codecs}
    written = [_written(p, codecs.get(p.method)) for p in predictions]
    seconds = _seconds(list(dict.fromkeys(written)), job, place, says)
    found: dict[str, dict[str, float]] = {}
    for method, own in zip(written, predictions, strict=True):
        if method in seconds:
            factor = statistics.median(seconds[method]) / own.step_s
            found.setdefault(own.method, {})[own.exchange] = factor
    return found


def without_wire(machine: Machine, job: Job, ranks: int) -> list[Prediction]:
    """Return the predictions for ranks on this machine, whose links take no time."""
    cluster = Cluster(ranks, math.inf, latency=0.0, cores=_cores() / ranks)
    return predict(cluster, job, dataclasses.replace(machine, factors={}))


def _seconds(
    methods: Sequence[str], job: Job, place: Ranks, says: Callable[[str], object]
) -> dict[str, list[float]]:
    """Return {method: seconds of a step, a median for each launch}, without methods that fail
    alone."""
    begin = time.monotonic()
    seconds: dict[str, list[float]] = {}
    for batch in _batches(methods):
        says(f"steps of {batch[0]} to {batch[-1]}")
        seconds |= {method: [step_s] for method, step_s in _apart(batch, job, place).items()}
    for launch in range(1, LAUNCHES):
        if time.monotonic() - begin > ENOUGH:
            break
        for batch in _batches(list(seconds)):
            says(f"steps of {batch[0]} to {batch[-1]}, launch {launch + 1} of {LAUNCHES}")
            try:
                for method, step_s in _launched(batch, job, place).items():
                    seconds[method].append(step_s)
            except RanksError as error:
                logger.debug("launch %d: %s", launch + 1, error)  # the first one's figures do
    return seconds


def _apart(methods: Sequence[str], job: Job, place: Ranks) -> dict[str, float]:
    """Launch the methods; if ranks fail, launch each alone and leave out those that fail."""
    try:
        return _launched(methods, job, place)
    except RanksError as error:
        if len(methods) > 1:
            alone = [_apart([method], job, place) for method in methods]
            return {method: own for one in alone for method, own in one.items()}
        if methods[0] in STOCK:
            raise
        logger.warning("%s: no whole step could be measured: %s", methods[0], error)
        return {}


def _launched(methods: Sequence[str], job: Job, place: Ranks) -> dict[str, float]:
    """Return the seconds of a step by method."""
    limit = SECONDS * (1 + len(methods))
    found, _ = exchange.measure(methods, job.tensors, job.coordinates, STEPS, place, limit)
    return {step.method: step.seconds for step in found}


def _written(prediction: Prediction, codec: Codec | None) -> str:
    """Return the method as `bench exchange` reads it, with this exchange and the second stage of
    all of the cluster's ranks."""
    if codec is None:
        return prediction.method
    (method,) = read(prediction.method)
    own = {key: value for key, value in method.keywords.items() if key not in _LEFT_OUT}
    own["exchange"] = prediction.exchange
    if prediction.exchange == "scatter_reduce":
        own["second_stage_bits"] = codec.second.setting
    return written(method.name, own)


def _batches(methods: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(methods), AT_ONCE):
        yield methods[begin : begin + AT_ONCE]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
