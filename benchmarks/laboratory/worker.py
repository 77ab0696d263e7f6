"""Time the methods of a plan in turn on each host, and write the figures.

``python -m laboratory.worker PLAN``; the plan is a JSON object with backend, ranks_per_host, model,
trained, methods (labels), steps, warmup, backward_s and folder, where rank.py writes the figures.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from hvd_adaptive.tools.bench.backward import FakeNetwork
from laboratory.exchangers import Exchanger, Network, alone, make_exchanger
from laboratory.gradients import VARIANTS, Drawn, exact_mean
from laboratory.hosts import INTERFACE
from laboratory.methods import Method
from laboratory.rank import Rank, main
from laboratory.shapes import read_shapes
from laboratory.sharded import ShardedNetwork

COUNTERS = Path(f"/sys/class/net/{INTERFACE}/statistics")
REPORTED = ("wire_bytes", "payload_bytes", "encode_s", "exchange_s", "decode_s")
BACKWARD_STEPS = 5


class Worker(Rank):
    """Time exchanges of a model's gradients."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        self.shapes = read_shapes(plan["model"])
        sizes = [shape for _, shape in self.shapes]
        self.source = self._trained() if plan["trained"] else Drawn(sizes)
        self.variants = [self.source.gradients(self.ranks.rank, v) for v in range(VARIANTS)]
        self.memory = torch.zeros(sum(torch.Size(shape).numel() for shape in sizes))

    def _trained(self) -> Any:
        from laboratory.trained import Trained

        file = Path(self.plan["folder"]) / "trained.pt"
        return Trained(file, self.ranks.rank == 0, self.ranks.barrier)

    def run(self) -> None:
        """Time the backward pass alone, then each method."""
        exchanger = alone(self._network())
        self.ranks.barrier()
        figures = [self._timed_step(exchanger, step) for step in range(BACKWARD_STEPS + 1)]
        self.found["backward_s"] = [figure["seconds"] for figure in figures[1:]]
        super().run()

    def _network(self) -> Network:
        make = ShardedNetwork if self.plan["backend"] == "fsdp" else FakeNetwork
        return make(self.shapes, self.memory, self.variants, self.plan["backward_s"])

    def measure(self, method: Method) -> dict[str, Any]:
        """Return the figures of timed steps."""
        network = self._network()
        exchanger = make_exchanger(self.ranks, method, network)
        for step in range(self.plan["warmup"] if method.fits else min(2, self.plan["warmup"])):
            self._timed_step(exchanger, step)
        self.ranks.barrier()
        before, figures, reports = _traffic(), [], []
        for step in range(self.plan["steps"]):
            figures.append(self._timed_step(exchanger, step))
            reports.append(exchanger.report())
        self.ranks.barrier()  # what was sent has arrived
        after = _traffic()
        self._timed_step(exchanger, 0)
        found = self._quality(network)
        exchanger.optimizer.zero_grad()
        exchanger.close()
        found |= {key: (after[key] - before[key]) / len(figures) for key in before}
        found |= {k: statistics.fmean(f[k] for f in figures) for k in ("cpu_s", "machine_cpu_s")}
        report = {k: statistics.fmean(r[k] for r in reports) for k in REPORTED if reports[0]}
        return found | {"seconds": [f["seconds"] for f in figures], "report": report}

    def _timed_step(self, exchanger: Exchanger, step: int) -> dict[str, float]:
        """Return the figures of one exchange, which the ranks begin together."""
        exchanger.fill(step % VARIANTS)
        self.ranks.barrier()
        before, begin = _processor(), time.perf_counter()
        exchanger.step()
        seconds, after = time.perf_counter() - begin, _processor()
        return {"seconds": seconds} | {key: after[key] - before[key] for key in before}

    def _quality(self, network: Network) -> dict[str, Any]:
        """Return a checksum of the averaged gradient, and on rank 0 its relative squared error."""
        crc, error, norm = 0, 0.0, 0.0
        averages = [average.contiguous() for average in network.averages()]
        for average in averages:
            crc = zlib.crc32(average.numpy().data, crc)
        if self.ranks.rank == 0:
            means = exact_mean(self.source, self.ranks.size, 0)
            for average, exact in zip(averages, means, strict=True):
                error += float((average - exact).square().sum())
                norm += float(exact.square().sum())
        self.ranks.barrier()
        return {"crc": crc} | ({"relative_error": error / norm} if norm else {})


def _traffic() -> dict[str, float]:
    """Return the bytes through this host's interface so far."""
    return {
        "sent_bytes": float((COUNTERS / "tx_bytes").read_text()),
        "received_bytes": float((COUNTERS / "rx_bytes").read_text()),
    }


def _processor() -> dict[str, float]:
    """Return the processor's seconds so far, of this rank, and of the whole machine."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[1:8])
    ticks = os.sysconf("SC_CLK_TCK")
    return {
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "machine_cpu_s": (user + nice + system + irq + softirq) / ticks,
    }


if __name__ == "__main__":
    main(Worker)
