"""Two optimizers whose calls come in another order on each rank: whatever stock Horovod brings to
an end, compressed gradients do, too, with the right averages. These are a few real ranks; schedules
and steps that are given up are in tests/unit/hooks/horovod/test_any_order.py."""

from __future__ import annotations

import os
import random
import time

import horovod.torch as hvd
import pytest
import torch
from nets import Given
from training import assert_same_everywhere, distributed, mean

from hvd_adaptive import ALQ, Auto, Hierarchical, ScatterReduce, Tuning

pytestmark = pytest.mark.ranks

SIZES = (9000, 700, 4100)
RUNS = int(os.environ.get("HVD_ADAPTIVE_RUNS", "1"))
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
    draw = torch.Generator().manual_seed(100 * step + 10 * net + hvd.rank())
    return [torch.randn(size, generator=draw) for size in SIZES]


class Pair:
    def __init__(self, exchange: str, process_set=hvd.global_process_set, **own) -> None:
        self.where = {"process_set": process_set}
        keywords = {"bits": 7, "norm": "linf", "bucket_size": 512, "fusion_bytes": 20_000}
        keywords |= {"update_steps": [0, 2], "exchange": EXCHANGES[exchange]} | own
        self.models, self.compressors, self.optimizers = [], [], []
        for net in (0, 1):
            self.models.append(Given(SIZES))
            self.compressors.append(ALQ(**keywords))
            named = {f"order{net}.{n}": p for n, p in self.models[-1].named_parameters()}
            self.optimizers.append(distributed(named, self.compressors[-1], **self.where))

    def backward(self, net: int, step: int) -> None:
        self.optimizers[net].zero_grad()
        self.models[net](gradients(net, step)).backward()

    def check(self, step: int) -> None:
        """Averages of both are right."""
        for net, model in enumerate(self.models):
            for parameter, own in zip(model.parameters(), gradients(net, step), strict=True):
                wanted = mean(own, **self.where)
                error = (parameter.grad.double() - wanted).norm() / wanted.norm()
                assert error < TOLERANCE, (net, step, float(error))
                assert_same_everywhere(parameter.grad, **self.where)


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


def test_random_orders_in_a_process_set():
    """Hooks sleep, and each rank has a worker or not. `make soak` makes 500 runs."""
    ranks = [0, hvd.size() - 1]
    members = hvd.global_process_set if hvd.size() == 2 else hvd.add_process_set(ranks)
    for number in range(RUNS if hvd.rank() in ranks else 0):
        own = random.Random(f"{number} {hvd.rank()}")
        exchange, tuning = sorted(EXCHANGES)[number % 3], Tuning(worker=own.random() < 0.5)
        pair = Pair(exchange, members, tuning=tuning, seed=number)
        for weight in (w for model in pair.models for w in model.parameters()):
            weight.register_hook(lambda gradient, own=own: time.sleep(own.random() * 0.02))
        for step in range(STEPS):
            for net in (0, 1):
                pair.backward(net, step)
            for net in own.sample((0, 1), 2):
                pair.optimizers[net].step()
            pair.check(step)
    hvd.barrier()
    if hvd.size() > 2:
        hvd.remove_process_set(members)
