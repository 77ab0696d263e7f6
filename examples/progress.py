"""How far training is."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import horovod.torch as hvd
from tqdm import tqdm


class Progress:
    """Tells how far training is, on rank 0: a bar, lines, and lines in a file for --demo."""

    def __init__(self, args: argparse.Namespace, seed: int, steps: int) -> None:
        self.args, self.seed, self.steps = args, seed, steps
        self.first, self.told = hvd.rank() == 0, 0.0
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
        now = time.monotonic()
        if self.args.progress_file and (now > self.told + 0.2 or step == self.steps):
            self.told = now
            line = {"run": self.seed - self.args.seed, "step": step, "accuracy": accuracy}
            with self.args.progress_file.open("a") as file:
                file.write(json.dumps(line | {"steps": self.steps}) + "\n")

    def close(self) -> None:
        """Training is over."""
        self.bar.close()
