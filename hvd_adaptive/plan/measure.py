"""The cost model's constants, measured on this machine in seconds.

Codecs: a payload is encoded, and some are decoded and added, on one thread; the least of a few
times. Collectives: two ranks exchange over TCP on the loopback device, where the wire costs nothing
and what is left is the processor's: of a small message the base, of a large one more the seconds a
byte. Processor seconds are elapsed ones times the part of a core that a rank has here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import hvd_adaptive
from hvd_adaptive.bench.exchange import parse_method
from hvd_adaptive.bench.ranks import Place, available, run_ranks
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.plan.model import Codec, Collective, Machine
from hvd_adaptive.plan.worker import LARGE, SMALL
from hvd_adaptive.schemes.catalog import is_unbiased

COORDINATES = 1 << 21
ROUNDS, PAYLOADS = 3, 4
RANKS = 2
SECONDS = 180.0
DEFAULTS = (
    "ALQ(bits=2)", "ALQ(bits=3)", "ALQ(bits=4)", "AMQ(bits=3)", "QSGD(bits=4, norm='linf')",
    "QSGD(bits=8, norm='linf')", "NUQSGD(bits=4)", "TernGrad()", "ORQ(levels=9)", "ECDQ(bits=1)",
    "ECDQ(bits=2)", "ECDQ(bits=3)", "NaturalCompression()", "SignSGD()", "OneBitSGD()",
    "BinGrad()", "QCS(gain=10)", "SparseSGD(density=0.01)", "LinearQuantile(levels=9)",
)  # fmt: skip


def measure(
    methods: Sequence[str], ranks: int, tensors: int, says: Callable[[str], object]
) -> Machine:
    """All constants for schemes (as in Python), a number of ranks and of tensors; ``says`` is told
    what is being measured. RanksError where ranks cannot be started here."""
    says("collectives between two ranks")
    found = collectives(tensors)
    codecs = []
    for method in methods:
        says(method)
        codecs.append(codec(method, ranks))
    return Machine(codecs=tuple(codecs), **found)


def collectives(tensors: int) -> dict[str, Any]:
    """The Machine's fields that tell of collectives and steps."""
    place = Place(RANKS, (available() or ["mpi"])[0], tcp=True)
    (told,) = run_ranks("hvd_adaptive.plan.worker", tensors, place, SECONDS)
    share = min(1.0, len(os.sched_getaffinity(0)) / RANKS)
    # What each of two ranks sends of so many bytes: half of them twice, all, half.
    part = {"allreduce4": 1.0, "allreduce2": 1.0, "allgather": 1.0, "alltoall": 0.5}
    made = {}
    for kind, sent in part.items():
        small, large = told[kind]
        byte = max(0.0, large - small) / (sent * (LARGE - SMALL))
        made[kind] = Collective(base_s=share * small, byte_s=share * byte)
    return {
        "allreduce": {4: made["allreduce4"], 2: made["allreduce2"]},
        "allgather": made["allgather"],
        "alltoall": made["alltoall"],
        "stock_step_s": share * told["stock"],
        "scheme_step_s": share * told["scheme"],
    }


def codec(method: str, ranks: int) -> Codec:
    """A scheme and its second stage over so many ranks."""
    label, name, keywords = parse_method(method)
    scheme = getattr(hvd_adaptive, name)(**keywords)
    flat = gradient(COORDINATES)
    if hasattr(scheme, "fit"):
        scheme.fit(flat[: 20 * scheme.settings.bucket_size])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bits, encode_s, decode_s, error = _timed(scheme, flat)
        second = scheme.second_stage(max(2, ranks))
        again = (32.0, 0.0, 0.0, 0.0)
        if second.bits != 32:
            if hasattr(second.codec, "fit"):
                second.codec.fit(flat[: 20 * scheme.settings.bucket_size])
            again = _timed(second.codec, flat)
    finally:
        torch.set_num_threads(before)
    unbiased = is_unbiased(scheme)
    return Codec(label, bits, encode_s, decode_s, error, *again[:3], unbiased)


def gradient(coordinates: int) -> torch.Tensor:
    """Heavy-tailed numbers (float32)."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(coordinates, generator=generator).mul_(0.5).exp_()
    return torch.randn(coordinates, generator=generator).mul_(scales).mul_(1e-2)


def _timed(scheme: Any, flat: torch.Tensor) -> tuple[float, float, float, float]:
    """Bits a coordinate, seconds of encoding and decoding one, relative squared error."""
    size = flat.numel()
    payload = scheme.encode_flat(flat, size, 1)
    expected, out = read_header(payload), torch.zeros_like(flat)
    received = [payload] * PAYLOADS

    def decode(payloads: list[torch.Tensor]) -> None:
        scheme.decode_into(payloads, expected, 1.0 / len(payloads), out, out[:0])

    decode(received)
    error = float((out - flat).square().sum() / flat.square().sum())
    encode_s = _least(lambda: scheme.encode_flat(flat, size, 1))
    decode_s = _least(lambda: decode(received)) / PAYLOADS
    return 8 * payload.numel() / size, encode_s / size, decode_s / size, error


def _least(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def save(machine: Machine, ranks: int, tensors: int, path: Path) -> None:
    """Keep constants for later plans of as many ranks and tensors."""
    kept = {"ranks": ranks, "tensors": tensors, "machine": asdict(machine)}
    path.write_text(json.dumps(kept, indent=1), encoding="utf-8")


def load(path: Path, ranks: int, tensors: int) -> Machine:
    """Inverse of ``save``; ValueError where it is of others, or no such file at all."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        told, own = (kept["ranks"], kept["tensors"]), dict(kept["machine"])
        reduce = {int(size): Collective(**of_size) for size, of_size in own["allreduce"].items()}
        own |= {"allreduce": reduce, "codecs": tuple(Codec(**c) for c in own["codecs"])}
        own |= {name: Collective(**own[name]) for name in ("allgather", "alltoall")}
        machine = Machine(**own)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: holds no constants of `hvd-adaptive plan`: {error}") from error
    if told != (ranks, tensors):
        raise ValueError(
            f"{path}: was measured for {told[0]} ranks and {told[1]} tensors, not {ranks} and "
            f"{tensors}"
        )
    return machine
