"""Cases of tests/oracle on the steps of stock hvd.DistributedOptimizer."""

from __future__ import annotations

import hashlib
import traceback
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from oracle.training import Case, Residuals, Trial
from settings_objects import grouped

import hvd_adaptive
from hvd_adaptive.exchange import auto


class Training:
    """This rank's parameters, optimizer and compressor of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.parameters = case.parameters()
        self.trial = Trial(case, getattr(hvd_adaptive, case.scheme)(**grouped(case.keywords)))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters, lr=0.0),
            named_parameters=list(zip(case.names, self.parameters, strict=True)),
            compression=self.trial.compressor,
            op=hvd.Sum if case.summed else hvd.Average,
        )
        self.digest = hashlib.sha256()

    def step(self, step: int) -> None:
        """Exchange a step's gradients and judge what comes back."""
        trial = self.trial
        trial.begin(step)
        terms = []
        for slot, parameter in enumerate(self.parameters):
            parameter.grad = None
            gradient = self.case.gradient(step, hvd.rank(), slot)
            if gradient is not None:
                terms.append((parameter.reshape(-1) * gradient).sum().double())
        sum(terms).backward()
        self.optimizer.synchronize()
        results = [p.grad.reshape(-1).double().numpy().copy() for p in self.parameters]
        for result in results:
            self.digest.update(result.tobytes())
        layout = trial.compressor._training.connection.layout
        trial.judge(step, layout, results, self._residuals())

    def _residuals(self) -> Residuals:
        """Every rank's."""
        own: dict[str, np.ndarray] = {}
        if self.trial.keywords.get("error_feedback") is None:
            return [own] * hvd.size()
        state: dict[str, Any] = self.trial.compressor.state_dict()
        for name, residual in state.get("residuals", {}).get("parameters", {}).items():
            own[name] = residual.double().numpy()
        return hvd.allgather_object(own, name="oracle.residuals")


def wrong_in(case: Case) -> list[str]:
    """What is wrong on any rank; the same list on all of them, which must all call this."""
    measure = auto.measure
    if case.fastest:
        auto.measure = lambda *of: 1.0 if of[4].endswith(f".{case.fastest}") else 2.0
    try:
        training = Training(case)
        for step in range(case.steps):
            training.step(step)
        own = training.trial.wrong(), training.digest.hexdigest()
    except Exception:
        # Others may wait for this rank, and be ended with the job: the case is told now.
        print(f"rank {hvd.rank()}: {case}\n{traceback.format_exc()}", flush=True)
        own = [traceback.format_exc(limit=-3)], ""
    finally:
        auto.measure = measure
    everyone = hvd.allgather_object(own, name="oracle.verdict")
    found = [f"rank {rank}: {line}" for rank, (lines, _) in enumerate(everyone) for line in lines]
    if len({digest for _, digest in everyone}) > 1:
        found.append("the ranks' results differ")
    return found


def judge_case(case: Case) -> None:
    """Fail on all ranks together, with the case that makes the failure again."""
    found = wrong_in(case)
    told = "\n".join(found[:12])
    assert not found, f"{len(found)} wrong with {case}\n{told}"
