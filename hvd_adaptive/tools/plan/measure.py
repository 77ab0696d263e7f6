"""Measure the constants of the cost model on this machine, in about ten seconds."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
DEFAULTS = (
    "ALQ(bits=3)",
    "ALQ(bits=4)",
    "QSGD(bits=8, norm='linf')",
    "EDEN(bits=1)",
    "EDEN(bits=2)",
    "NaturalCompression()",
)


def measure(
    methods: Sequence[str],
    ranks: int,
    launcher: str,
    show: Callable[[str], object] = lambda line: None,
) -> Machine:
    """Measure all constants.

    Args:
        methods: Schemes, as ``tools.methods`` reads them.
        ranks: Number of ranks, on which the codec of averages depends.
        launcher: "mpi" or "gloo", whose collectives are measured.
        show: Is called with a line of text for each part that is measured.

    Raises:
        RanksError: Ranks cannot be started here.
    """
    found, codecs = collectives(launcher), []
    copies = ", ".join(f"{name} {1e9 * t:.2g}" for name, t in found["copy_s"].items())
    calls = f"{1e6 * found['stock_call_s']:.0f}, with a scheme {1e6 * found['scheme_call_s']:.0f}"
    show(f"two ranks: ns a byte {copies}; us a tensor {calls}")
    for method in methods:
        codecs.append(own := codec(method, ranks))
        times = f"encode {1e9 * own.encode_s:.2g}, decode {1e9 * own.decode_s:.2g} ns a number"
        show(f"{own.label}: {own.bits:.3g} bits, {times}")
    return Machine(**found, codecs=tuple(codecs))


def collectives(launcher: str) -> dict[str, Any]:
    """Return the Machine's fields about collectives and calls.

    Two ranks exchange over TCP on the loopback device, which limits nothing: what is left is the
    time of the processor. Seconds are those of a whole core.
    """
    (found,) = run_ranks(WORKER, None, Ranks(2, launcher, tcp=True), LIMIT)
    share = min(1.0, len(os.sched_getaffinity(0)) / 2)

    def of_byte(small: float, large: float) -> float:
        return share * max(0.0, large - small) / (LARGE - SMALL)

    return {
        "launcher": launcher,
        "copy_s": {name: of_byte(*found[name]) for name in ("allreduce", "allgather")},
        "stock_call_s": share * found["stock"],
        "scheme_call_s": share * found["scheme"],
    }


def codec(method: str, ranks: int) -> Cost:
    """Measure a scheme on one thread, and its codec of averages of ``ranks`` ranks."""
    (read,) = parse([method])
    scheme, flat = read.scheme(), gradient(COORDINATES)
    with _alone():
        second = scheme.parts.default.second_stage(ranks)
        own = _timed(second.codec, "averages", True, flat) if second.bits < 32 else None
        return _timed(scheme.parts.default, read.label, is_unbiased(scheme), flat, own)


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
    """Return the least seconds of calls that are repeated for SECONDS: what others do adds time."""
    end, least = time.perf_counter() + SECONDS, float("inf")
    while True:
        begin = time.perf_counter()
        call()
        now = time.perf_counter()
        least = min(least, now - begin)
        if now > end:
            return least


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Use one thread, and silence warnings about second stages, which are for trainings."""
    logger, threads = logging.getLogger("hvd_adaptive"), torch.get_num_threads()
    level = logger.level
    logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)
