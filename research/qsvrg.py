"""QSVRG on logistic regression over sklearn's breast-cancer data, 4 ranks.

    horovodrun -np 4 python research/qsvrg.py      (or mpirun -np 4 ...)
    python research/qsvrg.py --simulate            the same run, to the bit, in one process

f(x) = mean log(1 + exp(-b_j a_j·x)) + ℓ/2 ‖x‖²: 569 rows, 30 features and a constant, scaled to
length 1, so that every term is (1/4 + ℓ)-smooth and f is ℓ-strongly convex. Step and epoch length
are those of the theorem's proof. Prints f(y) - f(x*) beside 0.9^p and the bits a rank sent beside
(F + 2.8 n)(T + 1) + F n, and draws both.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_breast_cancer

from hvd_adaptive.optim import (
    QSVRG,
    EpochBits,
    HorovodRanks,
    LocalRanks,
    Portion,
    theorem_parameters,
)
from hvd_adaptive.tools.output import print_table

MEASURED, BOUND, PACKED = "#1f6fb4", "#d1762b", "#555555"


@dataclass
class Epoch:
    """What an epoch reached, and what it sent (None before the first)."""

    excess: float
    bits: EpochBits | None


class Logistic:
    """The problem; rows are b_j a_j, float64 (569, 31)."""

    def __init__(self, convexity: float) -> None:
        data = load_breast_cancer()
        features = torch.from_numpy(data.data)
        features = (features - features.mean(0)) / features.std(0, unbiased=False)
        rows = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], dim=1)
        rows /= rows.norm(dim=1, keepdim=True)
        self.rows = rows * (2 * torch.from_numpy(data.target) - 1).to(torch.float64)[:, None]
        self.convexity, self.smoothness = convexity, 0.25 + convexity

    def value(self, x: torch.Tensor) -> float:
        """f(x)."""
        losses = torch.nn.functional.softplus(-(self.rows @ x))
        return float(losses.mean() + self.convexity / 2 * x @ x)

    def portion(self, rank: int, size: int) -> Portion:
        """Every ``size``-th row is a rank's."""
        own = self.rows[rank::size]

        def gradient(x: torch.Tensor, index: int | None) -> torch.Tensor:
            rows = own if index is None else own[index : index + 1]
            return self.convexity * x - rows.T @ torch.sigmoid(-(rows @ x)) / len(rows)

        return Portion(len(own), gradient)

    def minimum(self) -> torch.Tensor:
        """x* by Newton's method."""
        whole = self.portion(0, 1).gradient
        x = torch.zeros(self.rows.shape[1], dtype=torch.float64)
        for _ in range(30):
            p = torch.sigmoid(self.rows @ x)
            hessian = (self.rows * (p * (1 - p))[:, None]).T @ self.rows / len(self.rows)
            hessian += self.convexity * torch.eye(len(x), dtype=torch.float64)
            x = x - torch.linalg.solve(hessian, whole(x, None))
        return x


def main() -> None:
    """Run the epochs; the first rank reports."""
    args = arguments()
    torch.set_num_threads(1)
    problem = Logistic(args.convexity)
    ranks = LocalRanks(args.ranks) if args.simulate else horovod_ranks()
    lr, iterations = theorem_parameters(problem.smoothness, problem.convexity)
    run = QSVRG(
        torch.zeros(problem.rows.shape[1], dtype=torch.float64),
        [problem.portion(rank, ranks.size) for rank in ranks.own],
        lr=lr,
        iterations=iterations,
        seed=args.seed,
        ranks=ranks,
    )
    first = 0 in ranks.own
    least = problem.value(problem.minimum())
    epochs = [Epoch(problem.value(run.point) - least, None)]
    for _ in track(range(args.epochs), "epochs", disable=not first, transient=True):
        run.epoch()
        epochs.append(Epoch(problem.value(run.point) - least, run.bits))
    if first:
        report(run, epochs)
        draw(epochs, args.png)
        print(f"wrote {args.png}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="QSVRG on logistic regression")
    parser.add_argument("--simulate", action="store_true", help="all ranks in this process")
    parser.add_argument("--ranks", type=int, default=4, help="of --simulate (default 4)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--convexity", type=float, default=0.05, help="ℓ, the weight of ‖x‖²/2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, default=Path("qsvrg.png"))
    return parser.parse_args()


def horovod_ranks() -> HorovodRanks:
    import horovod.torch as hvd

    hvd.init()
    return HorovodRanks()


def report(run: QSVRG, epochs: list[Epoch]) -> None:
    """The table, and the point's bits for comparing runs."""
    n, bits = len(run.point), epochs[-1].bits
    title = (
        f"QSVRG, {run.ranks.size} ranks, n = {n}, s = {run.intervals}, η = {run.lr:.4g}, "
        f"T = {run.iterations}"
    )
    rows = []
    for p, epoch in enumerate(epochs):
        sent = ("", "") if epoch.bits is None else (epoch.bits.coded, round(epoch.bits.theorem))
        numbers = (f"{value:,}" if value != "" else "" for value in sent)
        rows.append((str(p), f"{epoch.excess:.3e}", f"{0.9**p * epochs[0].excess:.3e}", *numbers))
    headings = ("epoch", "f(y) - f(x*)", "0.9^p bound", "bits, Elias", "bits, bound")
    print_table(headings, rows, texts=0, title=title)
    console = Console(width=100)
    per_update = (bits.coded - 64 * n) / run.iterations - 32
    console.print(
        f"An update's level numbers took {per_update / n:.2f} bits a coordinate by Elias's code "
        f"(the paper: 2.8, o(1) terms left out); {bits.payloads:,} bits an epoch travelled: at "
        f"n = {n} headers and padding outweigh the codes.",
        highlight=False,
    )
    console.print(f"point {run.point.numpy().tobytes().hex()[:16]}", highlight=False)


def draw(epochs: list[Epoch], path: Path) -> None:
    """Error and bits against epochs, as a PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    places = range(len(epochs))
    # Near the end f(y) - f(x*) drowns in the rounding of f: what is left of it is not drawn.
    excess = [epoch.excess if epoch.excess > 1e-15 else float("nan") for epoch in epochs]
    left.semilogy(places, excess, "o-", color=MEASURED, label="QSVRG")
    bound = [epochs[0].excess * 0.9**p for p in places]
    left.semilogy(places, bound, "--", color=BOUND, label="0.9^p (Theorem 3.6)")
    left.set_ylabel("f(y) - f(x*)")
    sent = [epoch.bits for epoch in epochs[1:]]
    right.plot(places[1:], [b.coded / 1e3 for b in sent], "o-", color=MEASURED, label="Elias code")
    right.plot(
        places[1:],
        [b.theorem / 1e3 for b in sent],
        "--",
        color=BOUND,
        label="(F + 2.8 n)(T + 1) + F n",
    )
    right.plot(
        places[1:],
        [b.payloads / 1e3 for b in sent],
        ":",
        color=PACKED,
        label="payloads, headers included",
    )
    right.set_ylabel("kbit sent by a rank in an epoch")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.grid(True, alpha=0.25)
        axes.legend()
    figure.savefig(path, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    main()
