"""The cost model. Pure functions: constants in, seconds out.

A step of N ranks with n coordinates, on H hosts of R ranks (N = H·R), each host with a link of B
bytes per second each way and latency α, and C cores. A payload of b bits a coordinate has
p = n·b/8 bytes; an average that travels again b₂, p₂. What leaves a rank (w), a host's link (h):

    exchange          w                           h                     messages in turn
    ring allreduce    2 (N-1)/N · s·n             Gloo the same,        2 (N-1)   s: bytes a number
                                                  MPI 2 (H-1)/H · s·n
    allgather         (N-1) · p                   the same              N-1
    scatter-reduce    (N-1)/N · (p + p₂)          alltoall R (N-R)/N p, 2 (N-1)
                                                  allgather (N-1)/N p₂
    hierarchical      (H-1)/R · p, for H > 2      R times as much       H-1, for H > 2 2 (H-1)
                      (H-1)/(H·R) · (p + p₂)

Rings pass from rank to rank and leave a host once; Open MPI's allreduce of powers of two is no ring
but halves, first among a host's ranks (so the laboratory's interfaces count); other numbers of
ranks are taken for like. Of an alltoall, and over MPI of an allgather among so few ranks that it is
one (MOST_DIRECT), each rank's parts for other hosts leave. So at b bits an allgather sends (N-1)
b/32 of the gradient, a scatter-reduce (b + b₂)/32. Hierarchical is predicted for several
hosts of several ranks: its ranks of a host first send each other slices of n/R float32 numbers,
which they add up, and the averages of these slices at last: l = (R-1)/R · 8 n bytes of a rank that
stay in its host. Slices travel between hosts as payloads.

Seconds, where c = min(1, C/R)/f; C/R is the part of a core that a rank's one busy thread has, f
what whole steps take beside the sum of these parts (steps.py):

    wire      h/(η·B) + messages · α       η: part of the rate that is reached, by rings of three
                                           ranks and more, an allreduce of two, and all else
    handling  (w · byte_s + l · local byte_s + n · add_s) / c
                                           copying, adding and handing to the kernel, both ends
    overhead  (step_s + (collectives - those in step_s) · base_s) / c
    encode    n · encode_s / c,        scatter-reduce: + n/N · encode_s of the second stage
    decode    N · n · decode_s / c,    scatter-reduce: n · decode_s, + n · decode_s of the second
              of hierarchical, n is a slice's, and N the number of hosts

The exchange X = P + W, of the processor, P = handling + overhead, and of what is seen of the wire,
W = wire - hidden · min(wire, P): the one thread of Horovod and MPI sends and copies in turns, but
while it copies the wire takes what the kernel was given before. It overlaps what another thread
does in G groups: the backward pass (two thirds of the computing time) and encoding, A, and after
them decoding, D. The last group has come after L = (A + X)/G + (G-1)/G · max(A, X), as in a
pipeline of two stages, and

    step = forward + max(L + D/G, max(A, (A + X)/G) + D, A + P + D + W/G where C < R),

since a shared processor (C < R) does what it does in turns, and nothing while a last group travels.
A group of Horovod's own is what its fusion buffer holds.

byte_s, base_s, step_s, add_s, encode_s, decode_s and f are measured (measure.py), on this machine;
η and what is hidden were measured in the laboratory (quantities.py).
Not in the model: GPUs and NCCL, other traffic, slower ranks, more than one rail, switches that
cannot carry all links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_adaptive.exchange.hierarchical import MOST_GATHERED
from hvd_adaptive.tools.plan.quantities import Cluster, Codec, Collective, Job, Machine, Prediction
from hvd_adaptive.transport.world import MOST_DIRECT

# Shares of the computing time: a backward pass takes about twice a forward one.
BACKWARD = 2 / 3
# Bytes of gradients in a group: ours by default, and Horovod's fusion buffer.
GROUP_BYTES, FUSION_BYTES = 16 * 2**20, 128 * 2**20


def predict(cluster: Cluster, job: Job, machine: Machine) -> list[Prediction]:
    """Predict every method over every exchange. A single rank exchanges nothing."""
    stock = [
        ring(cluster, job, machine, label, size, error)
        for label, size, error in (("float32", 4, 0.0), ("float16", 2, 2.0**-24))
    ]
    several = cluster.hosts > 1 and cluster.per_host > 1
    kinds = (allgather, scatter_reduce, *([hierarchical] if several else []))
    return stock + [
        kind(cluster, job, machine, codec) for codec in machine.codecs for kind in kinds
    ]


def ring(
    cluster: Cluster, job: Job, machine: Machine, label: str, size: int, error: float
) -> Prediction:
    """Predict stock Horovod's allreduce of numbers of ``size`` bytes."""
    ranks, numbers = cluster.ranks, job.coordinates
    sent = 2 * (ranks - 1) / ranks * size * numbers
    apart = ranks if machine.launcher == "gloo" else cluster.hosts
    leaves = 2 * (apart - 1) / apart * size * numbers
    collective = machine.allreduce[size]
    groups = max(1, math.ceil(size * numbers / FUSION_BYTES))
    reached = machine.ring_part(ranks, cluster.bandwidth)
    if job.compute_s:  # gradients come one after another, and are fused as they come
        groups = max(groups, min(job.tensors, 8))
    return _predicted(
        cluster,
        job,
        machine,
        label,
        "ring",
        sent=sent,
        leaves=leaves / reached,
        messages=2 * (ranks - 1) * groups,
        handling=sent * collective.byte_s,
        overhead=machine.stock_step_s + (groups - 1) * collective.base_s,
        encode=0.0,
        decode=0.0,
        groups=groups,
        error=error,
    )


def allgather(cluster: Cluster, job: Job, machine: Machine, codec: Codec) -> Prediction:
    """Predict a scheme whose payloads go to every rank."""
    ranks, numbers = cluster.ranks, job.coordinates
    groups = _groups(numbers)
    gather = _gather(cluster, machine, numbers * codec.bits / 8)
    return _predicted(
        cluster,
        job,
        machine,
        codec.label,
        "allgather",
        sent=gather.sent,
        leaves=gather.leaves,
        messages=(ranks - 1) * groups,
        handling=gather.sent * gather.collective.byte_s,
        overhead=machine.scheme_step_s + (groups - 1) * gather.collective.base_s,
        encode=numbers * codec.encode_s,
        decode=ranks * numbers * codec.decode_s,
        groups=groups,
        error=codec.error,
        unbiased=codec.unbiased,
    )


def scatter_reduce(cluster: Cluster, job: Job, machine: Machine, codec: Codec) -> Prediction:
    """Predict a scheme whose payload goes in parts to the ranks, and whose averages go to all
    ranks."""
    ranks, numbers, per_host = cluster.ranks, job.coordinates, cluster.per_host
    groups = _groups(numbers)
    first = numbers * codec.bits / 8
    parts = (ranks - 1) / ranks * first
    outside = per_host * (ranks - per_host) / ranks * first
    outside /= machine.direct_part(cluster.bandwidth)
    averages = _gather(cluster, machine, numbers * codec.second.bits / 8 / ranks)
    more = (groups - 1) * machine.alltoall.base_s + groups * averages.collective.base_s
    return _predicted(
        cluster,
        job,
        machine,
        codec.label,
        "scatter_reduce",
        sent=parts + averages.sent,
        leaves=outside + averages.leaves,
        messages=2 * (ranks - 1) * groups,
        handling=parts * machine.alltoall.byte_s + averages.sent * averages.collective.byte_s,
        overhead=machine.scheme_step_s + more,
        encode=numbers * (codec.encode_s + codec.second.encode_s / ranks),
        decode=numbers * (codec.decode_s + codec.second.decode_s),
        groups=groups,
        error=codec.error,
        unbiased=codec.unbiased,
    )


def hierarchical(cluster: Cluster, job: Job, machine: Machine, codec: Codec) -> Prediction:
    """Predict a scheme whose slices are added up inside a host, and travel as payloads between
    hosts."""
    hosts, per_host = cluster.hosts, cluster.per_host
    groups, numbers = _groups(job.coordinates), job.coordinates / per_host
    first, again = numbers * codec.bits / 8, numbers * codec.between.bits / 8
    scattered = hosts > MOST_GATHERED
    sent = (hosts - 1) / hosts * (first + again) if scattered else (hosts - 1) * first
    inside = 2 * (per_host - 1) * 4 * numbers
    between = 1 + scattered  # collectives, beside two inside
    encode, decode = numbers * codec.encode_s, hosts * numbers * codec.decode_s
    if scattered:
        encode += numbers / hosts * codec.between.encode_s
        decode = numbers * (codec.decode_s + codec.between.decode_s)
    return _predicted(
        cluster,
        job,
        machine,
        codec.label,
        "hierarchical",
        sent=sent,
        leaves=per_host * sent / machine.direct_part(cluster.bandwidth),
        messages=between * (hosts - 1) * groups,
        handling=sent * machine.alltoall.byte_s
        + inside * machine.local.byte_s
        + job.coordinates * machine.add_s,
        overhead=machine.scheme_step_s + ((between + 2) * groups - 1) * machine.alltoall.base_s,
        encode=encode,
        decode=decode,
        groups=groups,
        error=codec.error,
        unbiased=codec.unbiased,
    )


@dataclass(frozen=True)
class _Gather:
    """An allgather: bytes that a rank sends, bytes that leave a host over the reached part of the
    rate, and the collective that handles them."""

    sent: float
    leaves: float
    collective: Collective


def _gather(cluster: Cluster, machine: Machine, size: float) -> _Gather:
    """Return the allgather of so many bytes of each rank."""
    sent = (cluster.ranks - 1) * size
    if cluster.ranks > MOST_DIRECT or machine.launcher != "mpi":
        reached = machine.ring_part(cluster.ranks, cluster.bandwidth)
        return _Gather(sent, sent / reached, machine.allgather)
    outside = cluster.per_host * (cluster.ranks - cluster.per_host) * size
    reached = machine.direct_part(cluster.bandwidth)
    return _Gather(sent, outside / reached, machine.alltoall)


def _groups(numbers: int) -> int:
    return max(1, math.ceil(4 * numbers / GROUP_BYTES))


def _predicted(
    cluster: Cluster,
    job: Job,
    machine: Machine,
    label: str,
    exchange: str,
    *,
    sent: float,
    leaves: float,
    messages: int,
    handling: float,
    overhead: float,
    encode: float,
    decode: float,
    groups: int,
    error: float,
    unbiased: bool = True,
) -> Prediction:
    """Combine the parts; see the module's documentation."""
    share = cluster.core_share
    if cluster.hosts == 1:
        leaves, messages = 0.0, 0
    if cluster.ranks == 1:
        handling, overhead, encode, decode = 0.0, 0.0, 0.0, 0.0
    wire = leaves / cluster.bandwidth + messages * cluster.latency
    slower = machine.factor(label, exchange) / share
    handling, overhead, encode, decode = (t * slower for t in (handling, overhead, encode, decode))
    backward, forward = BACKWARD * job.compute_s, (1 - BACKWARD) * job.compute_s
    before, own = backward + encode, handling + overhead
    seen = wire - machine.reached.hidden * min(wire, own)
    exchanged = own + seen
    # The last group has come, and is decoded; or they wait for the thread that encodes and decodes.
    last = (before + exchanged) / groups + (groups - 1) / groups * max(before, exchanged)
    piped = max(last + decode / groups, max(before, (before + exchanged) / groups) + decode)
    in_turns = before + own + decode + seen / groups if share < 1 else 0.0
    return Prediction(
        method=label,
        exchange=exchange,
        step_s=forward + max(piped, in_turns),
        exchange_s=exchanged,
        wire_s=wire,
        processor_s=own + encode + decode,
        encode_s=encode,
        decode_s=decode,
        wire_bytes=sent,
        error=error,
        unbiased=unbiased,
    )
