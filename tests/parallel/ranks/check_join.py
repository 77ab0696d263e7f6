"""hvd.join(): ranks that run out of data earlier than others."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere
from rank_optimizers import distributed
from scheme_cases import scheme
from states import plain

from hvd_adaptive import QSGD, Tuning

pytestmark = [pytest.mark.ranks, pytest.mark.gloo]

SCHEMES = {
    "alq": scheme("alq-8", bucket_size=100, update_steps=[0, 2]),
    "qsgd": scheme("qsgd-8", bucket_size=100, fusion_bytes=8000),
    "orq": scheme("orq-9", bucket_size=100),
    "feedback": scheme("bingrad", bucket_size=100, error_feedback=1.0),
    "ecdq": scheme("ecdq-3", bucket_size=100),
    "scatter_reduce": scheme("qsgd-8", bucket_size=100, exchange="scatter_reduce"),
    "grouped": scheme("qsgd-8", bucket_size=100),
    "auto": scheme("qsgd-8", bucket_size=100, exchange="auto"),
}
WEIGHTS = {"weight": (60, 50), "half": (40, 40), "bias": (10,)}


class Training:
    """Gradients are a rank's own known numbers."""

    def __init__(self, name: str, compressor, **keywords) -> None:
        self.compressor = compressor
        self.weights = {n: torch.nn.Parameter(torch.zeros(s)) for n, s in WEIGHTS.items()}
        self.weights["half"].data = self.weights["half"].data.half()
        self.optimizer = distributed(
            self.weights, compressor, lr=1.0, prefix=f"{name}.", **keywords
        )

    def step(self) -> dict[str, torch.Tensor]:
        self.optimizer.zero_grad()
        scale = hvd.rank() + 1.0
        sum((w * pattern(n)).sum().float() * scale for n, w in self.weights.items()).backward()
        self.optimizer.step()
        return {n: w.grad for n, w in self.weights.items()}


def pattern(name: str) -> torch.Tensor:
    values = torch.linspace(-1, 1, torch.Size(WEIGHTS[name]).numel()).view(WEIGHTS[name])
    return values.half() if name == "half" else values


@pytest.mark.parametrize(
    ("name", "first"), [*((name, 3) for name in SCHEMES), ("alq", 0), ("auto", 0)]
)
def test_the_others_go_on(name, first):
    """Rank r stops after ``first`` + r steps. Meanwhile the others' gradients are averaged exactly,
    over all ranks, as in stock Horovod; then all go on, compressed, and at the same step."""
    groups = {"groups": 2} if name == "grouped" else {}
    training = Training(f"join.{name}.{first}", SCHEMES[name](), **groups)
    size = hvd.size()
    for done in range(first + hvd.rank()):
        grads = training.step()
        active = [rank for rank in range(size) if first + rank > done]
        if len(active) == size:
            before = training.compressor.state_dict()
            continue
        for n, grad in grads.items():
            exact = pattern(n).double() * sum(rank + 1 for rank in active) / size
            tolerance = 1e-3 if n == "half" else 1e-6
            torch.testing.assert_close(grad.double(), exact, rtol=tolerance, atol=tolerance)
        report = training.compressor.report()
        assert report["bits_per_coordinate"] == 32
        assert report["coordinates"] == sum(w.numel() for w in training.weights.values())
    assert training.compressor.step == first
    assert hvd.join() == size - 1
    if first:
        assert plain(training.compressor.state_dict()) == plain(before)
    for weight in training.weights.values():
        hvd.broadcast_(weight.data, size - 1, name=f"join.{name}.{first}.weights")
    for _ in range(2):
        training.step()
    assert training.compressor.step == first + 2
    assert training.compressor.report()["bits_per_coordinate"] < 32
    flat = torch.cat([w.detach().reshape(-1).float() for w in training.weights.values()])
    assert_same_everywhere(flat, "joined")


def test_hvd_allreduce_without_an_optimizer():
    compressor = QSGD(bits=8, bucket_size=100)
    values = torch.linspace(-1, 1, 5000) * (hvd.rank() + 1)
    total = torch.linspace(-1, 1, 5000) * sum(range(2, hvd.size() + 1))
    if hvd.rank():  # rank 0 has no data at all
        for op, exact in ((hvd.Average, total / hvd.size()), (hvd.Sum, total)):
            result = hvd.allreduce(values, compression=compressor, op=op, name=f"join.{op}")
            torch.testing.assert_close(result, exact)
    hvd.join()
    hvd.allreduce(values, compression=compressor, name="join.together")
    assert compressor.step == 1


def test_groups_are_launched_while_backward_runs():
    """The agreement costs no overlap beyond the first gradient."""
    weights = [torch.nn.Parameter(torch.zeros(2000)) for _ in range(3)]
    compressor = QSGD(bucket_size=100, fusion_bytes=8000, tuning=Tuning(worker=False))
    optimizer = distributed({f"roll.{i}": w for i, w in enumerate(weights)}, compressor)
    weights[2].sum().backward()
    drive = compressor._training.connection.drive
    while not drive.read.active:  # on a worker thread, as ranks agree for the first time
        pass
    step = drive.step
    assert not step._flying
    weights[1].sum().backward()
    assert len(step._flying) == 2
    weights[0].sum().backward()
    assert len(step._flying) == len(step.layout.groups)
    optimizer.step()
