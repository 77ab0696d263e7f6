"""The ORQ paper's methods on the gradients of one full-precision training: Fig. 1, the errors of
all methods on the same gradients, what ORQ's coordinate descent saves, and bytes sent."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compare_runs import TASKS, cached_data, schedule
from exact_error import rounding_error
from kept_run import KeptRun
from orq_methods import BUCKET, METHODS, make
from orq_training import TASK, batch_size
from qcs_gain import MEASURE_STREAM

from hvd_adaptive import ORQ
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.simulate import Minibatches, Records

LAYER, BINS, DRAWS = "conv2.weight", 81, 50
# How often in a training the gradients are looked at.
POINTS = 10
SOLVER_LEVELS = (3, 5, 9, 17)
SOLVER_BUCKETS = (512, 2048, 8192, 32768)
Gradient = dict[str, torch.Tensor]


def trajectory(seed: int, steps: int) -> Iterator[tuple[int, Gradient]]:
    """Yields (step, gradients by name) of a training in full precision, now and then."""
    (inputs, targets), _ = cached_data(TASK)
    torch.manual_seed(seed)
    model = TASKS[TASK].model()
    batches = Minibatches(inputs, targets, batch_size(), 1, seed)
    optimizer = TASKS[TASK].optimizer(model.parameters())
    scheduler = schedule(optimizer, steps)
    for step in range(steps):
        x, y = batches(0, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if (step + 1) % max(1, steps // POINTS) == 0:
            yield step, {name: p.grad.flatten() for name, p in model.named_parameters()}
        optimizer.step()
        scheduler.step()


@dataclass(frozen=True)
class Job(KeptRun):
    """Measurements on one trajectory, in a file."""

    reads = Records.read

    seed: int
    steps: int

    def path(self, folder: Path) -> Path:
        """The file of its records."""
        return folder / f"{type(self).__name__.lower()}-{self.steps}t-{self.seed}.csv"

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self) | {"batch": batch_size(), "rate": TASKS[TASK].rate, "points": POINTS}


class Histograms(Job):
    """Fig. 1: one layer's gradient, as one bucket, before and after each method.

    Rows (method, value, count): bins of equal width for method "FP", the levels for the others.
    The settings' "measured" has for each method: error, the mean of DRAWS; away, the share of
    coordinates that are not at the method's most frequent level; entropy, of the use of the levels,
    in bits; distance, the Wasserstein distance between the distributions of values before and
    after, in deviations.
    """

    def execute(self, folder: Path) -> None:
        """Measure half way through a training."""
        found = [gradients for _, gradients in trajectory(self.seed, self.steps)]
        flat = found[(len(found) - 1) // 2][LAYER]
        counts, edges = torch.histogram(flat, BINS)
        rows = [
            {"method": "FP", "value": float(edges[i] + edges[i + 1]) / 2, "count": int(count)}
            for i, count in enumerate(counts)
        ]
        measured = {}
        for method in METHODS:
            draws = [roundtrip(make(method, flat.numel()), flat, draw) for draw in range(DRAWS)]
            coded = draws[0]
            values, uses = coded.unique(return_counts=True)
            rows += [
                {"method": method, "value": float(v), "count": int(n)}
                for v, n in zip(values, uses, strict=True)
            ]
            share = uses.double() / flat.numel()
            gap = (coded.sort().values - flat.sort().values).abs().mean()
            measured[method] = {
                "error": statistics.fmean(relative_error(draw, flat) for draw in draws),
                "away": 1 - float(share.max()),
                "entropy": -float((share * share.log2()).sum()),
                "distance": float(gap / flat.std()),
            }
        told = {
            "run": self.settings,
            "coordinates": flat.numel(),
            "measured": measured,
            "largest": float(flat.abs().max() / flat.std()),
        }
        Records(told, rows).write(self.path(folder))


class Errors(Job):
    """Rows (step, method, error) at the paper's bucket size, all methods on the same gradients."""

    def execute(self, folder: Path) -> None:
        """Measure now and then."""
        rows = []
        for step, gradients in trajectory(self.seed, self.steps):
            flat = torch.cat(list(gradients.values()))
            for method in METHODS:
                coded = roundtrip(make(method, BUCKET), flat, step)
                error = relative_error(coded, flat)
                rows.append({"step": step, "method": method, "error": error})
        Records({"run": self.settings}, rows).write(self.path(folder))


class Solvers(Job):
    """Rows (step, levels, bucket_size, greedy, descent): expected errors of ORQ's two solvers."""

    def execute(self, folder: Path) -> None:
        """Measure now and then."""
        rows = []
        for step, gradients in trajectory(self.seed, self.steps):
            flat = torch.cat(list(gradients.values()))
            for levels in SOLVER_LEVELS:
                for size in SOLVER_BUCKETS:
                    orq = functools.partial(ORQ, levels=levels, bucket_size=size, keep_zeros=False)
                    greedy = rounding_error(orq(), flat)
                    descent = rounding_error(orq(solver="coordinate_descent"), flat)
                    rows.append(
                        {
                            "step": step,
                            "levels": levels,
                            "bucket_size": size,
                            "greedy": greedy,
                            "descent": descent,
                        }
                    )
        Records({"run": self.settings}, rows).write(self.path(folder))


def roundtrip(scheme: GradientCompressor, flat: torch.Tensor, step: int) -> torch.Tensor:
    """``flat`` after encoding and decoding."""
    return scheme.parts.default.payloads.roundtrip(flat, stream_key(0, 0, step, MEASURE_STREAM))


def relative_error(coded: torch.Tensor, flat: torch.Tensor) -> float:
    """‖Q(G) - G‖² / ‖G‖²."""
    exact = flat.double()
    return float((coded.double() - exact).square().sum() / exact.square().sum())


def compression_ratio(scheme: GradientCompressor, coordinates: int) -> float:
    """float32's bytes over those of a real payload: header, levels and codes."""
    flat = torch.randn(coordinates, generator=torch.Generator().manual_seed(1))
    return 4 * coordinates / scheme.encode(flat).numel()


def ideal_ratio(levels: int) -> float:
    """The paper's, which counts the codes' information alone."""
    return 32 / math.log2(levels)
