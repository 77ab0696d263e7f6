"""The objective during one fit of a level table, by several solvers and starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_tasks import TASKS, cached_data
from kept_run import KeptRun

from hvd_adaptive import simulate
from hvd_adaptive.adapt.statistics import HistogramStatistic
from hvd_adaptive.levels import (
    STARTS,
    Histogram,
    coordinate_descent,
    expected_variance,
    exponential_magnitudes,
    gradient_descent,
)
from hvd_adaptive.levels.fit import multiplier_gradient


@dataclass(frozen=True)
class Fits(KeptRun):
    """Fits to the gradient of one seed's training. Rows (objective, fit, sweep, value):
    the objective after each sweep or step of each solver from each start."""

    reads = simulate.Records.read

    task: str
    bits: int
    bucket_size: int
    seed: int

    def path(self, folder: Path) -> Path:
        """The file of its records."""
        return folder / self.task / f"fits-{self.bits}b-{self.bucket_size}d-{self.seed}.csv"

    def execute(self, folder: Path) -> None:
        """Fit, and write the records."""
        histories = fit_histories(self.task, self.bits, self.bucket_size, self.seed)
        rows: list[dict[str, Any]] = [
            {"objective": objective, "fit": fit, "sweep": sweep, "value": float(value)}
            for objective, fits in histories.items()
            for fit, values in fits.items()
            for sweep, value in enumerate(values)
        ]
        simulate.Records({"run": self.settings}, rows).write(self.path(folder))


def histories_of(records: simulate.Records) -> dict[str, dict[str, np.ndarray]]:
    """{objective: {fit: values by sweep}}."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in records.rows:
        found.setdefault(row["objective"], {}).setdefault(row["fit"], []).append(row["value"])
    return {
        objective: {fit: np.array(values) for fit, values in fits.items()}
        for objective, fits in found.items()
    }


def fit_histories(
    task: str, bits: int, bucket_size: int, seed: int
) -> dict[str, dict[str, np.ndarray]]:
    """The objective during one fit, on a gradient of a model in the middle of its training."""
    torch.manual_seed(seed)
    chosen, train = TASKS[task], cached_data(task)[0]
    model = chosen.model()
    simulate.train(
        model,
        train,
        optimizer=chosen.optimizer,
        workers=1,
        steps=40,
        batch_size=chosen.batch_size,
        seed=seed,
        progress=False,
    )
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(train[0][:64]), train[1][:64]).backward()
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    buckets = flat[: len(flat) // bucket_size * bucket_size].split(bucket_size) or (flat,)
    buckets = [bucket for bucket in buckets if bucket.any()]
    statistic = HistogramStatistic()
    collected = statistic.collect(buckets, [float(bucket.norm()) for bucket in buckets])
    titles = {
        False: "expected variance (ALQ, ALQG, AMQ)",
        True: "expected normalized variance (-N)",
    }
    return {
        title: _histories(statistic.pool([collected], normalized), 1 << (bits - 1))
        for normalized, title in titles.items()
    }


def _histories(law: Histogram, count: int) -> dict[str, np.ndarray]:
    starts = ("uniform", "exponential", "quantile")
    solvers = {"coordinate descent": coordinate_descent, "gradient descent": gradient_descent}
    histories = {
        f"{name}, {start} start": solve(STARTS[start](law, count, True), law, True).history
        for name, solve in solvers.items()
        for start in starts
    }
    return histories | {f"AMQ, p = {p} at first": _amq(law, count, p) for p in (0.2, 0.5, 0.9)}


def _amq(law: Histogram, count: int, p: float, steps: int = 60) -> np.ndarray:
    """Psi along descent on the multiplier (ALQ Eq. 8), halving steps that would climb."""

    def objective(p: float) -> float:
        return float(expected_variance(exponential_magnitudes(count, p, True), law, True))

    history, size = [objective(p)], 0.1
    for _ in range(steps):
        trial = p - size * p * (1 - p) * np.sign(multiplier_gradient(p, law, count))
        value = objective(trial)
        if value < history[-1]:
            p, size = trial, 1.2 * size
        else:
            size /= 2
        history.append(min(value, history[-1]))
    return np.array(history)
