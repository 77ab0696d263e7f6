"""Train by the methods of a plan in turn, on each host of time_to_accuracy.py.

``python -m laboratory.trainer PLAN``; the plan is a JSON object with backend, ranks_per_host, task,
seed, methods ({label: steps}), every and folder. Of each method rank.py writes {"curve": [[step,
seconds, quality], ...], "crc": checksum of the parameters}.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import torch

from laboratory.methods import Method
from laboratory.rank import Rank, main
from laboratory.tasks import TASKS

UNTIMED = 3  # steps before the run, on a copy: connections are made, kernels are loaded


class Trainer(Rank):
    """Train a task's network."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        self.task = TASKS[plan["task"]]
        self.data = self.task.data(plan["seed"], self.ranks.rank, self.ranks.size)

    def measure(self, method: Method) -> dict[str, Any]:
        """Return the curve of a run."""
        self._train(method, UNTIMED, UNTIMED)
        return self._train(method, self.plan["methods"][method.label], self.plan["every"])

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


if __name__ == "__main__":
    main(Trainer)
