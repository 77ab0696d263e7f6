"""Figs 3 and 4 of the QCS paper: variance against gain, relative error while a LeNet trains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compare_runs import cached_data
from from_examples import LeNet
from kept_run import KeptRun
from qcs_gain import body_gain, qsgd_gain

from hvd_adaptive import QCS, QSGD, SparseSGD
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.kernels.random import Use, stream_key
from hvd_adaptive.simulate import Minibatches, Records, evaluate

ORDERS = (64, 512, 8192)
GAINS = (4, 6, 8, 12, 16, 21, 32, 64, 125, 250, 500, 1000)
INTERVALS = (1, 2, 4, 8, 16, 64)
DENSITIES = (0.8, 0.4, 0.28, 0.24, 0.2, 0.16, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
QSGD_BUCKET = 512
BATCH, RATE = 128, 0.05
# Of validation, to tell accuracy from while training.
TOLD = 1000


@dataclass(frozen=True)
class Scale(KeptRun):
    """Fig. 3: rows (method, order, bound, and for both gradients gain and error), from one seed's
    gradients and one draw of the codec.

    bound is None where there is none. Sparse SGD's gain depends on the gradient.
    """

    reads = Records.read

    seed: int
    steps: int
    gains: tuple[int, ...] = GAINS
    intervals: tuple[int, ...] = INTERVALS

    def path(self, folder: Path) -> Path:
        return folder / f"variance-{self.steps}t-{self.seed}.csv"

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "steps": self.steps,
            "orders": list(ORDERS),
            "gains": list(self.gains),
            "intervals": list(self.intervals),
            "densities": list(DENSITIES),
        }

    def execute(self, folder: Path) -> None:
        """Measure every codec on one Gaussian vector and one gradient."""
        gaussian = torch.randn(65_536, generator=torch.Generator().manual_seed(3 + self.seed))
        *_, (_, lenet, _) = trajectory(self.steps, self.seed, 0)
        rows = []
        for name, order, gain, bound, scheme in scaled(self.gains, self.intervals):
            row = {"method": name, "order": order, "bound": bound}
            for source, flat in (("gaussian", gaussian), ("lenet", lenet)):
                row[f"gain_{source}"] = body_gain(scheme, flat) if gain is None else gain
                coded = scheme.parts.default.payloads.roundtrip(
                    flat, stream_key(self.seed, 0, 0, Use.MEASURE)
                )
                row[source] = float((coded - flat).square().sum() / flat.square().sum())
            rows.append(row)
        Records({"run": self.settings}, rows).write(self.path(folder))


def scaled(
    gains: Sequence[int], intervals: Sequence[int]
) -> list[tuple[str, int, float | None, float | None, GradientCompressor]]:
    """(method, bucket size, gain, bound on the variance, codec) of all points of Fig. 3."""
    points = []
    for order in ORDERS:
        for gain in gains:
            if gain <= 32 * order / 33:
                scheme = QCS(gain=gain, bucket_size=order, keep_zeros=False)
                points.append(
                    (
                        "QCS",
                        order,
                        scheme.parts.default.compression_gain,
                        scheme.parts.default.gamma,
                        scheme,
                    )
                )
    d = QSGD_BUCKET
    for s in intervals:
        bound = min(d / s**2, d**0.5 / s)  # Lemma 3.1 of Alistarh et al. 2017
        scheme = QSGD(intervals=s, bucket_size=d)
        points.append(("QSGD", d, qsgd_gain(d, s), bound, scheme))
        scheme = QSGD(intervals=s, norm="linf", bucket_size=d)
        points.append(("QSGD L∞", d, qsgd_gain(d, s), None, scheme))
    for density in DENSITIES:
        scheme = SparseSGD(density=density)
        points.append(("Sparse SGD", 8192, None, None, scheme))
    return points


FIG4: dict[str, dict[str, Callable[[], GradientCompressor]]] = {
    f"gain {qsgd_gain(512, q):.1f}: Q = s = {q}": {
        "QCS": functools.partial(
            QCS, measurements=512, quantizer_range=q, bucket_size=512, keep_zeros=False
        ),
        "QSGD": functools.partial(QSGD, intervals=q, bucket_size=512),
        "QSGD L∞": functools.partial(QSGD, intervals=q, norm="linf", bucket_size=512),
    }
    for q in (1, 2)
}


@dataclass(frozen=True)
class Trajectory(KeptRun):
    """Fig. 4: each codec's error on the gradients of one float32 training of a LeNet."""

    reads = Records.read

    seed: int
    steps: int

    def path(self, folder: Path) -> Path:
        return folder / f"trajectory-{self.steps}t-{self.seed}.csv"

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self) | {"batch": BATCH, "rate": RATE, "codecs": list(FIG4)}

    def execute(self, folder: Path) -> None:
        """Rows (step, accuracy, panel, method, error), every other step."""
        codecs = {
            (panel, name): make()
            for panel, methods in FIG4.items()
            for name, make in methods.items()
        }
        rows = []
        for step, flat, accuracy in trajectory(self.steps, self.seed, 2):
            if accuracy is None:
                continue
            for (panel, name), scheme in codecs.items():
                coded = scheme.parts.default.payloads.roundtrip(
                    flat, stream_key(self.seed, 0, step, 0)
                )
                error = float((coded - flat).square().sum() / flat.square().sum())
                rows.append(
                    {
                        "step": step,
                        "accuracy": accuracy,
                        "panel": panel,
                        "method": name,
                        "error": error,
                    }
                )
        Records({"run": self.settings}, rows).write(self.path(folder))


def trajectory(steps: int, seed: int, every: int) -> Any:
    """Yields (step, gradient, accuracy in % every ``every`` steps or None) of float32 SGD."""
    (inputs, targets), validation = cached_data("lenet")
    torch.manual_seed(seed)
    model = LeNet()
    batches = Minibatches(inputs, targets, BATCH, 1, seed)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(steps):
        accuracy = None
        if every and step % every == 0:
            accuracy = 100 * evaluate(model, *(part[:TOLD] for part in validation))[1]
        x, y = batches(0, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        yield step, torch.cat([p.grad.flatten() for p in model.parameters()]), accuracy
        optimizer.step()
