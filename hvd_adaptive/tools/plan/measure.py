"""Measure the constants of the cost model on this machine, in about ten seconds."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.tools.bench.gradients import heavy_tailed
from hvd_adaptive.tools.launch import Ranks, run_ranks
from hvd_adaptive.tools.methods import parse
from hvd_adaptive.tools.plan.model import Cost, Machine
from hvd_adaptive.tools.plan.worker import LARGE, SMALL
from hvd_adaptive.tools.schemes.catalog import is_unbiased

COORDINATES = 1 << 21  # 8 MB, more than a core's cache holds
SECONDS = 0.1  # of each codec's encoding, and of its decoding
LIMIT = 60.0  # seconds after which ranks count as hanging
WORKER = "hvd_adaptive.tools.plan.worker"


def measure(
    methods: Sequence[str],
    ranks: int,
    launcher: str,
    show: Callable[[Machine], object] = lambda machine: None,
) -> Machine:
    """Measure all constants.

    Args:
        methods: Schemes, as ``tools.methods`` reads them.
        ranks: Number of ranks, on which the codec of averages depends.
        launcher: "mpi" or "gloo", whose collectives are measured.
        show: Is called after each part, with what is known: first with no codec.

    Raises:
        RanksError: Ranks cannot be started here.
    """
    show(machine := collectives(launcher))
    for method in methods:
        machine = replace(machine, codecs=(*machine.codecs, codec(method, ranks)))
        show(machine)
    return machine


def collectives(launcher: str) -> Machine:
    """Measure collectives and calls; no codec is known yet.

    Two ranks exchange over TCP on the loopback device, which limits nothing: what is left is the
    time of the processor. Seconds are those of a whole core.
    """
    (found,) = run_ranks(WORKER, None, Ranks(2, launcher, tcp=True), LIMIT)
    share = min(1.0, len(os.sched_getaffinity(0)) / 2)
    copy_s = {
        name: share * max(0.0, found[name][1] - found[name][0]) / (LARGE - SMALL)
        for name in ("allreduce", "allgather")
    }
    return Machine(launcher, copy_s, share * found["stock"], share * found["scheme"], ())


def codec(method: str, ranks: int) -> Cost:
    """Measure a scheme on one thread, and its codec of averages of ``ranks`` ranks."""
    (read,) = parse([method])
    scheme, flat = read.scheme(), gradient(COORDINATES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # warnings about second stages are for trainings
    try:
        second = scheme.parts.default.second_stage(ranks)
        own = _timed(second.codec, "averages", True, flat) if second.bits < 32 else None
        return _timed(scheme.parts.default, read.label, is_unbiased(scheme), flat, own)
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)


def gradient(coordinates: int) -> torch.Tensor:
    """Return the gradient that codecs are measured with (float32)."""
    return heavy_tailed((coordinates,), torch.Generator().manual_seed(0))


def _timed(
    codec: Any, label: str, unbiased: bool, flat: torch.Tensor, second: Cost | None = None
) -> Cost:
    size = flat.numel()
    if hasattr(codec, "fit"):
        codec.fit(flat[: 20 * codec.settings.bucket_size])
    payload = codec.payloads.encode(flat, size, 1).bytes
    expected, out = read_header(payload), torch.zeros_like(flat)

    def decode() -> None:
        codec.payloads.sum_into([payload], expected, 1.0, out, out[:0])

    decode()
    error = float((out - flat).square().sum() / flat.square().sum())
    encode_s = _least(lambda: codec.payloads.encode(flat, size, 1)) / size
    bits = 8 * payload.numel() / size
    return Cost(label, bits, encode_s, _least(decode) / size, error, unbiased, second)


def _least(call: Callable[[], object]) -> float:
    """Return the least seconds of a call, repeated for SECONDS: other programs only add time."""
    end, least = time.perf_counter() + SECONDS, float("inf")
    while (begin := time.perf_counter()) < end or least == float("inf"):
        call()
        least = min(least, time.perf_counter() - begin)
    return least
