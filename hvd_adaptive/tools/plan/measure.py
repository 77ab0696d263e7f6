"""Measure the constants of the cost model on this machine."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch

from hvd_adaptive.tools.bench import codec as bench
from hvd_adaptive.tools.bench.gradients import heavy_tailed
from hvd_adaptive.tools.launch import Ranks, run_ranks
from hvd_adaptive.tools.methods import parse
from hvd_adaptive.tools.plan.model import Cost, Machine
from hvd_adaptive.tools.plan.worker import LARGE, SMALL, TENSORS
from hvd_adaptive.tools.schemes.catalog import is_unbiased, measured

SIZE, ROUNDS = 1 << 20, 7  # of codecs' gradients, 4 MB: more than a core's cache holds
LIMIT = 60.0  # seconds after which ranks count as hanging


def measure(methods: Sequence[str], ranks: int, launcher: str) -> Machine:
    """Measure all constants, after each scheme's kernels are compiled in a process of its own.

    Args:
        methods: Schemes, as ``tools.methods`` reads them.
        ranks: Number of ranks, on which the codec of averages depends.
        launcher: "mpi" or "gloo", whose collectives are measured.

    Raises:
        RanksError: Ranks cannot be started here.
    """
    compiled = functools.partial(codec, ranks=ranks, size=1 << 17, rounds=1)
    *others, last = methods
    processes = max(1, min(len(others), len(os.sched_getaffinity(0)) - 1))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        waiting = pool.map(compiled, others)
        compiled(last)
        list(waiting)
    machine = collectives(launcher, methods[0])
    return replace(machine, codecs=tuple(codec(method, ranks) for method in methods))


def collectives(launcher: str, method: str) -> Machine:
    """Measure collectives, and calls with a scheme; no codec is known yet.

    Two ranks exchange over TCP on the loopback device, which limits nothing: what is left is the
    time of the processor. Seconds are those of a whole core.
    """
    ranks = Ranks(2, launcher, tcp=True)
    (found,) = run_ranks("hvd_adaptive.tools.plan.worker", method, ranks, LIMIT)
    share = min(1.0, len(os.sched_getaffinity(0)) / 2)
    # Each of two ranks sends as many bytes as there are.
    copy_s = max(0.0, found["large"] - found["small"]) / (4 * (LARGE - SMALL))
    calls = (share * found[name] / TENSORS for name in ("small", "scheme"))
    return Machine(launcher, share * copy_s, *calls)


def codec(method: str, ranks: int, size: int = SIZE, rounds: int = ROUNDS) -> Cost:
    """Measure a scheme on one thread, and its codec of averages of ``ranks`` ranks."""
    (read,) = parse([method])
    scheme, options = read.scheme(), bench.Options(coordinates=size, rounds=rounds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # warnings about second stages are for trainings
    try:
        gradient = heavy_tailed((size,), torch.Generator().manual_seed(0))
        bits, error = measured(scheme, gradient)
        own = bench.measure(scheme.parts.default, method, options)
        costs = own["sealed"] / size, own["decode"] / size
        found = Cost(method, bits, *costs, error, is_unbiased(scheme))
        second = scheme.parts.default.second_stage(ranks)
        if second.bits == 32:
            return found
        own = bench.measure(second.codec, method, options)
        second_s = (own["sealed"] / ranks + own["decode"]) / size
        return replace(found, second_bits=own["bits"], second_s=second_s)
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
