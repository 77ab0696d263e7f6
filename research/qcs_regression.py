"""Fig. 2 of the QCS paper: SGD on a linear regression, many runs at once."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kept_run import KeptRun
from qcs_gain import MEASURE_STREAM, REGRESSION, relative_error, told_gain

from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.simulate import Records

INPUTS, OUTPUTS, BATCH = 64, 50, 32
RATES = tuple(round(0.01 * i, 2) for i in range(1, 27))
# A run has converged when its excess loss has fallen to this share of the first one.
CONVERGED = 1e-3
# Runs are not followed beyond this multiple of the first loss.
DIVERGED = 1e6
TOLD_EVERY = 10


@dataclass(frozen=True)
class Regression(KeptRun):
    """``repeats`` runs of one method at each rate of RATES. The same inputs for all methods.

    E = W - W* is followed: x ~ N(0, R), R of eigenvalues 1 to 4 in a random basis, targets without
    noise, so the gradient is E X Xᵀ/32, of (50, 64), and the excess loss is tr(E R Eᵀ)/2. Rows of
    the records, for each rate and every tenth step: quartiles of loss / first loss, and the share
    of runs below CONVERGED. Their settings: "limits" and "steps", see ``Paths``.
    """

    reads = Records.read

    method: str
    repeats: int
    steps: int

    def path(self, folder: Path) -> Path:
        """The file of its records."""
        name = self.method.replace(" ", "_").replace("%", "").replace(",", "")
        return folder / "regression" / f"{name}-{self.repeats}r-{self.steps}t.csv"

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self) | {
            "rates": list(RATES),
            "codec": repr(codec_of(self.method)),
            "each_run": True,
        }

    def execute(self, folder: Path) -> None:
        """Make all runs, and write the records."""
        scheme = codec_of(self.method)
        rows: list[dict[str, Any]] = []
        paths = Paths(self.repeats, self.steps)
        for step, ratio in enumerate(losses(scheme, self.repeats, self.steps)):
            paths.follow(step, ratio)
            if step % TOLD_EVERY == 0 or step == self.steps:
                rows += [told(rate, step, ratio[i]) for i, rate in enumerate(RATES)]
        flat = torch.randn(64_000, generator=torch.Generator().manual_seed(2))
        figures = {
            "run": self.settings,
            "gain": told_gain(self.method, scheme),
            "error": 0.0 if scheme is None else relative_error(scheme, flat, 4),
            "limits": paths.limits(),
            "steps": paths.first.tolist(),
        }
        Records(figures, rows).write(self.path(folder))


class Paths:
    """What becomes of each run. Repeats are paired: equal ones of all methods see equal inputs.

    first: (rates, repeats), the first step at which a run is below CONVERGED; one more than all
    steps for those that never are.
    """

    def __init__(self, repeats: int, steps: int) -> None:
        self.first = torch.full((len(RATES), repeats), steps + 1)
        self.converged = torch.zeros(len(RATES), repeats, dtype=torch.bool)

    def follow(self, step: int, ratio: torch.Tensor) -> None:
        """Take the losses at a step into account."""
        self.converged = ratio < CONVERGED
        self.first[self.converged & (self.first > step)] = step

    def limits(self) -> list[float]:
        """For each repeat the largest rate up to which it converged at every rate, else 0."""
        rates = torch.tensor((0.0, *RATES), dtype=torch.float64)
        return rates[self.converged.long().cumprod(dim=0).sum(dim=0)].tolist()


@functools.cache
def codec_of(method: str) -> Any:
    """The method's codec, whose settings are searched for once."""
    return REGRESSION[method]()


def told(rate: float, step: int, ratio: torch.Tensor) -> dict[str, Any]:
    """A row, from the losses of all repeats; inf where they diverged."""
    low, median, high = (float(ratio.quantile(q)) for q in (0.25, 0.5, 0.75))
    share = float((ratio < CONVERGED).double().mean())
    return {
        "rate": rate,
        "step": step,
        "low": low,
        "median": median,
        "high": high,
        "converged": share,
    }


def losses(scheme: Any, repeats: int, steps: int) -> Any:
    """Yields (rates, repeats) float64: loss / first loss before each step and after the last."""
    draw = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(INPUTS, INPUTS, generator=draw)).Q
    values = torch.linspace(1, 4, INPUTS)
    root = basis * values.sqrt()
    runs = len(RATES) * repeats
    rates = torch.tensor(RATES).repeat_interleave(repeats)[:, None, None]
    # Runs of one repeat, at all rates, start from the same weights and see the same inputs.
    error = torch.randn(repeats, OUTPUTS, INPUTS, generator=draw).repeat(len(RATES), 1, 1)
    first = _loss(error, basis, values)
    gone = torch.zeros(runs, dtype=torch.bool)
    yield torch.ones(len(RATES), repeats, dtype=torch.float64)
    for step in range(steps):
        x = (torch.randn(repeats, BATCH, INPUTS, generator=draw) @ root.T).repeat(len(RATES), 1, 1)
        gradient = (error @ x.mT) @ x / BATCH
        if scheme is not None:
            # Buckets divide a run's 3,200 coordinates, so runs share nothing but the key.
            key = stream_key(0, 0, step, MEASURE_STREAM)
            gradient = scheme.parts.default.payloads.roundtrip(gradient.reshape(-1), key).view_as(
                gradient
            )
        error = error - rates * gradient
        ratio = _loss(error, basis, values) / first
        gone |= ~(ratio < DIVERGED)
        error[gone] = 0
        yield ratio.masked_fill(gone, float("inf")).view(len(RATES), repeats)


def _loss(error: torch.Tensor, basis: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return ((error @ basis).double().square() * values).sum((1, 2)) / 2


def widest(records: Records, share: float = 0.5) -> float:
    """Largest rate up to which at least ``share`` of the runs converged at every rate; else 0."""
    last = max(records.column("step"))
    limit = 0.0
    for row in records.rows:
        if row["step"] == last:
            if row["converged"] < share:
                break
            limit = row["rate"]
    return limit


def fastest(records: Records) -> tuple[int | None, float]:
    """(steps, rate) of the rate whose median run is the first to converge; (None, 0) if none."""
    found = [(row["step"], row["rate"]) for row in records.rows if row["median"] < CONVERGED]
    return min(found, default=(None, 0.0))
