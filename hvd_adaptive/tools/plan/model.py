"""Predict a step from three terms: bytes on the wire, the codec, calls per tensor.

N ranks exchange n coordinates. Each host has a link of B bytes per second. c is the part of a core
that a rank has, divided by IN_STEP. A payload has p = n·b/8 bytes at b bits a coordinate, averages
have p₂.

    exchange        bytes of a rank           messages in turn   codec, seconds
    ring            2 (N-1)/N · s·n           2 (N-1)            0; s: bytes of a number
    allgather       (N-1) · p                 N-1                n (encode + N · decode)
    scatter_reduce  (N-1)/N · (p + p₂)        2 (N-1)            n (encode + encode₂/N + decode
                                                                    + decode₂)

    wire  = (bytes that leave a host)/(η·B) + bytes · copy / c + messages · latency
    codec = the codec's seconds / c
    calls = tensors · call / c

    step  = forward + max(backward, X) + min(backward, X)/groups,   X = wire + codec + calls

η is the part of a link's rate that TCP reaches (REACHED). copy (seconds a byte), encode, decode
(seconds a coordinate) and call (seconds a tensor) are measured here (measure.py). The backward pass
takes two thirds of the computing time; the exchange of all groups but one overlaps with it.

The model excludes GPUs and NCCL, other traffic, slower ranks and ``exchange="hierarchical"``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvd_adaptive.tools.methods import STOCK, read, written
from hvd_adaptive.transport.world import MOST_DIRECT

# Part of a link's rate that Open MPI's rings of three or more ranks reach, and all other messages:
# measured with benchmarks/network.py from 0.1 to 10 Gbit/s.
REACHED_BY_RINGS, REACHED = 0.55, 0.85
# What the processor does takes so many times longer in a step than alone: memory is new, caches are
# shared. Measured with benchmarks/plan_check.py.
IN_STEP = 1.3
BACKWARD = 2 / 3  # of the computing time
GROUP_BYTES = 16 * 2**20  # of gradients
WORTH = 0.05  # a recommended method saves at least this part of float32's step
ALIKE = 1.05  # of methods within this factor of the fastest, the most exact is recommended
MOST_ERROR = 0.5  # relative squared error; methods with more are not recommended


@dataclass(frozen=True)
class Cluster:
    """Describe ranks on hosts.

    Args:
        ranks: Number of ranks, 2 or more.
        bandwidth: Bytes per second of a host's link, each way.
        per_host: Ranks of each host.
        latency: Seconds of a message.
        cores: Cores of each host; may be a fraction.
    """

    ranks: int
    bandwidth: float
    per_host: int = 1
    latency: float = 50e-6
    cores: float = 8.0

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


@dataclass(frozen=True)
class Cost:
    """Describe a scheme's cost.

    Args:
        label: The scheme, as ``tools.methods`` reads it.
        bits: Per coordinate.
        encode_s: Seconds to encode a coordinate.
        decode_s: Seconds to decode and add a coordinate.
        error: Relative squared error.
        unbiased: Whether decoded gradients have the right mean.
        second: The codec of averages in scatter_reduce; None for float32.
    """

    label: str
    bits: float
    encode_s: float
    decode_s: float
    error: float
    unbiased: bool = True
    second: Cost | None = None


@dataclass(frozen=True)
class Machine:
    """Hold what was measured.

    Args:
        launcher: "mpi" or "gloo", whose collectives were measured.
        copy_s: Seconds a byte that a rank sends: in an "allreduce", as in direct messages, or in
            the ring of an "allgather".
        stock_call_s: Seconds a tensor of stock Horovod.
        scheme_call_s: Seconds a tensor with a scheme.
        codecs: The schemes.
    """

    launcher: str
    copy_s: Mapping[str, float]
    stock_call_s: float
    scheme_call_s: float
    codecs: tuple[Cost, ...]


@dataclass(frozen=True)
class Forecast:
    """Hold the seconds of a step and of its terms, the bytes that a rank sends, and the relative
    squared error of one rank's gradient.

    exchange: "ring" for stock Horovod, or the scheme's.
    """

    method: str
    exchange: str
    step_s: float
    wire_s: float
    codec_s: float
    calls_s: float
    sent: float
    error: float
    unbiased: bool


def predict(cluster: Cluster, job: Job, machine: Machine) -> list[Forecast]:
    """Predict stock Horovod, and every scheme by allgather and scatter-reduce; fastest first."""
    ways = [*_stock(cluster, machine), *_compressed(cluster, machine)]
    found = [_predicted(cluster, job, machine, *way) for way in ways]
    return sorted(found, key=lambda prediction: prediction.step_s)


# Method, exchange, error, unbiased; collectives with the bits that a rank sends for a coordinate;
# seconds of the codec for a coordinate, and of the calls for a tensor.
_Way = tuple[str, str, float, bool, Sequence[tuple[str, float]], float, float]


def _stock(cluster: Cluster, machine: Machine) -> Iterator[_Way]:
    turns = 2 * (cluster.ranks - 1) / cluster.ranks
    for method, size, error in (("float32", 4, 0.0), ("float16", 2, 2.0**-24)):
        ring = [("allreduce", turns * 8 * size)]
        yield method, "ring", error, True, ring, 0.0, machine.stock_call_s


def _compressed(cluster: Cluster, machine: Machine) -> Iterator[_Way]:
    ranks, call = cluster.ranks, machine.scheme_call_s
    gather = "direct" if machine.launcher == "mpi" and ranks <= MOST_DIRECT else "allgather"
    for codec in machine.codecs:
        named = codec.label, "allgather", codec.error, codec.unbiased
        sent = [(gather, (ranks - 1) * codec.bits)]
        yield *named, sent, codec.encode_s + ranks * codec.decode_s, call
        named = codec.label, "scatter_reduce", codec.error, codec.unbiased
        second = codec.second or Cost("float32", 32.0, 0.0, 0.0, 0.0)
        part = (ranks - 1) / ranks
        sent = [("direct", part * codec.bits), (gather, part * second.bits)]
        seconds = codec.encode_s + second.encode_s / ranks + codec.decode_s + second.decode_s
        yield *named, sent, seconds, call


def _predicted(
    cluster: Cluster,
    job: Job,
    machine: Machine,
    method: str,
    exchange: str,
    error: float,
    unbiased: bool,
    collectives: Sequence[tuple[str, float]],
    codec_s: float,
    call_s: float,
) -> Forecast:
    """Combine the terms; see the module's documentation."""
    n, share, backward = job.coordinates, cluster.core_share, BACKWARD * job.compute_s
    wire = sum(_wire(cluster, machine, name, n * bits / 8) for name, bits in collectives)
    codec, calls = n * codec_s / share, job.tensors * call_s / share
    total, groups = wire + codec + calls, max(1, math.ceil(4 * n / GROUP_BYTES))
    step = job.compute_s - backward + max(backward, total) + min(backward, total) / groups
    sent = n * sum(bits for _, bits in collectives) / 8
    return Forecast(method, exchange, step, wire, codec, calls, sent, error, unbiased)


def _wire(cluster: Cluster, machine: Machine, collective: str, sent: float) -> float:
    """Return the seconds of a collective in which a rank sends ``sent`` bytes."""
    ranks, direct = cluster.ranks, collective == "direct"
    copy_s = machine.copy_s["allreduce" if direct else collective]
    copied = sent * copy_s / cluster.core_share
    if cluster.hosts == 1:
        return copied
    messages = (ranks - 1) * (2 if collective == "allreduce" else 1)
    if direct:  # of a rank's messages, those to other hosts leave its own
        sent *= cluster.per_host * (ranks - cluster.per_host) / (ranks - 1)
    slow = not direct and machine.launcher == "mpi" and ranks > 2
    reached = REACHED_BY_RINGS if slow else REACHED
    return copied + sent / (reached * cluster.bandwidth) + messages * cluster.latency


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
