"""Two ranks without compiled kernels compile them once, and train the same parameters."""

from __future__ import annotations

import json
import sys

import pytest

from hvd_adaptive.tools.launch import MARK, Ranks
from hvd_adaptive.tools.processes import Job

PROGRAM = """
import horovod.torch as hvd, torch
from hvd_adaptive import ALQ
from hvd_adaptive.kernels.numba import scan
from hvd_adaptive.tools.launch import send_result
from numba.core import event
class Compiled(event.Listener):
    count = 0
    def on_start(self, e): self.count += e.data["dispatcher"] is scan.histogram
    def on_end(self, e): pass
compiled = Compiled()
event.register("numba:compile", compiled)
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
send_result([compiled.count, total])
hvd.shutdown()
"""


def trained(folder):
    ranks = Ranks(2)
    own = {"NUMBA_CACHE_DIR": str(folder)}
    job = Job(
        ranks.command([sys.executable, "-c", PROGRAM]),
        150.0,
        environment=ranks.environment() | own,
    )
    assert job.wait() == 0, job.text()
    lines = (line.partition(MARK) for line in job.text().splitlines())
    return [json.loads(result) for _, mark, result in lines if mark], job.text()


@pytest.mark.thorough
@pytest.mark.timeout(320)
def test_a_cold_start_trains_the_same_parameters(tmp_path):
    (cold, told), (warm, silent) = trained(tmp_path), trained(tmp_path)
    assert sorted(count for count, _ in cold) == [0, 1], "one rank compiles, the other loads"
    assert [count for count, _ in warm] == [0, 0]
    assert told.count("compiling kernels") == 1 and "compiling kernels" not in silent
    assert len({json.dumps(parameters) for _, parameters in cold + warm}) == 1
