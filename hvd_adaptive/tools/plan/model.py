"""Predict a step from three terms: bytes on the wire, the codec, calls per tensor.

text.explained prints the formula, with its numbers. A rank sends

    ring            allreduce: 2 (N-1)/N of the numbers, in 4 bytes (float16: 2)
    allgather       allgather: N-1 payloads
    scatter_reduce  direct messages: (N-1)/N of a payload; allgather: (N-1)/N of the averages

The model excludes GPUs and NCCL, other traffic, slower ranks and ``exchange="hierarchical"``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_adaptive.tools.methods import STOCK, read, written
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
class Cluster:
    """Describe ranks on hosts."""

    ranks: int  # 2 or more
    bandwidth: float  # bytes per second of a host's link, each way
    per_host: int = 1
    latency: float = 50e-6  # seconds of a message
    cores: float = 8.0  # of each host; may be a fraction

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return self.ranks // self.per_host

    @property
    def core_share(self) -> float:
        """Return c: the part of a core that a rank has, divided by IN_STEP."""
        return min(1.0, self.cores / self.per_host) / IN_STEP


@dataclass(frozen=True)
class Job:
    """Describe a model's gradients, and the seconds of its forward and backward pass."""

    tensors: int
    coordinates: int
    compute_s: float = 0.0

    @property
    def groups(self) -> int:
        """Return the number of groups in which gradients are exchanged."""
        return max(1, math.ceil(4 * self.coordinates / GROUP_BYTES))


@dataclass(frozen=True)
class Cost:
    """Hold what a coordinate of a scheme costs."""

    label: str  # the scheme, as tools.methods reads it
    bits: float
    encode_s: float
    decode_s: float  # to decode and add
    error: float  # relative, squared
    unbiased: bool = True
    second: Cost | None = None  # of averages in scatter_reduce; None for float32


FLOAT32 = Cost("float32", 32.0, 0.0, 0.0, 0.0)
FLOAT16 = Cost("float16", 16.0, 0.0, 0.0, 2.0**-24)


@dataclass(frozen=True)
class Machine:
    """Hold what was measured with a launcher, "mpi" or "gloo"."""

    launcher: str
    copy_s: Mapping[str, float]  # a byte that a rank sends in an "allreduce" or "allgather"
    stock_call_s: float  # a tensor of stock Horovod
    scheme_call_s: float  # a tensor with a scheme
    codecs: tuple[Cost, ...]


@dataclass(frozen=True)
class Collective:
    """Hold what a collective costs: its messages in turn, and the terms of a byte."""

    messages: int
    crossing: float  # bytes on a host's link for a byte that a rank sends
    reached: float  # part of the link's rate
    copy_s: float

    def seconds(self, cluster: Cluster, sent: float) -> float:
        """Return the seconds of a collective in which a rank sends ``sent`` bytes."""
        link = self.crossing / (self.reached * cluster.bandwidth)
        return self.messages * cluster.latency + sent * (link + self.copy_s / cluster.core_share)


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


def collectives(cluster: Cluster, machine: Machine) -> dict[str, Collective]:
    """Return the costs of "allreduce" and "allgather", and of "direct" messages to each rank."""
    ranks, per_host, mpi = cluster.ranks, cluster.per_host, machine.launcher == "mpi"
    others = ranks - 1 if cluster.hosts > 1 else 0
    ring = REACHED_BY_RINGS if mpi and ranks > 2 else REACHED
    around = float(cluster.hosts > 1)  # one rank of a host sends to the next host
    # Direct messages to other hosts leave their own.
    leaving = per_host * (ranks - per_host) / (ranks - 1)
    direct = Collective(others, leaving, REACHED, machine.copy_s["allreduce"])
    gather = Collective(others, around, ring, machine.copy_s["allgather"])
    return {
        "allreduce": Collective(2 * others, around, ring, machine.copy_s["allreduce"]),
        "direct": direct,
        "allgather": direct if mpi and ranks <= MOST_DIRECT else gather,
    }


def predict(cluster: Cluster, job: Job, machine: Machine) -> list[Forecast]:
    """Predict stock Horovod, and every scheme by allgather and scatter-reduce; fastest first."""
    ranks, part = cluster.ranks, (cluster.ranks - 1) / cluster.ranks
    costs = collectives(cluster, machine)

    def forecast(
        cost: Cost, exchange: str, bits: Mapping[str, float], codec_s: float, call_s: float
    ) -> Forecast:
        n, share, backward = job.coordinates, cluster.core_share, BACKWARD * job.compute_s
        sent = {name: n * each / 8 for name, each in bits.items()}
        wire = sum(costs[name].seconds(cluster, size) for name, size in sent.items())
        codec, calls = n * codec_s / share, job.tensors * call_s / share
        total = wire + codec + calls
        step = job.compute_s - backward + max(backward, total) + min(backward, total) / job.groups
        terms = step, wire, codec, calls, sum(sent.values())
        return Forecast(cost.label, exchange, *terms, cost.error, cost.unbiased)

    found = [
        forecast(stock, "ring", {"allreduce": 2 * part * stock.bits}, 0.0, machine.stock_call_s)
        for stock in (FLOAT32, FLOAT16)
    ]
    for own in machine.codecs:
        second, call = own.second or FLOAT32, machine.scheme_call_s
        gathered = {"allgather": (ranks - 1) * own.bits}
        codec = own.encode_s + ranks * own.decode_s
        found.append(forecast(own, "allgather", gathered, codec, call))
        scattered = {"direct": part * own.bits, "allgather": part * second.bits}
        codec = own.encode_s + own.decode_s + second.encode_s / ranks + second.decode_s
        found.append(forecast(own, "scatter_reduce", scattered, codec, call))
    return sorted(found, key=lambda one: one.step_s)


def by_link_alone(cluster: Cluster, job: Job, launcher: str) -> list[Forecast]:
    """Predict stock Horovod's exchange if neither copying nor calls took any time."""
    free = Machine(launcher, {"allreduce": 0.0, "allgather": 0.0}, 0.0, 0.0, ())
    return predict(cluster, Job(job.tensors, job.coordinates), free)


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
    return written(method.name, {**method.keywords, "exchange": prediction.exchange})


def milliseconds(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
