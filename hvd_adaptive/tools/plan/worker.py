"""Measure collectives and codecs, as one of two ranks: ``worker '[METHODS, RANKS]'`` (JSON)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch

from hvd_adaptive.tools.bench import codec as bench
from hvd_adaptive.tools.bench.backward import heavy_tailed
from hvd_adaptive.tools.bench.worker import measured, networks
from hvd_adaptive.tools.launch import send_result
from hvd_adaptive.tools.methods import Method, parse
from hvd_adaptive.tools.plan.model import Cost
from hvd_adaptive.tools.schemes import catalog

RANK = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")  # variables of launchers
TENSORS, SMALL, LARGE = 100, 1_600, 1 << 22  # tensors of a step, and their numbers
STEPS = 5
SIZE, ROUNDS = 1 << 20, 7  # of codecs' gradients, 4 MB: more than a core's cache holds


def main() -> None:
    """Compile kernels on both ranks, measure steps on both, then codecs on the first."""
    texts, ranks = json.loads(sys.argv[1])
    schemes = [method for method in parse(texts) if method.is_scheme]
    # Each kernel is compiled once: the second rank begins at the end, and the first loads what is
    # there. Before Horovod starts, as its thread would take time from compilers.
    is_first = all(os.environ.get(name, "0") == "0" for name in RANK)
    for method in schemes if is_first else schemes[:0:-1] or schemes:
        codec(method, ranks, 1 << 17, 1)

    import horovod.torch as hvd

    hvd.init()
    rank, none = hvd.rank(), hvd.Compression.none
    cases = {"small": (SMALL, none), "large": (LARGE, none), "scheme": (SMALL, schemes[0].scheme())}
    steps = {
        name: measured(hvd, next(networks(TENSORS, size, rank)), compression, STEPS)[0]
        for name, (size, compression) in cases.items()
    }
    hvd.shutdown()
    if rank == 0:  # the other rank ends, and leaves the machine alone
        torch.set_num_threads(1)
        costs = [asdict(codec(method, ranks)) for method in schemes]
        send_result(constants(steps, len(os.sched_getaffinity(0))) | {"codecs": costs})


def constants(steps: Mapping[str, Sequence[float]], cores: int) -> dict[str, float]:
    """Return a whole core's seconds for a byte that a rank sends, and for each kind of call.

    Of each kind of step, the least seconds count. The two ranks share ``cores``.
    """
    share = min(1.0, cores / 2)
    least = {name: share * min(seconds) for name, seconds in steps.items()}
    # Each of two ranks sends as many bytes as there are.
    copy_s = max(0.0, least["large"] - least["small"]) / (4 * (LARGE - SMALL))
    calls = {"stock_call_s": least["small"] / TENSORS, "scheme_call_s": least["scheme"] / TENSORS}
    return {"copy_s": copy_s, **calls}


def codec(method: Method, ranks: int, size: int = SIZE, rounds: int = ROUNDS) -> Cost:
    """Measure a scheme.

    Averages of ``ranks`` ranks are encoded and decoded by a codec of their own (codec/codec.py).
    They count as numbers of the scheme: to compile their kernels would double the time.
    """
    scheme, options = method.scheme(), bench.Options(coordinates=size, rounds=rounds)
    gradient = heavy_tailed((size,), torch.Generator().manual_seed(0))
    bits, error = catalog.measured(scheme, gradient)
    own = bench.measure(scheme.parts.default, method.label, options)
    encode_s, decode_s = own["sealed"] / size, own["decode"] / size
    found = Cost(method.label, bits, encode_s, decode_s, error, catalog.is_unbiased(scheme))
    second = scheme.parts.default.second_stage(ranks)
    if second.bits == 32:
        return found
    sent = 8 * second.codec.body_bytes(size) / size
    return replace(found, second_bits=sent, second_s=encode_s / ranks + decode_s)


if __name__ == "__main__":
    main()
