"""Print the figures of a measurement."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from hvd_adaptive.tools.output import make_table
from laboratory.hosts import BURST, LATENCY, bits_per_second
from laboratory.measure import Result

# Horovod's settings that matter here, and what they are where the environment does not say.
HOROVOD = {
    "HOROVOD_CYCLE_TIME": "1 ms",
    "HOROVOD_FUSION_THRESHOLD": "128 MiB",
    "HOROVOD_CACHE_CAPACITY": "1024",
}
WIDTH = 150
NONE = "-"


def print_tables(results: list[Result], arguments: Mapping[str, Any]) -> None:
    """Print times and bytes, then the parts of the time, then methods that were not measured."""
    console = Console()
    if not console.is_terminal or console.width < WIDTH:
        console = Console(width=WIDTH)
    measured = [result for result in results if result.seconds]
    parts: list[Any] = []
    if measured:
        parts += [_exchange(measured, arguments), _time(measured, arguments)]
    parts += [f"{r.method.label}: {r.trouble}" for r in results if r.trouble]
    console.print(Group(*parts), markup=False, highlight=False)


def _exchange(results: list[Result], arguments: Mapping[str, Any]) -> Table:
    title = (
        f"{arguments['model']}, {arguments['hosts']} hosts at {arguments['rate']}: "
        f"one exchange, {arguments['steps']} steps in each of {arguments['rounds']} rounds"
    )
    per_host = arguments.get("ranks_per_host", 1)
    if per_host > 1:
        title += f", {per_host} ranks on each host: \"sent\" is a host's, report() a rank's"
    if arguments.get("backward_ms"):
        title += f", in a backward pass of {arguments['backward_ms']} ms"
    headings = ["method", "seconds", "quartiles", "/ float32", "/ fastest\nfloat32", "/ float16"]
    headings += ["sent MB", "report()\nMB", "sent /\nreport()", "CPU s\na rank"]
    headings += ["relative\nerror", "ranks\nequal"]
    medians = {result.method.label: result.median for result in results}
    float32 = [m for label, m in medians.items() if label.endswith("/float32")]
    fastest, rows = min(float32, default=None), []
    for result in results:
        backend, reported = result.method.backend, result.reported("wire_bytes")
        sent = result.mean("sent_bytes")
        cells = (
            result.method.label,
            f"{result.median:.4f}",
            "{:.4f} {:.4f}".format(*quartiles(result.seconds)),
            _ratio(result.median, medians.get(f"{backend}/float32")),
            _ratio(result.median, fastest),
            _ratio(result.median, medians.get(f"{backend}/float16")),
            f"{sent / 1e6:.3f}",
            NONE if reported is None else f"{reported / 1e6:.3f}",
            _ratio(sent, reported and reported * per_host),
            f"{result.mean('cpu_s'):.3f}",
            f"{result.relative_error:.2g}",
            NONE if result.method.is_nothing else "yes" if result.replicas_equal else "NO",
        )
        rows.append(cells)
    return make_table(headings, rows, title=title, caption="\n".join(conditions()))


def _time(results: list[Result], arguments: Mapping[str, Any]) -> Table:
    caption = (
        "link: bytes sent at the rate; hooks: the same step without an exchange; encode, wait, "
        "decode: as report() says, parts of which run while the link is busy; rest: the step "
        "without these four. CPU: seconds of all cores, and their share of what the cores of "
        "this machine had to give: near 1, hosts wait for each other's turn."
    )
    headings = ["method", "step", "link", "hooks", "encode", "wait", "decode", "rest"]
    headings += ["CPU", "CPU share"]
    rate, cores = bits_per_second(arguments["rate"]), len(os.sched_getaffinity(0))
    rows = []
    for result in results:
        parts = [result.reported(key) for key in ("encode_s", "exchange_s", "decode_s")]
        step, backward = statistics.fmean(result.seconds), result.mean("backward_s")
        known = None not in parts
        busy = result.mean("machine_cpu_s")
        cells = (
            result.method.label,
            f"{step:.4f}",
            f"{8 * result.mean('sent_bytes') / rate:.4f}",
            f"{backward:.4f}",
            *(NONE if part is None else f"{part:.4f}" for part in parts),
            f"{step - backward - sum(parts):.4f}" if known else NONE,
            f"{busy:.4f}",
            f"{busy / (step * cores):.2f}",
        )
        rows.append(cells)
    return make_table(headings, rows, title="where a step's seconds go", caption=caption)


def conditions() -> list[str]:
    """Return the circumstances of the measurement, a line each."""
    known = {name: f"{default} (default)" for name, default in HOROVOD.items()}
    known |= {k: v for k, v in os.environ.items() if k.startswith(("HOROVOD_", "OMPI_MCA_"))}
    return [
        f"links: tbf burst {BURST} latency {LATENCY}, both ends; {os.cpu_count()} cores "
        f"({processor()}), load {os.getloadavg()[2]:.1f} over 15 minutes; a thread a rank",
        ", ".join(f"{name}={value}" for name, value in known.items()),
    ]


def processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def quartiles(values: list[float]) -> tuple[float, float]:
    """Return the first and third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def _ratio(value: float, base: float | None) -> str:
    return NONE if not base else f"{value / base:.3f}"
