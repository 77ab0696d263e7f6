"""hvd.join(): ranks that run out of data earlier than others."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from scheme_cases import scheme
from states import plain
from training import assert_same_everywhere, distributed, take_step

from hvd_adaptive import QSGD

pytestmark = [pytest.mark.ranks, pytest.mark.gloo]

SCHEMES = {
    "alq": scheme("alq-8", update_steps=[0, 2]),
    "qsgd": scheme("qsgd-8", fusion_bytes=8000),
    "orq": scheme("orq-9"),
    "feedback": scheme("bingrad", error_feedback=1.0),
    "ecdq": scheme("ecdq-3"),
    "scatter_reduce": scheme("qsgd-8", exchange="scatter_reduce"),
    "grouped": scheme("qsgd-8"),
    "auto": scheme("qsgd-8", exchange="auto"),
}
WEIGHTS = {"weight": (60, 50), "half": (40, 40), "bias": (10,)}


def pattern(name: str) -> torch.Tensor:
    values = torch.linspace(-1, 1, torch.Size(WEIGHTS[name]).numel()).view(WEIGHTS[name])
    return values.half() if name == "half" else values


@pytest.mark.parametrize(
    ("name", "first"), [*((name, 3) for name in SCHEMES), ("alq", 0), ("auto", 0)]
)
def test_the_others_go_on(name, first):
    """Rank r stops after ``first`` + r steps. Meanwhile the others' gradients are averaged exactly,
    over all ranks, as in stock Horovod; then all go on, compressed, and at the same step."""
    weights = {n: torch.nn.Parameter(torch.zeros_like(pattern(n))) for n in WEIGHTS}
    compressor, groups = SCHEMES[name](bucket_size=100), {"groups": 2} if name == "grouped" else {}
    prefix = f"join.{name}.{first}."
    optimizer = distributed(weights, compressor, lr=1.0, prefix=prefix, **groups)

    def step() -> None:
        loss = sum((w * pattern(n)).sum().float() for n, w in weights.items())
        take_step(optimizer, loss * (hvd.rank() + 1.0))

    size = hvd.size()
    for done in range(first + hvd.rank()):
        step()
        active = [rank for rank in range(size) if first + rank > done]
        if len(active) == size:
            before = compressor.state_dict()
            continue
        for n, weight in weights.items():
            exact = pattern(n).double() * sum(rank + 1 for rank in active) / size
            tolerance = 1e-3 if n == "half" else 1e-6
            torch.testing.assert_close(weight.grad.double(), exact, rtol=tolerance, atol=tolerance)
        report = compressor.report()
        assert report["bits_per_coordinate"] == 32
        assert report["coordinates"] == sum(w.numel() for w in weights.values())
    assert compressor.step == first
    assert hvd.join() == size - 1
    if first:
        assert plain(compressor.state_dict()) == plain(before)
    for weight in weights.values():
        hvd.broadcast_(weight.data, size - 1, name=f"{prefix}weights")
    for _ in range(2):
        step()
    assert compressor.step == first + 2
    assert compressor.report()["bits_per_coordinate"] < 32
    assert_same_everywhere(*weights.values())


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
