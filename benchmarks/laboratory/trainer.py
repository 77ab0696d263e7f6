"""Train by the methods of a plan in turn, on each host of time_to_accuracy.py.

``python -m laboratory.trainer PLAN``; the plan is a JSON object with backend, ranks_per_host, task,
seed, methods ({label: steps}), every and folder. Each rank r writes folder/rank-r.json after each
method, as worker.py does: {"methods": {label: {"curve": [[step, seconds, quality], ...], "crc":
checksum of the parameters}}, "now": the method at work}.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import torch

from laboratory.exchangers import RANKS
from laboratory.files import write_json
from laboratory.methods import Method, parse
from laboratory.tasks import TASKS

UNTIMED = 3  # steps before the run, on a copy: connections are made, kernels are loaded


class Trainer:
    """Run as one rank of one launch."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.task = plan, TASKS[plan["task"]]
        self.ranks = RANKS[plan["backend"]]()
        self.data = self.task.data(plan["seed"], self.ranks.rank, self.ranks.size)
        self.file = Path(plan["folder"]) / f"rank-{self.ranks.rank}.json"
        self.found: dict[str, Any] = {"methods": {}, "now": None}

    def run(self) -> None:
        """Train by each method."""
        for label, steps in self.plan["methods"].items():
            (method,) = parse([label])
            self._write(now=method.label)
            try:
                self._train(method, UNTIMED, UNTIMED)
                self.found["methods"][method.label] = self._train(method, steps, self.plan["every"])
            except Exception as error:
                traceback.print_exc()
                self._write(failed=f"{type(error).__name__}: {error}".splitlines()[0])
                sys.stdout.flush()
                os._exit(1)  # the others may wait in a collective: the launcher ends them
        self._write(now=None)

    def _train(self, method: Method, steps: int, every: int) -> dict[str, Any]:
        """Return the curve of a run. Tests are not timed; ranks wait for them."""
        model = self.task.model(self.plan["seed"])
        optimizer = self.task.optimizer(model.parameters(), self.task.rate)
        forward, optimizer, scheme = self.ranks.prepare(
            method, model, optimizer, list(model.named_parameters())
        )
        curve, seconds = [(0, 0.0, self.data.test(model))], 0.0
        for step in range(steps):
            if step % every == 0:
                self.ranks.barrier()
                begin = time.perf_counter()
            optimizer.zero_grad()
            self.data.loss(forward, step).backward()
            optimizer.step()
            if (step + 1) % every == 0 or step + 1 == steps:
                self.ranks.barrier()
                seconds += time.perf_counter() - begin
                curve.append((step + 1, seconds, self._tested(model)))
        crc = 0
        for parameter in model.parameters():
            crc = zlib.crc32(parameter.detach().numpy().data, crc)
        optimizer.zero_grad()
        if scheme is not None:
            scheme.close()
        return {"curve": curve, "crc": crc}

    def _tested(self, model: torch.nn.Module) -> float:
        """Return the quality, which the first rank measures."""
        model.eval()
        quality = self.data.test(model) if self.ranks.rank == 0 else 0.0
        model.train()
        return quality

    def _write(self, **news: Any) -> None:
        self.found |= news
        write_json(self.file, self.found)


def main() -> None:
    """Run the plan that the command line names."""
    torch.set_num_threads(1)
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    trainer = Trainer(plan)
    trainer.run()
    trainer.ranks.barrier()
    trainer.ranks.close()


if __name__ == "__main__":
    main()
