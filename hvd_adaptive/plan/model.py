"""The cost model. Pure functions: constants in, seconds out.

A step of N ranks with n coordinates, on H hosts of R ranks (N = H·R), each host with a link of B
bytes per second each way and latency α, and C cores. A payload of b bits a coordinate has
p = n·b/8 bytes; an average that travels again b₂, p₂. What leaves a rank (w), a host's link (h):

    exchange          w                           h                     messages in turn
    ring allreduce    2 (N-1)/N · s·n             the same              2 (N-1)   s: bytes a number
    allgather         (N-1) · p                   the same              N-1
    scatter-reduce    (N-1)/N · (p + p₂)          alltoall R (N-R)/N p, 2 (N-1)
                                                  allgather (N-1)/N p₂

Rings pass from rank to rank and leave a host once; of an alltoall, and of an allgather among so few
ranks that it is one (MOST_DIRECT), each rank's parts for other hosts do. So at b bits an allgather
sends (N-1) b/32 of the gradient, a scatter-reduce (b + b₂)/32.

Seconds, where c = min(1, C/R) is the part of a core that a rank's one busy thread has:

    wire      h/(η·B) + messages · α       η: part of the rate that is reached, of rings and else
    handling  w · byte_s / c       copying, adding and handing to the kernel, both ends
    overhead  (step_s + (collectives - those in step_s) · base_s) / c
    encode    n · encode_s / c,        scatter-reduce: + n/N · encode_s of the second stage
    decode    N · n · decode_s / c,    scatter-reduce: n · decode_s, + n · decode_s of the second

The exchange X = wire + handling + overhead: the one thread of Horovod and MPI sends and copies in
turns. It overlaps the backward pass (two thirds of the computing time) and encoding, A, in G
groups, as a pipeline of two stages does,

    step = forward + max((A + X)/G + (G-1)/G · max(A, X), A + handling where c < 1) + decode,

unless the processor is shared: then what it does is done in turns. A group of Horovod's own is what
its fusion buffer holds.

byte_s, base_s, step_s, encode_s and decode_s are measured (measure.py), on this machine. Not in the
model: other traffic, slower ranks, more than one rail, NCCL, switches that cannot carry all links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_adaptive.exchange.world import MOST_DIRECT

# Shares of the computing time: a backward pass takes about twice a forward one.
BACKWARD = 2 / 3
# Parts of a link's rate that Open MPI 4.1 reaches over TCP with large messages: in rings, whose
# rounds are as slow as their slowest rank and are added up in between, and in messages that are all
# under way at once. Not measured where the plan is made, but in the laboratory
# (benchmarks/network.py at 100 Mbit/s and 1 Gbit/s).
RING_EFFICIENCY, DIRECT_EFFICIENCY = 0.6, 0.85
# Bytes of gradients in a group: ours by default, and Horovod's fusion buffer.
GROUP_BYTES, FUSION_BYTES = 16 * 2**20, 128 * 2**20


@dataclass(frozen=True)
class Cluster:
    """ranks on hosts of ``per_host`` each; bandwidth: bytes per second of a host's link, each way;
    latency: seconds of a message; cores: of each host, fractions too."""

    ranks: int
    bandwidth: float
    per_host: int = 1
    latency: float = 50e-6
    cores: float = 8.0

    @property
    def core_share(self) -> float:
        """c: what a rank's busy thread has of a core."""
        return min(1.0, self.cores / self.per_host)


@dataclass(frozen=True)
class Job:
    """A model's gradients, and seconds of forward and backward pass without any exchange."""

    tensors: int
    coordinates: int
    compute_s: float = 0.0


@dataclass(frozen=True)
class Collective:
    """base_s: processor seconds of a small one.  byte_s: of each byte that a rank sends."""

    base_s: float
    byte_s: float


@dataclass(frozen=True)
class Codec:
    """Of a scheme: bits of a coordinate, processor seconds of encoding and decoding one, relative
    squared error; the same of its second stage over the ranks that are planned for; and whether
    decoded gradients have the right mean."""

    label: str
    bits: float
    encode_s: float
    decode_s: float
    error: float
    second_bits: float
    second_encode_s: float
    second_decode_s: float
    unbiased: bool = True


@dataclass(frozen=True)
class Machine:
    """What was measured. allreduce, by bytes of a number; stock_step_s, scheme_step_s: processor
    seconds of a step of stock Horovod and of a scheme with as many tensors and hardly any numbers,
    the latter with two collectives of its own (placeholders, one group).  ring_efficiency,
    direct_efficiency: parts of a link's rate that rings, and direct messages, reach."""

    allreduce: dict[int, Collective]
    allgather: Collective
    alltoall: Collective
    stock_step_s: float
    scheme_step_s: float
    codecs: tuple[Codec, ...]
    ring_efficiency: float = RING_EFFICIENCY
    direct_efficiency: float = DIRECT_EFFICIENCY


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step and of its parts, which overlap; wire_bytes: that a rank sends.

    error: relative squared, of one rank's gradient.  exchange: "ring" of stock Horovod.
    """

    method: str
    exchange: str
    step_s: float
    exchange_s: float
    wire_s: float
    processor_s: float
    encode_s: float
    decode_s: float
    wire_bytes: float
    error: float
    unbiased: bool = True


def predict(cluster: Cluster, job: Job, machine: Machine) -> list[Prediction]:
    """Every method over every exchange; with one rank there is nothing to exchange."""
    stock = [
        ring(cluster, job, machine, label, size, error)
        for label, size, error in (("float32", 4, 0.0), ("float16", 2, 2.0**-24))
    ]
    return stock + [
        kind(cluster, job, machine, codec)
        for codec in machine.codecs
        for kind in (allgather, scatter_reduce)
    ]


def ring(
    cluster: Cluster, job: Job, machine: Machine, label: str, size: int, error: float
) -> Prediction:
    """Stock Horovod's allreduce of numbers of ``size`` bytes."""
    ranks, numbers = cluster.ranks, job.coordinates
    sent = 2 * (ranks - 1) / ranks * size * numbers
    collective = machine.allreduce[size]
    groups = max(1, math.ceil(size * numbers / FUSION_BYTES))
    if job.compute_s:  # gradients come one after another, and are fused as they come
        groups = max(groups, min(job.tensors, 8))
    return _predicted(
        cluster, job, label, "ring",
        sent=sent, leaves=sent / machine.ring_efficiency, messages=2 * (ranks - 1) * groups,
        handling=sent * collective.byte_s,
        overhead=machine.stock_step_s + (groups - 1) * collective.base_s,
        encode=0.0, decode=0.0, groups=groups, error=error,
    )  # fmt: skip


def allgather(cluster: Cluster, job: Job, machine: Machine, codec: Codec) -> Prediction:
    """A scheme's payloads to every rank."""
    ranks, numbers = cluster.ranks, job.coordinates
    groups = _groups(numbers)
    gather = _gather(cluster, machine, numbers * codec.bits / 8)
    return _predicted(
        cluster, job, codec.label, "allgather",
        sent=gather.sent, leaves=gather.leaves, messages=(ranks - 1) * groups,
        handling=gather.sent * gather.collective.byte_s,
        overhead=machine.scheme_step_s + (groups - 1) * gather.collective.base_s,
        encode=numbers * codec.encode_s, decode=ranks * numbers * codec.decode_s,
        groups=groups, error=codec.error, unbiased=codec.unbiased,
    )  # fmt: skip


def scatter_reduce(cluster: Cluster, job: Job, machine: Machine, codec: Codec) -> Prediction:
    """A part of a scheme's payload to each rank, and averages to all."""
    ranks, numbers, per_host = cluster.ranks, job.coordinates, cluster.per_host
    groups = _groups(numbers)
    first = numbers * codec.bits / 8
    parts = (ranks - 1) / ranks * first
    outside = per_host * (ranks - per_host) / ranks * first / machine.direct_efficiency
    averages = _gather(cluster, machine, numbers * codec.second_bits / 8 / ranks)
    more = (groups - 1) * machine.alltoall.base_s + groups * averages.collective.base_s
    return _predicted(
        cluster, job, codec.label, "scatter_reduce",
        sent=parts + averages.sent, leaves=outside + averages.leaves,
        messages=2 * (ranks - 1) * groups,
        handling=parts * machine.alltoall.byte_s + averages.sent * averages.collective.byte_s,
        overhead=machine.scheme_step_s + more,
        encode=numbers * (codec.encode_s + codec.second_encode_s / ranks),
        decode=numbers * (codec.decode_s + codec.second_decode_s),
        groups=groups, error=codec.error, unbiased=codec.unbiased,
    )  # fmt: skip


@dataclass(frozen=True)
class _Gather:
    """An allgather: bytes sent by a rank, bytes that leave a host over the part of the rate that is
    reached, and what handles them."""

    sent: float
    leaves: float
    collective: Collective


def _gather(cluster: Cluster, machine: Machine, size: float) -> _Gather:
    """Of so many bytes of each rank."""
    sent = (cluster.ranks - 1) * size
    if cluster.ranks > MOST_DIRECT:
        return _Gather(sent, sent / machine.ring_efficiency, machine.allgather)
    outside = cluster.per_host * (cluster.ranks - cluster.per_host) * size
    return _Gather(sent, outside / machine.direct_efficiency, machine.alltoall)


def _groups(numbers: int) -> int:
    return max(1, math.ceil(4 * numbers / GROUP_BYTES))


def _predicted(
    cluster: Cluster, job: Job, label: str, exchange: str, *,
    sent: float, leaves: float, messages: int, handling: float, overhead: float,
    encode: float, decode: float, groups: int, error: float, unbiased: bool = True,
) -> Prediction:  # fmt: skip
    """Put the parts together; see the module's documentation."""
    share = cluster.core_share
    if cluster.ranks == 1:
        leaves, messages, handling, overhead, encode, decode = 0.0, 0, 0.0, 0.0, 0.0, 0.0
    wire = leaves / cluster.bandwidth + messages * cluster.latency
    handling, overhead, encode, decode = (t / share for t in (handling, overhead, encode, decode))
    backward, forward = BACKWARD * job.compute_s, (1 - BACKWARD) * job.compute_s
    before, exchanged = backward + encode, wire + handling + overhead
    piped = (before + exchanged) / groups + (groups - 1) / groups * max(before, exchanged)
    in_turns = before + handling + overhead if share < 1 else 0.0
    return Prediction(
        method=label,
        exchange=exchange,
        step_s=forward + max(piped, in_turns) + decode,
        exchange_s=exchanged,
        wire_s=wire,
        processor_s=handling + overhead + encode + decode,
        encode_s=encode,
        decode_s=decode,
        wire_bytes=sent,
        error=error,
        unbiased=unbiased,
    )
