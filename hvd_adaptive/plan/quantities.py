"""What the cost model goes by, what it is told by measurement, and what it says."""

from __future__ import annotations

from dataclasses import dataclass

# Parts of a link's rate that are reached over TCP with large messages: in rings, whose rounds are
# as slow as their slowest rank, and which Open MPI adds up in between, and in messages that are all
# under way at once. Not measured where the plan is made, but in the laboratory
# (benchmarks/network.py at 100 Mbit/s and 1 Gbit/s).
EFFICIENCY = {"mpi": (0.6, 0.85), "gloo": (0.9, 0.9)}


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
    def hosts(self) -> int:
        """H."""
        return self.ranks // self.per_host

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
class Conditions:
    """What constants are measured for: ranks and their hosts decide about second stages, tensors
    about a step's overhead; launcher: whose collectives, "mpi" or "gloo"."""

    ranks: int
    hosts: int
    tensors: int
    launcher: str = "mpi"

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks on {self.hosts} hosts, {self.tensors} tensors, over "
            f"{self.launcher}"
        )


@dataclass(frozen=True)
class Collective:
    """base_s: processor seconds of a small one.  byte_s: of each byte that a rank sends."""

    base_s: float
    byte_s: float


@dataclass(frozen=True)
class Averages:
    """That travel again: bits of a coordinate, processor seconds of encoding and decoding one."""

    bits: float
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class Codec:
    """Of a scheme: bits of a coordinate, processor seconds of encoding and decoding one, relative
    squared error; the averages of all ranks (``second``) and of all hosts (``between``) in their
    second stage; and whether decoded gradients have the right mean."""

    label: str
    bits: float
    encode_s: float
    decode_s: float
    error: float
    second: Averages
    between: Averages
    unbiased: bool = True


@dataclass(frozen=True)
class Machine:
    """What was measured. allreduce, by bytes of a number; local: an alltoall of ranks that share a
    host, by shared memory where the launcher has it; stock_step_s, scheme_step_s: processor seconds
    of a step of stock Horovod and of a scheme with as many tensors and hardly any numbers, the
    latter with two collectives of its own (placeholders, one group); add_s: to add a number to one
    of another rank.  ring_efficiency, direct_efficiency: parts of a link's rate that rings, and
    direct messages, reach.  launcher: whose collectives they are."""

    allreduce: dict[int, Collective]
    allgather: Collective
    alltoall: Collective
    local: Collective
    stock_step_s: float
    scheme_step_s: float
    add_s: float
    codecs: tuple[Codec, ...]
    ring_efficiency: float = EFFICIENCY["mpi"][0]
    direct_efficiency: float = EFFICIENCY["mpi"][1]
    launcher: str = "mpi"


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step and of its parts, which overlap; wire_bytes: that a rank sends, to ranks of
    its own host too but with ``hierarchical``.

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
