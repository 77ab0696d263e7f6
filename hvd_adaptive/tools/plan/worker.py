"""Measure collectives and codecs, as one of two ranks: ``worker '[METHODS, RANKS]'`` (JSON)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from hvd_adaptive.tools import launch
from hvd_adaptive.tools.bench import codec as bench
from hvd_adaptive.tools.bench.backward import heavy_tailed
from hvd_adaptive.tools.bench.worker import measured, networks
from hvd_adaptive.tools.methods import Method, parse
from hvd_adaptive.tools.plan.model import Cost, Machine
from hvd_adaptive.tools.schemes import catalog

STEPS, TENSORS, SMALL, LARGE = 5, 100, 1_600, 1 << 22  # of a step, and their numbers
SIZE, ROUNDS = 1 << 20, 7  # of codecs' gradients, 4 MB: more than a core's cache holds


def constants(texts: Sequence[str], ranks: int, launcher: str) -> Machine:
    """Measure methods, as ``tools.methods`` reads them, for a job of ``ranks`` ranks.

    Two ranks on this machine exchange over TCP on the loopback device, which limits nothing: what
    is left is the time of the processor. They may take a minute, and one more for each method.
    Raises RanksError.
    """
    two, limit = launch.Ranks(2, launcher, tcp=True), 60.0 * (1 + len(texts))
    words = ["-m", "hvd_adaptive.tools.plan.worker", json.dumps([list(texts), ranks])]
    (found,) = launch.run_ranks(words, two, limit)
    codecs = tuple(Cost(**one) for one in found.pop("codecs"))
    return Machine(launcher, codecs=codecs, **found)


def main() -> None:
    """Measure steps on both ranks, then codecs on the first."""
    texts, ranks = json.loads(sys.argv[1])
    schemes = [method for method in parse(texts) if method.is_scheme]

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
        found = of_steps(steps, len(os.sched_getaffinity(0)))
        launch.send_result(found | {"codecs": costs})


def of_steps(steps: Mapping[str, Sequence[float]], cores: int) -> dict[str, float]:
    """Return a whole core's seconds for a byte that a rank sends, and for each kind of call.

    Of each kind of step, the least seconds count. The two ranks share ``cores``.
    """
    share, kinds = min(1.0, cores / 2), ("small", "large", "scheme")
    small, large, scheme = (share * min(steps[kind]) for kind in kinds)
    # Each of two ranks sends as many bytes as there are.
    copy_s = max(0.0, large - small) / (4 * (LARGE - SMALL))
    return {"copy_s": copy_s, "stock_call_s": small / TENSORS, "scheme_call_s": scheme / TENSORS}


def codec(method: Method, ranks: int, size: int = SIZE, rounds: int = ROUNDS) -> Cost:
    """Measure a scheme, and the bits of averages of ``ranks`` ranks."""
    scheme, options = method.scheme(), bench.Options(coordinates=size, rounds=rounds)
    gradient = heavy_tailed((size,), torch.Generator().manual_seed(0))
    bits, error = catalog.measured(scheme, gradient)
    own = bench.measure(scheme.parts.default, method.label, options)
    seconds = own["sealed"] / size, own["decode"] / size
    second_bits = 8 * scheme.parts.default.second_stage(ranks).length(size, 0, torch.float32) / size
    facts = catalog.is_unbiased(scheme), second_bits, scheme.settings.min_numel
    return Cost(method.label, bits, *seconds, error, *facts)


if __name__ == "__main__":
    main()
