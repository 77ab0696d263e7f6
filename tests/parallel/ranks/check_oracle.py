"""Cases drawn from all schemes, exchanges and settings, against the exact average (tests/oracle).

A case is wrong if a coordinate is impossible, or if an error is larger than its exact variance
allows, at five sigma, on any rank; or if ranks differ in a bit, or a simulated run does.
"""

from __future__ import annotations

import os
import traceback

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from conftest import ALL
from hypothesis import HealthCheck, Phase, given, seed, settings
from settings_objects import grouped
from simulated_steps import take_step
from training import hash_of, residuals_of

import hvd_adaptive
from hvd_adaptive import instances
from hvd_adaptive.changes import begin_step
from hvd_adaptive.exchange import auto
from hvd_adaptive.simulate import Ranks

from oracle import drawn  # isort: skip
from oracle.training import Case, Residuals, Trial  # isort: skip

pytestmark = pytest.mark.ranks

# `make ranks` draws ten times as many cases, other ones under each launcher.
PARTS, CASES = 40 if ALL in os.environ else 4, 30


class Twin:
    """The case in this process; it does without sums, and without choices of exchange="auto"."""

    def __init__(self, case: Case) -> None:
        nodes = {"ranks_per_node": case.keywords.get("ranks_per_node") or case.ranks}
        self.compressor = getattr(hvd_adaptive, case.scheme)(**grouped(case.keywords | nodes))
        self.case, self.parameters = case, case.parameters()
        named = zip(case.names, self.parameters, strict=True)
        self.ranks = Ranks(list(named), self.compressor, case.ranks)

    def step(self, step: int) -> str:
        """Return a hash of the averages."""
        if step == 1 and self.case.then:
            self.compressor.set(**self.case.then)
            begin_step(self.compressor)
            self.ranks = self.ranks.renewed()
        everyone = []
        for rank in range(self.case.ranks):
            own = [self.case.gradient(step, rank, slot) for slot in range(len(self.parameters))]
            pairs = zip(own, self.parameters, strict=True)
            everyone.append([None if g is None else g.view(p.shape) for g, p in pairs])
        averages = take_step(self.ranks, step, self.parameters, everyone)
        self.compressor.step = step + 1
        return hash_of(*averages)


def trained(case: Case) -> tuple[list[str], str]:
    """What is wrong with the steps of this rank's optimizer, and a hash of all averages."""
    instances.start_over()
    twin = None if case.summed or case.fastest else Twin(case)
    instances.start_over()
    parameters = case.parameters()
    trial = Trial(case, getattr(hvd_adaptive, case.scheme)(**grouped(case.keywords)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.0),
        named_parameters=list(zip(case.names, parameters, strict=True)),
        compression=trial.compressor,
        op=hvd.Sum if case.summed else hvd.Average,
    )
    hashes = []
    for step in range(case.steps):
        trial.begin(step)
        terms = []
        for slot, parameter in enumerate(parameters):
            parameter.grad = None
            gradient = case.gradient(step, hvd.rank(), slot)
            if gradient is not None:
                terms.append((parameter.reshape(-1) * gradient).sum().double())
        sum(terms).backward()
        optimizer.step()
        hashes.append(hash_of(*(p.grad for p in parameters)))
        if twin is not None and twin.step(step) != hashes[-1]:
            trial._judge.wrong.append(f"step {step}: simulated averages differ")
        results = [p.grad.reshape(-1).double().numpy().copy() for p in parameters]
        layout = trial.compressor._training.connection.layout
        trial.judge(step, layout, results, everyones_residuals(trial))
    return trial.wrong(), "".join(hashes)


def everyones_residuals(trial: Trial) -> Residuals:
    own: dict[str, np.ndarray] = {}
    if trial.keywords.get("error_feedback") is None:
        return [own] * hvd.size()
    for name, residual in residuals_of(trial.compressor).items():
        own[name] = residual.double().numpy()
    return hvd.allgather_object(own, name="oracle.residuals")


def judge(case: Case) -> None:
    """Fail on all ranks together, with the case that makes the failure again."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            if case.fastest:
                label = f".{case.fastest}"
                patch.setattr(auto, "measure", lambda *of: 1.0 if of[4].endswith(label) else 2.0)
            own = trained(case)
    except Exception:
        # Others may wait for this rank, and be ended with the job: the case is told now.
        print(f"rank {hvd.rank()}: {case}\n{traceback.format_exc()}", flush=True)
        own = [traceback.format_exc(limit=-3)], ""
    everyone = hvd.allgather_object(own, name="oracle.verdict")
    found = [f"rank {rank}: {line}" for rank, (lines, _) in enumerate(everyone) for line in lines]
    if len({digest for _, digest in everyone}) > 1:
        found.append("the ranks' results differ")
    told = "\n".join(found[:12])
    assert not found, f"{len(found)} wrong with {case}\n{told}"


@pytest.mark.parametrize("part", range(PARTS))
def test_cases_drawn_from_all_settings(part):
    """The first rank draws; the others are sent its cases, and then nothing."""
    if hvd.rank():
        while (case := hvd.broadcast_object(None, 0, name="oracle.case")) is not None:
            judge(case)
        return
    gloo = os.environ.get("HOROVOD_CONTROLLER") == "gloo"

    @seed(1000 * part + 10 * hvd.size() + gloo)
    @settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn.training([hvd.size()]))
    def draw(case: Case) -> None:
        hvd.broadcast_object(case, 0, name="oracle.case")
        judge(case)

    draw()
    hvd.broadcast_object(None, 0, name="oracle.case")
