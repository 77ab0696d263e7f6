"""The cost model's constants, measured on this machine in seconds.

Codecs: a payload of a group's size is encoded, and some are decoded and added, on one thread; the
median of a few times. Collectives: two ranks exchange over TCP on the loopback device, where the
wire costs nothing and what is left is the processor's: of a small message the base, of a large one
more the seconds a byte; and once more as ranks of one host do. Processor seconds are elapsed ones
times the part of a core that a rank has here. Last, whole steps of every method (steps.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.tools.bench.gradients import heavy_tailed
from hvd_adaptive.tools.launch import Ranks, run_ranks
from hvd_adaptive.tools.methods import parse
from hvd_adaptive.tools.plan import steps
from hvd_adaptive.tools.plan.model import GROUP_BYTES
from hvd_adaptive.tools.plan.quantities import (
    LABORATORY,
    Averages,
    Codec,
    Collective,
    Conditions,
    Machine,
)
from hvd_adaptive.tools.plan.worker import LARGE, SMALL
from hvd_adaptive.tools.schemes.catalog import is_unbiased

logger = logging.getLogger("hvd_adaptive")

COORDINATES = GROUP_BYTES // 4
ROUNDS, PAYLOADS = 5, 4
RANKS = 2
SECONDS = 180.0
WORKER = "hvd_adaptive.tools.plan.worker"
DEFAULTS = (
    "ALQ(bits=2)",
    "ALQ(bits=3)",
    "ALQ(bits=4)",
    "AMQ(bits=3)",
    "QSGD(bits=4, norm='linf')",
    "QSGD(bits=8, norm='linf')",
    "NUQSGD(bits=4)",
    "TernGrad()",
    "ORQ(levels=9)",
    "ECDQ(bits=1)",
    "ECDQ(bits=2)",
    "ECDQ(bits=3)",
    "EDEN(bits=1)",
    "EDEN(bits=2)",
    "NaturalCompression()",
    "SignSGD()",
    "OneBitSGD()",
    "BinGrad()",
    "QCS(gain=10)",
    "SparseSGD(density=0.01)",
    "LinearQuantile(levels=9)",
)


def measure(
    methods: Sequence[str], conditions: Conditions, says: Callable[[str], object]
) -> Machine:
    """Measure all constants.

    Args:
        methods: schemes, as ``tools.methods`` reads them.
        conditions: of the plan.
        says: gets the name of what is measured next.

    Raises:
        RanksError: ranks cannot be started here.
    """
    says("collectives between two ranks")
    found = collectives(conditions.tensors, conditions.launcher)
    codecs = []
    for method in methods:
        says(method)
        codecs.append(codec(method, conditions.ranks, conditions.hosts))
    parts = Machine(codecs=tuple(codecs), add_s=adding(), **found)
    if conditions.ranks == 1:  # which exchanges nothing
        return parts
    return dataclasses.replace(parts, factors=steps.factors(parts, conditions, says))


def collectives(tensors: int, launcher: str) -> dict[str, Any]:
    """Return the Machine's fields about collectives and steps."""
    apart, together = Ranks(RANKS, launcher, tcp=True), Ranks(RANKS, launcher)
    (found,) = run_ranks(WORKER, {"tensors": tensors}, apart, SECONDS)
    if launcher == "mpi":  # Gloo has no other way
        (near,) = run_ranks(WORKER, {"only": ["alltoall"]}, together, SECONDS)
    else:
        near = found
    share = min(1.0, len(os.sched_getaffinity(0)) / RANKS)

    def made(seconds: Sequence[float], sent: float) -> Collective:
        """sent: part of LARGE bytes that each of two ranks sends."""
        small, large = seconds
        byte_s = max(0.0, large - small) / (sent * (LARGE - SMALL))
        return Collective(base_s=share * small, byte_s=share * byte_s)

    return {
        # Half of the bytes twice.
        "allreduce": {4: made(found["allreduce4"], 1.0), 2: made(found["allreduce2"], 1.0)},
        "allgather": made(found["allgather"], 1.0),
        "alltoall": made(found["alltoall"], 0.5),
        "local": made(near["alltoall"], 0.5),
        "stock_step_s": share * found["stock"],
        "scheme_step_s": share * found["scheme"],
        "reached": LABORATORY[launcher],
        "launcher": launcher,
    }


def adding() -> float:
    """Return the seconds for adding a number of another rank of the host, on one thread."""
    with _one_thread():
        total, part = torch.zeros(COORDINATES), gradient(COORDINATES)
        return _median(lambda: total.add_(part.clone())) / COORDINATES


def codec(method: str, ranks: int, hosts: int) -> Codec:
    """Measure a scheme, and its second stage over so many ranks and over so many hosts."""
    (read,) = parse([method])
    scheme = read.scheme()
    flat, first = gradient(COORDINATES), scheme.codec
    _fit(first, flat)
    with _one_thread():
        bits, encode_s, decode_s, error = _timed(first, flat)
        second = _averages(first, ranks, flat)
        between = second if hosts == ranks else _averages(first, hosts, flat)
    return Codec(read.label, bits, encode_s, decode_s, error, second, between, is_unbiased(scheme))


def _averages(first: Any, ranks: int, flat: torch.Tensor) -> Averages:
    """Measure the second stage of so many ranks."""
    # A training would be warned of what is measured here.
    with _quiet():
        second = first.second_stage(max(2, ranks))
    if second.bits == 32:
        return Averages(32.0, 0.0, 0.0)
    _fit(second.codec, flat)
    return Averages(*_timed(second.codec, flat)[:3], second.bits)


def _fit(codec: Any, flat: torch.Tensor) -> None:
    if hasattr(codec, "fit"):
        codec.fit(flat[: 20 * codec.settings.bucket_size])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gradient(coordinates: int) -> torch.Tensor:
    """Return the gradient that codecs are measured with (float32)."""
    return heavy_tailed((coordinates,), torch.Generator().manual_seed(0))


def _timed(codec: Any, flat: torch.Tensor) -> tuple[float, float, float, float]:
    """Return bits per coordinate, seconds of encoding and of decoding a coordinate, and the
    relative squared error."""
    size = flat.numel()
    payload = codec.encode_flat(flat, size, 1)
    expected, out = read_header(payload), torch.zeros_like(flat)
    received = [payload] * PAYLOADS

    def decode(payloads: list[torch.Tensor]) -> None:
        codec.decode_into(payloads, expected, 1.0 / len(payloads), out, out[:0])

    decode(received)
    error = float((out - flat).square().sum() / flat.square().sum())
    encode_s = _median(lambda: codec.encode_flat(flat, size, 1))
    decode_s = _median(lambda: decode(received)) / PAYLOADS
    return 8 * payload.numel() / size, encode_s / size, decode_s / size, error


def _median(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
