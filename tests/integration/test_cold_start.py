"""Training does not wait for kernels, and ends with the same parameters as if it did."""

from __future__ import annotations

import json
import sys

import pytest

from hvd_adaptive.tools.launch import MARK, Ranks
from hvd_adaptive.tools.processes import Job
from hvd_adaptive.variables import WAIT

PROGRAM = """
import horovod.torch as hvd, torch
from hvd_adaptive import ALQ
from hvd_adaptive.kernels.reference import tables
from hvd_adaptive.tools.launch import send_result
calls, slow = [], tables.quantize
def quantize(*arguments):
    calls.append(1)
    return slow(*arguments)
tables.quantize = quantize
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 10))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression=ALQ(bits=3, seed=3),
)
inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(hvd.rank()))
for _ in range(4):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
total = [p.detach().view(torch.int32).to(torch.int64).sum().item() for p in model.parameters()]
send_result([len(calls), total])
hvd.shutdown()
"""


def trained(folder, wait: str):
    ranks = Ranks(2)
    own = {"NUMBA_CACHE_DIR": str(folder), WAIT: wait}
    job = Job(
        ranks.command([sys.executable, "-c", PROGRAM]),
        150.0,
        environment=ranks.environment() | own,
    )
    assert job.wait() == 0, job.text()
    lines = (line.partition(MARK) for line in job.text().splitlines())
    return [json.loads(result) for _, mark, result in lines if mark]


@pytest.mark.timeout(320)
def test_a_cold_start_trains_the_same_parameters(tmp_path):
    cold, warm = trained(tmp_path, ""), trained(tmp_path, "1")
    assert all(calls > 0 for calls, _ in cold), "there was no kernel at the first step"
    assert all(calls == 0 for calls, _ in warm)
    assert len({json.dumps(parameters) for _, parameters in cold + warm}) == 1
