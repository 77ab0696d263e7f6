"""Two optimizers whose calls come in another order on each rank: whatever stock Horovod brings to
an end, compressed gradients do, too, with the right averages. These are a few real ranks; schedules
and steps that are given up are in tests/unit/hooks/horovod/test_any_order.py."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from nets import Given
from training import assert_same_everywhere, distributed, mean

from hvd_adaptive import ALQ, Auto, Hierarchical, ScatterReduce

pytestmark = pytest.mark.ranks

SIZES = (9000, 700, 4100)
STEPS = 4  # two fits, and a step after each
# 7 bits under L-infinity: far below the error of another optimizer's or step's gradient, above 1.
TOLERANCE = 0.05
# The default bits of averages are measured, which takes a moment.
EXCHANGES = {
    "scatter": ScatterReduce(second_stage_bits=7),
    "node": Hierarchical(second_stage_bits=7),
    "auto": Auto(second_stage_bits=7),
}


def gradients(net: int, step: int) -> list[torch.Tensor]:
    """What this rank contributes."""
    draw = torch.Generator().manual_seed(100 * step + 10 * net + hvd.rank())
    return [torch.randn(size, generator=draw) for size in SIZES]


class Pair:
    """Two networks, each with an optimizer and a compressor."""

    def __init__(self, exchange: str) -> None:
        keywords = {"bits": 7, "norm": "linf", "bucket_size": 512, "fusion_bytes": 20_000}
        keywords |= {"update_steps": [0, 2], "exchange": EXCHANGES[exchange]}
        self.models, self.compressors, self.optimizers = [], [], []
        for net in (0, 1):
            self.models.append(Given(SIZES))
            self.compressors.append(ALQ(**keywords))
            prefix = f"order{net}."
            optimizer = distributed(self.models[-1], self.compressors[-1], prefix=prefix)
            self.optimizers.append(optimizer)

    def backward(self, net: int, step: int) -> None:
        self.optimizers[net].zero_grad()
        self.models[net](gradients(net, step)).backward()

    def check(self, step: int) -> None:
        """Averages of both are right."""
        for net, model in enumerate(self.models):
            for parameter, own in zip(model.parameters(), gradients(net, step), strict=True):
                wanted = mean(own)
                error = (parameter.grad.double() - wanted).norm() / wanted.norm()
                assert error < TOLERANCE, (net, step, float(error))
                assert_same_everywhere(parameter.grad)


def order() -> list[int]:
    """Another one on every second rank."""
    return [0, 1] if hvd.rank() % 2 == 0 else [1, 0]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("first", ["as_steps", "same"])
def test_steps_in_another_order_on_each_rank(exchange, first):
    """Backward passes in the order of the steps, or in the same one on all ranks."""
    pair = Pair(exchange)
    for step in range(STEPS):
        for net in order() if first == "as_steps" else [0, 1]:
            pair.backward(net, step)
        for net in order():
            pair.optimizers[net].step()
        pair.check(step)
    if exchange != "auto":  # which may send all of it as it is
        fits = 0 if exchange == "node" else 2  # nodes quantise nothing
        assert [c.parts.default.table_version for c in pair.compressors] == [fits, fits]


def test_a_step_before_the_other_backward_pass():
    """Odd ranks step the second network before the first one's backward pass, while even ranks wait
    inside Horovod for the first one's gradients."""
    pair = Pair("scatter")
    for step in range(STEPS):
        if hvd.rank() % 2 == 0:
            for net in (0, 1):
                pair.backward(net, step)
            for net in (0, 1):
                pair.optimizers[net].step()
        else:
            for net in (1, 0):
                pair.backward(net, step)
                pair.optimizers[net].step()
        pair.check(step)
