"""Error feedback where the learning rate falls by ten: residuals as they are, and rescaled.

python research/feedback_decay.py

A residual is a gradient that was not applied at the rate of its time. After the rate has fallen
from a to b, it is applied at b, which is b/a of what was lost. Rescaled residuals are multiplied by
a/b. The model, the ranks and the pairs of runs are those of research/feedback.py. The rate falls
after two thirds of the steps. Intervals are those of the mean over pairs (95 %).
"""

from __future__ import annotations

import argparse
import functools
import logging
from dataclasses import dataclass
from typing import Any

import feedback
import torch
from compare_tables import markdown
from tqdm import tqdm
from verdicts import Interval

SCHEMES = ("OneBitSGD()", "SignSGD()", "SparseSGD(density=0.1)", "SparseSGD(density=0.01)")
FALLS_AFTER = 2 / 3  # of the steps
HEADINGS = ("scheme", "loss", "rescaled: loss", "relative difference, %", "accuracy, points")


@dataclass
class Rate:
    """A learning rate and, as a GradScaler, its reciprocal: residuals are stored divided by it, in
    the unit of the parameters, so that a change of the rate rescales what is added to gradients."""

    start: float
    falls_after: int
    step_count: int = 0
    optimizer: Any = None

    def get_scale(self) -> float:
        return 1.0 / self.now

    @property
    def now(self) -> float:
        return self.start / (10.0 if self.step_count >= self.falls_after else 1.0)

    def step(self) -> None:
        """Count a step of training; the learning rate follows."""
        self.step_count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.now

    def schedule(self, optimizer: torch.optim.Optimizer) -> Rate:
        self.optimizer = optimizer
        return self


def trained(args: argparse.Namespace, seed: int, scheme: str, rescales: bool) -> feedback.Outcome:
    """One run."""
    rate = Rate(args.rate, round(FALLS_AFTER * args.steps))
    own: dict[str, Any] = {"bucket_size": args.bucket_size, "exchange": "allgather"}
    own |= {"error_feedback": "auto"} | ({"grad_scaler": rate} if rescales else {})
    make = functools.partial(feedback.SCHEMES[scheme], **own)
    return feedback.trained(args, seed, make, rate.schedule)


def main() -> None:
    parser = feedback.make_parser()
    parser.description = __doc__
    args = parser.parse_args()
    logging.getLogger("hvd_adaptive").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    with tqdm(total=2 * args.seeds * len(SCHEMES), unit="run", leave=False, disable=None) as bar:
        for scheme in SCHEMES:
            ends: list[list[feedback.Outcome]] = [[], []]
            for seed in range(args.seeds):
                for rescales, own in enumerate(ends):
                    own.append(trained(args, seed, scheme, bool(rescales)))
                    bar.update()
            pairs = list(zip(*ends, strict=True))
            loss = Interval.of([100 * (new.loss / old.loss - 1) for old, new in pairs])
            accuracy = Interval.of([new.accuracy - old.accuracy for old, new in pairs])
            rows.append([f"`{scheme}`", *map(feedback.loss, ends), str(loss), str(accuracy)])
    print(markdown(HEADINGS, rows))


if __name__ == "__main__":
    main()
