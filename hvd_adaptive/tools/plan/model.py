"""Predict a step from three terms: bytes on the wire, the codec, calls per tensor.

``text.explained`` prints the formula with its numbers. The model excludes GPUs and NCCL, other
traffic, slower ranks and ``exchange="hierarchical"``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_adaptive.tools.methods import STOCK, read
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
    def core_share(self) -> float:
        """Return the part of a core that a rank has, divided by IN_STEP."""
        return min(1.0, self.cores / self.per_host) / IN_STEP

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
    second_s: float = 0.0  # to encode a rank's part of the averages, and decode all


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


def links(job: Job, launcher: str) -> dict[str, tuple[int, float]]:
    """Return each exchange's messages in turn, and the link's seconds for a byte that a rank sends.

    One rank of a host sends to the next host of a ring. All direct messages to other hosts leave.
    """
    ranks, per_host, mpi = job.ranks, job.per_host, launcher == "mpi"
    reached = REACHED_BY_RINGS if mpi and ranks > 2 else REACHED
    ring = (ranks > per_host) / (reached * job.bandwidth)
    direct = per_host * (ranks - per_host) / (ranks - 1) / (REACHED * job.bandwidth)
    gather = direct if mpi and ranks <= MOST_DIRECT else ring
    turns = ranks - 1 if ranks > per_host else 0
    # Payloads of scatter-reduce are direct messages, about as many bytes of averages are gathered.
    scattered = (direct + gather) / 2
    return {
        "ring": (2 * turns, ring),
        "allgather": (turns, gather),
        "scatter_reduce": (2 * turns, scattered),
    }


def predict(job: Job, machine: Machine) -> list[Forecast]:
    """Predict stock Horovod, and every scheme by allgather and scatter-reduce; fastest first."""
    n, share, part = job.coordinates, job.core_share, (job.ranks - 1) / job.ranks
    known = links(job, machine.launcher)

    def forecast(cost: Cost, exchange: str, bits: float, codec_s: float, call_s: float) -> Forecast:
        (messages, link_s), sent = known[exchange], n * bits / 8
        wire = sent * (link_s + machine.copy_s / share) + messages * job.latency
        codec, calls = n * codec_s / share, job.tensors * call_s / share
        total, backward = wire + codec + calls, BACKWARD * job.compute_s
        step = job.compute_s - backward + max(backward, total) + min(backward, total) / job.groups
        terms = step, wire, codec, calls, sent
        return Forecast(cost.label, exchange, *terms, cost.error, cost.unbiased)

    stock_s, call_s = machine.stock_call_s, machine.scheme_call_s
    found = [forecast(c, "ring", 2 * part * c.bits, 0.0, stock_s) for c in (FLOAT32, FLOAT16)]
    for c in machine.codecs:
        bits, codec_s = (job.ranks - 1) * c.bits, c.encode_s + job.ranks * c.decode_s
        found.append(forecast(c, "allgather", bits, codec_s, call_s))
        bits, codec_s = part * (c.bits + c.second_bits), c.encode_s + c.decode_s + c.second_s
        found.append(forecast(c, "scatter_reduce", bits, codec_s, call_s))
    return sorted(found, key=lambda one: one.step_s)


def advise(predictions: Sequence[Forecast]) -> tuple[Forecast, str]:
    """Return the recommended prediction, and the reason.

    It is the most exact of the unbiased methods that are about as fast as the fastest, or float32
    if none is worth its error.
    """
    float32 = next(p for p in predictions if p.method == "float32")
    stock = min((p for p in predictions if p.method in STOCK), key=lambda p: p.step_s)
    good = [p for p in predictions if p.error <= MOST_ERROR and p.unbiased]
    fastest = min(good, key=lambda p: p.step_s)
    if fastest.step_s > (1 - WORTH) * float32.step_s:
        return float32, f"no method saves {WORTH:.0%} of its step, {milliseconds(float32.step_s)}"
    alike = [p for p in good if p.step_s <= ALIKE * fastest.step_s]
    choice = min(alike, key=lambda p: (p.error, p.step_s))
    base = float32 if choice.method in STOCK else stock
    return choice, (
        f"a step of {milliseconds(choice.step_s)} instead of {milliseconds(base.step_s)} in "
        f"{base.method}; relative squared error {choice.error:.2g}"
    )


def in_script(prediction: Forecast) -> str:
    """Return the compression as it is written in a script."""
    if prediction.method in STOCK:
        return f"hvd.Compression.{STOCK[prediction.method]}"
    (method,) = read(prediction.method)
    return str(method.having(exchange=prediction.exchange))


def milliseconds(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
