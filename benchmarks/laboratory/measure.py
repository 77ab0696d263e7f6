"""Measure every method in every round, so that other work of the machine disturbs all alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from hvd_adaptive.adapt.schedule import WINDOW
from laboratory.hosts import FOLDER, Hosts, bits_per_second
from laboratory.launch import launch
from laboratory.methods import Method, refusals
from laboratory.shapes import read_shapes

LAUNCH_SECONDS = 150.0  # for a launch beside its steps
LAUNCHES = 3
SLOWEST = 12.0  # a step may take this many times a float32 ring's time on the link,
SLOWEST_DECODE = 1e-8  # and these seconds for each number that a rank receives of another
AVERAGED = ("sent_bytes", "received_bytes", "cpu_s", "machine_cpu_s")


@dataclass(frozen=True)
class Settings:
    """Describe what is measured: a model's gradients, and timed steps of each method in each round.

    warmup: untimed steps before them, each time: the first fits, whose steps are sampled and not
        hidden. Methods that fit nothing have at most 2; PowerSGD compresses from its third step on.
    backward_s: seconds of the backward pass, as where a GPU computes.
    ranks_per_host: share a link, and talk by shared memory (Open MPI).
    trained: gradients of a trained ResNet-18 (trained.py), not drawn ones.
    """

    model: str
    steps: int
    rounds: int
    warmup: int = WINDOW
    backward_s: float = 0.0
    ranks_per_host: int = 1
    trained: bool = False

    def ranks(self, hosts: Hosts) -> int:
        """Return the number of ranks of a launch on these hosts."""
        return len(hosts.addresses) * self.ranks_per_host


@dataclass
class Result:
    """Hold a method's figures over all rounds: of a step, means over ranks if nothing else is said.

    seconds: of each exchange, from the first hook to the end of step(), of the slowest rank; the
    ranks start together.  sent_bytes, received_bytes: of a host, on its interface, headers and
    Horovod's own messages included.  cpu_s: of one rank's process.  machine_cpu_s: of the whole
    machine, kernel included.  reports: of the compressor, a round each.  relative_error: squared,
    of one step's averaged gradient, against the exact mean.  backward_s: the same without exchange.
    trouble: why there are no figures, or why rounds are missing.
    """

    method: Method
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    received_bytes: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    machine_cpu_s: list[float] = field(default_factory=list)
    reports: list[dict[str, float]] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    relative_error: float | None = None
    replicas_equal: bool = True
    trouble: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def mean(self, figure: str) -> float:
        """Return the mean of a figure over rounds."""
        return statistics.fmean(getattr(self, figure))

    def reported(self, key: str) -> float | None:
        """Return the mean over rounds of an entry of the compressor's report, None without one."""
        values = [report[key] for report in self.reports if key in report]
        return statistics.fmean(values) if values else None

    def add(self, ranks: list[dict[str, Any]], backward_s: list[float]) -> None:
        """Add a round's figures from all ranks."""
        steps = zip(*_all(ranks, "seconds"), strict=True)
        self.seconds += [max(times) for times in steps]
        for figure in AVERAGED:
            getattr(self, figure).append(statistics.fmean(_all(ranks, figure)))
        reports = _all(ranks, "report")
        self.reports.append({k: statistics.fmean(_all(reports, k)) for k in reports[0]})
        self.backward_s.append(statistics.median(backward_s))
        self.relative_error = ranks[0]["relative_error"]
        self.replicas_equal &= len(set(_all(ranks, "crc"))) == 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"label": self.method.label}


def _all(rows: list[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows]


def measure(
    hosts: Hosts,
    methods: list[Method],
    settings: Settings,
    starts: Callable[[str], object] = lambda text: None,
    ended: Callable[[], object] = lambda: None,
) -> list[Result]:
    """Time the methods on the hosts; one Result each, in their order.

    If the package refuses a method, or it fails or does not end in time, its Result says so, and
    later rounds leave it out. ``starts`` and ``ended`` are called around each launch.
    """
    results = {method.label: Result(method) for method in methods}
    for label, why in refusals(methods).items():
        results[label].trouble = f"refused: {why}"
    backends = list(dict.fromkeys(method.backend for method in methods))
    for number in range(settings.rounds):
        for backend in backends:
            of_backend = [r for r in results.values() if r.method.backend == backend]
            starts(f"round {number + 1} of {settings.rounds}, {backend}")
            _run_once(hosts, of_backend, settings)
            ended()
    return list(results.values())


def _run_once(hosts: Hosts, results: list[Result], settings: Settings) -> None:
    """Measure one round of a backend's methods: one launch, and another one after each failure."""
    waiting = [result for result in results if result.trouble is None]
    while waiting:
        labels = [result.method.label for result in waiting]
        plan = {"backend": waiting[0].method.backend, "methods": labels, "folder": str(FOLDER)}
        plan |= asdict(settings)
        found = _launched(hosts, plan, _limit(hosts, settings, len(waiting)))
        ranks = found["ranks"] if len(found["ranks"]) == settings.ranks(hosts) else []
        waiting = [result for result in waiting if not _take(result, ranks)]
        if "error" in found or waiting:
            error = found.get("error", "the launch ended early")
            waiting = _without_culprit(waiting, found["ranks"], error)


def _launched(hosts: Hosts, plan: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Launch, and again if it ended before any rank wrote: now and then Open MPI's daemons crash
    while they connect the hosts, whatever the method."""
    for _ in range(LAUNCHES):
        found = launch(hosts, plan, seconds)
        if found["ranks"] or "error" not in found:
            break
    return found


def _take(result: Result, ranks: list[dict[str, Any]]) -> bool:
    """Add a method's figures if every rank has them."""
    label = result.method.label
    rows = [rank["methods"].get(label) for rank in ranks]
    if not rows or None in rows:
        return False
    result.add(rows, ranks[0]["backward_s"])
    return True


def _without_culprit(
    waiting: list[Result], ranks: list[dict[str, Any]], error: str
) -> list[Result]:
    """Mark the method in which a launch ended, or all of them if it ended before the first."""
    at_work = {rank["now"] for rank in ranks}
    culprits = [result for result in waiting if result.method.label in at_work] or waiting
    failure = next((rank["failed"] for rank in ranks if rank.get("failed")), error)
    for result in culprits:
        result.trouble = f"failed: {failure}"
    return [result for result in waiting if result.trouble is None]


def _limit(hosts: Hosts, settings: Settings, methods: int) -> float:
    """Return the seconds after which a launch is ended."""
    steps = (settings.steps + settings.warmup + 1) * methods
    ranks = settings.ranks(hosts)
    numbers = sum(math.prod(shape) for _, shape in read_shapes(settings.model))
    # What the links allow a float32 ring: each host sends 2 (N - 1)/N of the gradient.
    ring = 2 * (ranks - 1) / ranks * 32 * numbers / bits_per_second(hosts.rate)
    step = SLOWEST * ring + SLOWEST_DECODE * ranks**2 * numbers + 2 * settings.backward_s
    return LAUNCH_SECONDS + steps * step
