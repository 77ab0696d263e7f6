"""Predict a step from three terms: bytes on the wire, the codec, calls per tensor.

``explained`` writes the formula with its numbers. The model excludes GPUs and NCCL, other traffic,
slower ranks and ``exchange="hierarchical"``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_adaptive.tools.bench.models import shapes
from hvd_adaptive.tools.methods import STOCK, Method, read
from hvd_adaptive.tools.output import print_table, seconds
from hvd_adaptive.transport.world import MOST_DIRECT

# Part of a link's rate that Open MPI's rings of three or more ranks reach, and all other messages:
# measured with benchmarks/network.py from 0.1 to 10 Gbit/s.
REACHED_BY_RINGS, REACHED = 0.55, 0.85
# Work of the processor takes this much longer in a step than alone, as memory is new and caches are
# shared. Measured with benchmarks/plan_check.py.
IN_STEP = 1.3
BACKWARD = 2 / 3  # of the computing time
GROUP_BYTES = 16 * 2**20  # of gradients
WORTH = 0.05  # a recommended method saves at least this part of float32's step
ALIKE = 1.05  # of methods within this factor of the fastest, the most exact is recommended
MOST_ERROR = 0.5  # relative squared error; methods with more are not recommended


@dataclass(frozen=True)
class Job:
    """Describe a model's gradients, ranks and hosts."""

    tensors: int
    coordinates: int
    ranks: int  # 2 or more
    bandwidth: float  # bytes per second of a host's link, each way
    per_host: int = 1
    latency: float = 50e-6  # seconds of a message
    cores: float = 8.0  # of each host; may be a fraction
    compute_s: float = 0.0  # of forward and backward pass

    @property
    def slower(self) -> float:
        """Return how many times as long as alone on a core a rank's work takes in a step."""
        return IN_STEP * max(1.0, self.per_host / self.cores)

    @property
    def groups(self) -> int:
        """Return the number of groups in which gradients are exchanged."""
        return max(1, math.ceil(4 * self.coordinates / GROUP_BYTES))


@dataclass(frozen=True)
class Cost:
    """Hold what a number of a gradient costs with a scheme."""

    label: str  # the scheme, as tools.methods reads it
    bits: float
    encode_s: float
    decode_s: float  # to decode and add
    error: float  # relative, squared
    unbiased: bool = True
    second_bits: float = 32.0  # of averages in scatter_reduce
    min_numel: int = 0  # tensors with fewer elements are sent in float32


FLOAT32 = Cost("float32", 32.0, 0.0, 0.0, 0.0)
FLOAT16 = Cost("float16", 16.0, 0.0, 0.0, 2.0**-24)


@dataclass(frozen=True)
class Machine:
    """Hold what was measured with a launcher, "mpi" or "gloo"."""

    launcher: str
    copy_s: float  # a byte that a rank sends
    stock_call_s: float  # a tensor of stock Horovod
    scheme_call_s: float  # a tensor with a scheme
    codecs: tuple[Cost, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """Hold the seconds of a step and of its terms, and the bytes that a rank sends."""

    method: str
    exchange: str  # "ring" for stock Horovod, or the scheme's
    step_s: float
    wire_s: float
    codec_s: float
    calls_s: float
    sent: float
    error: float  # relative, squared, of one rank's gradient
    unbiased: bool


# Payloads and averages that a rank sends, payloads of either that it encodes, and decodes, messages
# in turn, and the link's seconds for a byte.
Exchange = tuple[float, float, float, int, int, float]
WAYS = ("allgather", "scatter_reduce")  # of schemes


def exchanges(job: Job, launcher: str) -> dict[str, Exchange]:
    """Return what a rank does in each exchange, in payloads of all numbers.

    One rank of a host sends to the next host of a ring. All direct messages to other hosts leave.
    """
    ranks, per_host, mpi = job.ranks, job.per_host, launcher == "mpi"
    reached = REACHED_BY_RINGS if mpi and ranks > 2 else REACHED
    ring = (ranks > per_host) / (reached * job.bandwidth)
    direct = per_host * (ranks - per_host) / (ranks - 1) / (REACHED * job.bandwidth)
    gather = direct if mpi and ranks <= MOST_DIRECT else ring
    part, turns = (ranks - 1) / ranks, ranks - 1 if ranks > per_host else 0
    # Payloads of scatter-reduce are direct messages, about as many bytes of averages are gathered.
    scattered = (direct + gather) / 2
    return {
        "ring": (2 * part, 0, 0, 0, 2 * turns, ring),
        "allgather": (ranks - 1, 0, 1, ranks, turns, gather),
        "scatter_reduce": (part, part, 1 + 1 / ranks, 2, 2 * turns, scattered),
    }


def compressed(job: Job, cost: Cost) -> float:
    """Return the part of the numbers that a scheme compresses, in tensors of ``bench exchange``."""
    sizes = (size for _, (size,) in shapes(job.tensors, job.coordinates))
    return sum(size for size in sizes if size >= cost.min_numel) / job.coordinates


def mean_costs(job: Job, machine: Machine) -> list[Cost]:
    """Return what a number costs with each scheme, those in float32 included. Schemes that compress
    none are left out."""
    costs = []
    for own in machine.codecs:
        if part := compressed(job, own):
            mean = replace(
                own,
                bits=32 + part * (own.bits - 32),
                second_bits=32 + part * (own.second_bits - 32),
                encode_s=part * own.encode_s,
                decode_s=part * own.decode_s,
                error=part * own.error,
            )
            costs.append(mean)
    return costs


def exchange_of(method: Method) -> Any:
    """Return the name of the exchange that a method's keywords give, or None."""
    exchange = method.keywords.get("exchange")
    return getattr(exchange, "name", exchange)


def predict(job: Job, machine: Machine) -> list[Forecast]:
    """Predict stock Horovod, and every scheme by allgather and scatter-reduce, or by the one
    that it names; fastest first.

    Schemes that would compress no tensor are left out.
    """
    n, slower, known = job.coordinates, job.slower, exchanges(job, machine.launcher)

    def forecast(cost: Cost, exchange: str, call_s: float) -> Forecast:
        payloads, averages, encoded, decoded, messages, link_s = known[exchange]
        sent = n * (payloads * cost.bits + averages * cost.second_bits) / 8
        wire = sent * (link_s + slower * machine.copy_s) + messages * job.latency
        codec = slower * n * (encoded * cost.encode_s + decoded * cost.decode_s)
        calls = slower * job.tensors * call_s
        total, backward = wire + codec + calls, BACKWARD * job.compute_s
        step = job.compute_s - backward + max(backward, total) + min(backward, total) / job.groups
        terms = step, wire, codec, calls, sent
        return Forecast(cost.label, exchange, *terms, cost.error, cost.unbiased)

    found = [forecast(cost, "ring", machine.stock_call_s) for cost in (FLOAT32, FLOAT16)]
    for cost in mean_costs(job, machine):
        (method,) = read(cost.label)
        named = exchange_of(method)
        for exchange in (named,) if named in WAYS else WAYS:
            found.append(forecast(cost, exchange, machine.scheme_call_s))
    return sorted(found, key=lambda one: one.step_s)


def advise(predictions: Sequence[Forecast]) -> tuple[Forecast, str]:
    """Return the recommended prediction, and the reason.

    It is the most exact of the unbiased methods that are about as fast as the fastest, or float32
    if none is worth its error.
    """
    float32 = next(p for p in predictions if p.method == "float32")
    stock = next(p for p in predictions if p.method in STOCK)  # the fastest comes first
    good = [p for p in predictions if p.error <= MOST_ERROR and p.unbiased]
    if good[0].step_s > (1 - WORTH) * float32.step_s:
        return float32, f"no method saves {WORTH:.0%} of its step, {seconds(float32.step_s)}"
    choice = min((p for p in good if p.step_s <= ALIKE * good[0].step_s), key=lambda p: p.error)
    base = float32 if choice.method in STOCK else stock
    saved = f"a step of {seconds(choice.step_s)} instead of {seconds(base.step_s)} in {base.method}"
    return choice, f"{saved}; relative squared error {choice.error:.2g}"


def in_script(prediction: Forecast) -> str:
    """Return the compression as it is written in a script."""
    if prediction.method in STOCK:
        return f"hvd.Compression.{STOCK[prediction.method]}"
    (method,) = read(prediction.method)
    if exchange_of(method) == prediction.exchange:
        return method.label
    return method.having(exchange=prediction.exchange).label


def show(predictions: Sequence[Forecast], choice: Forecast) -> None:
    """Print milliseconds of a step and of its terms."""
    headings = ("method\nexchange", "step", "wire", "codec", "calls", "MB", "error")
    rows = []
    for p in predictions:
        figures = (1e3 * p.step_s, 1e3 * p.wire_s, 1e3 * p.codec_s, 1e3 * p.calls_s, p.sent / 1e6)
        texts = [f"{figure:,.{1 if figure < 100 else 0}f}" for figure in figures]
        texts.append(f"{p.error:.1g}{'' if p.unbiased else ' b'}")
        rows.append((f"{p.method}\n{p.exchange}", *texts))
    styles = ["bold green" if p is choice else None for p in predictions]
    print_table(headings, rows, styles=styles)


def explained(job: Job, machine: Machine) -> str:
    """Return the formula with its numbers."""
    ns, us, size = 1e9 * job.slower, 1e6 * job.slower, f"{GROUP_BYTES >> 20} MiB"
    ways = exchanges(job, machine.launcher).items()
    counts = "".join(
        f"\n{name}: {payloads:.5g} payloads, {averages:.5g} averages, {encoded:.5g} encoded, "
        f"{decoded} decoded;\n        {messages} messages, link {1e9 * link_s:.4g} ns"
        for name, (payloads, averages, encoded, decoded, messages, link_s) in ways
    )
    codecs = "".join(
        f"\n{one.label}: {one.bits:.4g} bits, averages {one.second_bits:.4g}; encode "
        f"{ns * one.encode_s:.4g} ns, decode {ns * one.decode_s:.4g} ns"
        for one in (FLOAT32, FLOAT16, *mean_costs(job, machine))
    )
    full = "".join(
        f"\nin float32, in tensors below min_numel={one.min_numel}: "
        f"{1 - compressed(job, one):.1%} with {one.label}"
        for one in machine.codecs
    )
    return f"""\
ms of a step: {job.coordinates:,} numbers in {job.tensors} tensors on {job.ranks} ranks
MB: sent by a rank; error: relative, squared, of one rank; b: biased
step  = forward + max(backward, X) + min(backward, X) / {job.groups} groups of {size},
        X = wire + codec + calls; forward + backward: {1e3 * job.compute_s:g} ms,
        backward = 2/3 of it: {1e3 * BACKWARD * job.compute_s:.4g} ms
MB    = numbers * (payloads * bits + averages * their bits) / 8
wire  = MB * (link + {ns * machine.copy_s:.4g} ns to copy) + messages * {1e6 * job.latency:g} us
codec = numbers * (encoded * encode + decoded * decode)
calls = tensors * {us * machine.stock_call_s:.4g} us, with a scheme \
{us * machine.scheme_call_s:.4g} us{counts}{codecs}{full}
link: a byte at {REACHED_BY_RINGS:g} (rings of MPI) or {REACHED:g} of \
{8e-9 * job.bandwidth:g} Gbit/s
ns and us of copies, codecs and calls are {job.slower:.3g} times those of a core's own work"""
