"""The cost model's input, measured constants included, and its output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

SLOW, FAST = 100e6 / 8, 1e9 / 8  # bytes per second


@dataclass(frozen=True)
class Reached:
    """Parts of a link's rate that large messages reach over TCP, up to the SLOW rate and from the
    FAST one; between them they go by its logarithm.

    ring: of three ranks and more, allreduces and allgathers that are rings.  pair: of two.
    direct: messages that are all under way at once.  hidden: of wire and the processor's part of an
    exchange, the part of the shorter that the longer hides.
    """

    ring: tuple[float, float]
    pair: tuple[float, float]
    direct: tuple[float, float]
    hidden: float


# Not measured where the plan is made, but in the laboratory (benchmarks/plan_check.py). Rounds of
# Open MPI's rings are as slow as their slowest rank, and allreduces add up in between; messages
# that fill a slow link's queue get lost there.
LABORATORY = {
    "mpi": Reached((0.55, 0.55), (0.61, 0.85), (0.8, 0.9), 0.3),
    "gloo": Reached((0.9, 0.9), (0.9, 0.9), (0.9, 0.9), 0.3),
}


@dataclass(frozen=True)
class Cluster:
    """Ranks on hosts.

    Args:
        ranks: number of ranks.
        bandwidth: bytes per second of a host's link, each way.
        per_host: ranks of each host.
        latency: seconds of a message.
        cores: of each host; may be a fraction.
    """

    ranks: int
    bandwidth: float
    per_host: int = 1
    latency: float = 50e-6
    cores: float = 8.0

    @property
    def hosts(self) -> int:
        """Number of hosts, H."""
        return self.ranks // self.per_host

    @property
    def crowd(self) -> float:
        """Ranks per core."""
        return round(self.per_host / self.cores, 4)

    @property
    def core_share(self) -> float:
        """The part of a core that a rank's busy thread gets, c."""
        return min(1.0, self.cores / self.per_host)


@dataclass(frozen=True)
class Job:
    """A model's gradients, and seconds of the forward and backward pass without any exchange."""

    tensors: int
    coordinates: int
    compute_s: float = 0.0


@dataclass(frozen=True)
class Conditions:
    """What constants are measured for.

    Ranks and hosts determine second stages; tensors, a step's overhead; coordinates and ``crowd``
    (ranks of a host per core), whole steps. ``launcher`` is "mpi" or "gloo", whose collectives are
    measured.
    """

    ranks: int
    hosts: int
    tensors: int
    coordinates: int
    crowd: float = 0.125
    launcher: str = "mpi"

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks on {self.hosts} hosts, {self.crowd:g} ranks to a core (--cores), "
            f"{self.coordinates} coordinates in {self.tensors} tensors, over {self.launcher}"
        )


@dataclass(frozen=True)
class Collective:
    """Processor seconds of a collective.

    Args:
        base_s: of a small collective.
        byte_s: of each byte that a rank sends.
    """

    base_s: float
    byte_s: float


@dataclass(frozen=True)
class Averages:
    """Averages that are encoded again.

    Args:
        bits: per coordinate.
        encode_s: processor seconds of encoding a coordinate.
        decode_s: processor seconds of decoding a coordinate.
        setting: the corresponding second_stage_bits.
    """

    bits: float
    encode_s: float
    decode_s: float
    setting: int = 32


@dataclass(frozen=True)
class Codec:
    """A scheme's cost.

    Args:
        label: the scheme, as ``tools.methods`` reads it.
        bits: per coordinate.
        encode_s: processor seconds of encoding a coordinate.
        decode_s: processor seconds of decoding a coordinate.
        error: relative squared error.
        second: averages over all ranks in the second stage.
        between: averages over all hosts in the second stage.
        unbiased: whether decoded gradients have the right mean.
    """

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
    """What was measured.

    allreduce: by bytes of a number.  local: an alltoall of ranks that share a host, by shared
    memory where the launcher has it.  stock_step_s, scheme_step_s: processor seconds of a step of
    stock Horovod and of a scheme with as many tensors and hardly any numbers, the latter with two
    collectives of its own (placeholders, one group).  add_s: to add a number to one of another
    rank.  reached: of links' rates.  launcher: whose collectives they are.  factors: of methods and
    exchanges, what whole steps took beside the sum of these parts (steps.py).
    """

    allreduce: dict[int, Collective]
    allgather: Collective
    alltoall: Collective
    local: Collective
    stock_step_s: float
    scheme_step_s: float
    add_s: float
    codecs: tuple[Codec, ...]
    reached: Reached = LABORATORY["mpi"]
    launcher: str = "mpi"
    factors: dict[str, dict[str, float]] = field(default_factory=dict)

    def factor(self, method: str, exchange: str) -> float:
        """Return the factor of a method and exchange, 1 if it was not measured. hierarchical, which
        needs several hosts, has scatter_reduce's."""
        own = self.factors.get(method, {})
        return own.get("scatter_reduce" if exchange == "hierarchical" else exchange, 1.0)

    def ring_part(self, ranks: int, rate: float) -> float:
        """Return the part of a link's rate (bytes per second) that a ring reaches."""
        return _at(rate, self.reached.ring if ranks > 2 else self.reached.pair)

    def direct_part(self, rate: float) -> float:
        """Return the part of a link's rate (bytes per second) that direct messages reach."""
        return _at(rate, self.reached.direct)


def _at(rate: float, parts: tuple[float, float]) -> float:
    return float(np.interp(math.log(rate), np.log([SLOW, FAST]), parts))


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step and of its parts, which overlap.

    Args:
        method: "float32", "float16" or a scheme's label.
        exchange: of the scheme; "ring" for stock Horovod.
        wire_bytes: that a rank sends, also to ranks of its own host unless the exchange is
            hierarchical.
        error: relative squared error of one rank's gradient.
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
