"""How far training is."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import horovod.torch as hvd
from tqdm import tqdm


class Progress:
    """Tells how far training is, on rank 0: a bar, or lines."""

    def __init__(self, args: argparse.Namespace, steps: int) -> None:
        self.args, self.steps, self.first = args, steps, hvd.rank() == 0
        terminal = sys.stderr.isatty()
        bar = args.progress == "bar" or (args.progress == "auto" and terminal)
        self.lines = self.first and not bar and args.progress != "none"
        self.bar = tqdm(total=steps, unit="step", disable=not (self.first and bar), leave=False)

    def show(self, step: int, loss: float, curve: list[dict[str, Any]]) -> None:
        """After a step."""
        if not self.first:
            return
        accuracy = curve[-1]["accuracy"] if curve else None
        self.bar.update()
        if step % self.args.log_interval == 0:
            self.bar.set_postfix(loss=f"{loss:.3f}", accuracy=accuracy)
            if self.lines:
                told = "" if accuracy is None else f"\tAccuracy: {100 * accuracy:.2f}%"
                print(f"Train Step: {step}/{self.steps}\tLoss: {loss:.6f}{told}", flush=True)

    def close(self) -> None:
        """Training is over."""
        self.bar.close()
