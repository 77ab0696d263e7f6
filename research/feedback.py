"""Error feedback of coarse schemes: none, 1.0 and "auto", in paired trainings on 8x8 digits.

python research/feedback.py                            # the table of docs/choosing.md
python research/feedback.py --rate 0.3 --seeds 3

A multilayer perceptron (64-128-10) is trained by plain SGD. The ranks are simulated in this
process. Payloads are exchanged by allgather, so nothing is quantised twice. Runs of one seed have
the same weights at the start and the same minibatches. A run ends early if its residuals outgrow
the gradients.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compare_tables import markdown
from compare_tasks import digits
from torch import nn
from tqdm import tqdm
from verdicts import Interval

from hvd_adaptive import ALQ, BinGrad, OneBitSGD, ResidualError, SignSGD, SparseSGD, simulate
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.tools.output import script_parser

SCHEMES: dict[str, Callable[..., GradientCompressor]] = {
    'ALQ(bits=2, norm="l2", symmetric=True)': functools.partial(
        ALQ, bits=2, norm="l2", symmetric=True
    ),
    "BinGrad()": BinGrad,
    'BinGrad(variant="biased")': functools.partial(BinGrad, variant="biased"),
    "SignSGD()": SignSGD,
    "OneBitSGD()": OneBitSGD,
    "SparseSGD(density=0.1)": functools.partial(SparseSGD, density=0.1),
    "SparseSGD(density=0.01)": functools.partial(SparseSGD, density=0.01),
}
FEEDBACK = (None, 1.0, "auto")
HEADINGS = ("scheme", *(f"{what}, `{beta!r}`" for what in ("loss", "deficit") for beta in FEEDBACK))


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = script_parser(__doc__)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (0.1)")
    parser.add_argument("--seeds", type=int, default=10, help="paired runs of each (10)")
    parser.add_argument("--steps", type=int, default=300, help="of a run (300)")
    parser.add_argument("--workers", type=int, default=4, help="simulated ranks (4)")
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank (16)")
    parser.add_argument("--bucket-size", type=int, default=8192, help="of all schemes (8192)")
    return parser


@dataclass(frozen=True)
class Outcome:
    """loss: mean training loss of the last tenth of the steps. accuracy: in percent, at the end.
    Both are NaN if residuals have outgrown the gradients."""

    loss: float = math.nan
    accuracy: float = math.nan


def trained(
    args: argparse.Namespace,
    seed: int,
    make: Callable[[], GradientCompressor] | None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Outcome:
    """One run; ``make`` is None for float32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    training, validation = digits()
    try:
        rows = simulate.train(
            model,
            training,
            optimizer=lambda parameters: torch.optim.SGD(parameters, args.rate),
            compressor=None if make is None else make(),
            workers=args.workers,
            steps=args.steps,
            batch_size=args.batch_size,
            seed=seed,
            schedule=schedule,
            validation=validation,
            progress=False,
        ).rows
    except ResidualError:
        return Outcome()
    last = [row["loss"] for row in rows[-max(1, args.steps // 10) :]]
    return Outcome(sum(last) / len(last), 100 * rows[-1]["validation_accuracy"])


def loss(own: list[Outcome]) -> str:
    """The mean over the seeds."""
    raised = sum(math.isnan(outcome.loss) for outcome in own)
    if raised:
        return f"{raised} of {len(own)} raise"
    return f"{sum(outcome.loss for outcome in own) / len(own):.3f}"


def deficit(own: list[Outcome], exact: list[Outcome]) -> str:
    """Of accuracy, seed by seed."""
    if any(math.isnan(outcome.loss) for outcome in own):
        return "-"
    return str(Interval.of([e.accuracy - o.accuracy for o, e in zip(own, exact, strict=True)]))


def main() -> None:
    args = make_parser().parse_args()
    logging.getLogger("hvd_adaptive").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    runs = args.seeds * (1 + len(SCHEMES) * len(FEEDBACK))
    with tqdm(total=runs, unit="run", leave=False, disable=None) as bar:

        def each(make: Callable[[], GradientCompressor] | None) -> list[Outcome]:
            outcomes = []
            for seed in range(args.seeds):
                outcomes.append(trained(args, seed, make))
                bar.update()
            return outcomes

        exact, rows = each(None), []
        for name, make in SCHEMES.items():
            make = functools.partial(make, bucket_size=args.bucket_size, exchange="allgather")
            own = [each(functools.partial(make, error_feedback=beta)) for beta in FEEDBACK]
            losses, deficits = map(loss, own), (deficit(of, exact) for of in own)
            rows.append([f"`{name}`", *losses, *deficits])
    accuracy = sum(outcome.accuracy for outcome in exact) / len(exact)
    print(markdown(HEADINGS, rows))
    print(f"float32: loss {loss(exact)}, accuracy {accuracy:.2f} %")


if __name__ == "__main__":
    main()
