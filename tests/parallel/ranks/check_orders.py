"""Two optimizers whose calls come in another order on each rank: whatever stock Horovod brings to
an end, compressed gradients do, too, with the right averages."""

from __future__ import annotations

import itertools
import time

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere
from rank_optimizers import distributed, give_up

from hvd_adaptive import ALQ, QSGD, Auto, Hierarchical, RankMismatchError, ScatterReduce
from hvd_adaptive.hooks.horovod.drive import PATIENCE

pytestmark = pytest.mark.ranks

NUMBER = itertools.count()
SIZES = {"w": 9000, "b": 700, "v": 4100}
STEPS = 4  # two fits, and a step after each
# 7 bits under L-infinity: far below the error of another optimizer's or step's gradient, above 1.
TOLERANCE = 0.05


def gradient(rank: int, net: int, step: int, name: str) -> torch.Tensor:
    """What ``rank`` contributes; any rank can make it."""
    seed = 1000 * step + 100 * net + 10 * rank + list(SIZES).index(name)
    return torch.randn(SIZES[name], generator=torch.Generator().manual_seed(seed))


def exact(net: int, step: int, name: str) -> torch.Tensor:
    every = [gradient(rank, net, step, name).double() for rank in range(hvd.size())]
    return torch.stack(every).mean(0)


def make(net: int, compressor):
    """Parameters by name, and their optimizer."""
    number = next(NUMBER)
    model = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
    optimizer = distributed(model, compressor, prefix=f"order{number}.{net}.")
    return model, optimizer


def backward(model, net: int, step: int) -> None:
    sum((p * gradient(hvd.rank(), net, step, name)).sum() for name, p in model.items()).backward()


def check(model, net: int, step: int) -> None:
    for name, parameter in model.items():
        wanted = exact(net, step, name)
        error = (parameter.grad.double() - wanted).norm() / wanted.norm()
        assert error < TOLERANCE, (net, step, name, float(error))
        assert_same_everywhere(parameter.grad, f"order.{net}.{name}")


def order() -> list[int]:
    """Another one on every second rank."""
    return [0, 1] if hvd.rank() % 2 == 0 else [1, 0]


COMPRESSORS = {
    "alq": lambda **k: ALQ(bits=7, norm="linf", update_steps=[0, 2], **k),
    "qsgd": lambda **k: QSGD(bits=8, norm="linf", **k),
}
# The default bits of averages are measured, which takes a moment.
EXCHANGES = {
    "allgather": {"exchange": "allgather"},
    "scatter": {"exchange": ScatterReduce(second_stage_bits=7)},
    "nodes": {"exchange": Hierarchical(ranks_per_node=1, second_stage_bits=7)},
    "node": {"exchange": Hierarchical(second_stage_bits=7)},
    "auto": {"exchange": Auto(second_stage_bits=7)},
    "feedback": {"exchange": ScatterReduce(second_stage_bits=7), "error_feedback": 0.5},
}


CASES = [("alq", exchange, "as_steps") for exchange in EXCHANGES]
CASES += [("alq", exchange, "same") for exchange in ("allgather", "scatter", "auto")]
CASES += [("qsgd", exchange, "as_steps") for exchange in ("allgather", "scatter", "nodes")]


@pytest.mark.parametrize(("scheme", "exchange", "first"), CASES)
def test_steps_in_another_order_on_each_rank(scheme, exchange, first):
    """Backward passes in the order of the steps, or in the same one on all ranks."""
    keywords = {"bucket_size": 512, "fusion_bytes": 20_000} | EXCHANGES[exchange]
    compressors = [COMPRESSORS[scheme](**keywords) for _ in range(2)]
    pairs = [make(net, compressor) for net, compressor in enumerate(compressors)]
    for step in range(STEPS):
        for _, optimizer in pairs:
            optimizer.zero_grad()
        for net in order() if first == "as_steps" else [0, 1]:
            backward(pairs[net][0], net, step)
        for net in order():
            pairs[net][1].step()
        for net in range(2):
            if exchange != "feedback":
                check(pairs[net][0], net, step)
    for net, (model, _) in enumerate(pairs):
        for name, parameter in model.items():
            # lr times all gradients so far; with error feedback but for the residual.
            wanted = sum(exact(net, step, name) for step in range(STEPS)) * -0.1
            assert (parameter.detach().double() - wanted).norm() < TOLERANCE * wanted.norm()
    if scheme == "alq" and exchange != "auto":  # which may send all of it as it is
        fits = 0 if exchange == "node" else 2  # nothing is quantised inside a node
        assert [c.parts.default.table_version for c in compressors] == [fits, fits]


def test_a_step_before_the_other_backward_pass():
    """Odd ranks step the second network before the first one's backward pass, while even ranks wait
    inside Horovod for the first one's gradients."""
    compressors = [COMPRESSORS["alq"](bucket_size=512) for _ in range(2)]
    pairs = [make(net, compressor) for net, compressor in enumerate(compressors)]
    for step in range(STEPS):
        for _, optimizer in pairs:
            optimizer.zero_grad()
        if hvd.rank() % 2 == 0:
            for net, (model, _) in enumerate(pairs):
                backward(model, net, step)
            for _, optimizer in pairs:
                optimizer.step()
        else:
            for net in (1, 0):
                backward(pairs[net][0], net, step)
                pairs[net][1].step()
        for net in range(2):
            check(pairs[net][0], net, step)


@pytest.mark.parametrize("exchange", ["allgather", "scatter"])
@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "plain", "fit"])
def test_a_step_is_given_up_while_some_rank_is_helped(exchange, at):
    """Between backward and step: odd ranks so late that helpers have begun, and wait for others."""
    keywords = {"bucket_size": 512} | EXCHANGES[exchange]
    compressors = [COMPRESSORS["alq"](**keywords) for _ in range(2)]
    pairs = [make(net, compressor) for net, compressor in enumerate(compressors)]
    for step in range(STEPS):
        for again in [True, False] if step == at else [False]:
            for net, (model, optimizer) in enumerate(pairs):
                optimizer.zero_grad()
                backward(model, net, step)
            if again:
                time.sleep(6 * PATIENCE if hvd.rank() % 2 else 0.0)
                for _, optimizer in pairs:
                    give_up(optimizer)
        for net in order():
            pairs[net][1].step()
        for net in range(2):
            check(pairs[net][0], net, step)
    assert [c.parts.default.table_version for c in compressors] == [2, 2]


def test_settings_that_differ_are_told_at_once():
    """By both optimizers, whichever a rank calls first."""
    keywords = {"update_steps": [0] if hvd.rank() == 1 else [0, 1]}
    pairs = [make(net, ALQ(bits=8, norm="linf", **keywords)) for net in range(2)]
    for step in range(2):
        begin = time.monotonic()
        for _, optimizer in pairs:
            optimizer.zero_grad()
        for net in order():
            backward(pairs[net][0], net, step)
        for net in order():
            if step == 0:
                pairs[net][1].step()
                continue
            with pytest.raises(RankMismatchError, match=r"a fit of tables .* is .*due"):
                pairs[net][1].step()
    assert time.monotonic() - begin < 10
    for _, optimizer in pairs:
        for handle, _ in optimizer._handles.values():
            hvd.synchronize(handle)
