"""LocalSGD in fragments, beside a plain simulation of all ranks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable

import local_rounds
import pytest
import torch
from streaming_simulation import Gather, backward, make_net, make_optimizer
from torch import nn

from hvd_adaptive import ALQ, QSGD, LocalSGD

OUTER = local_rounds.OUTER["diloco"]


@pytest.mark.parametrize("act", ["raise", "skip"])
def test_a_fragment_that_is_not_finite(rank: int, ranks: int, act: str) -> None:
    """The last rank has NaN in the second fragment when its delayed round begins."""
    broken, net = ranks - 1, make_net().double()
    optimizer = LocalSGD(
        make_optimizer(net),
        every=4,
        fragments=2,
        delay=1,
        on_nonfinite=act,
        named_parameters=net.named_parameters(),
    )
    local_rounds.train(rank, [1, 2, 3], net, optimizer)
    backward(net, rank, 4)
    if rank == broken:
        net[4].bias.grad[0] = float("nan")
    optimizer.step()  # returns: the error, if there is one, is raised when the round is applied
    assert optimizer.rounds == 1
    backward(net, rank, 5)
    if act == "raise":
        good = [p.detach().clone() for p in net.parameters()]
        net[4].bias.grad[0] = 0.0
        with pytest.raises(FloatingPointError, match=f"4.bias of rank {broken}"):
            optimizer.step()
        assert optimizer.rounds == 1
        with torch.no_grad():  # good weights are loaded
            for p, value in zip(net.parameters(), good, strict=True):
                p.copy_(value.nan_to_num())
        optimizer.optimizer.state.clear()
    else:
        optimizer.step()
        assert optimizer.rounds == 2
    local_rounds.train(rank, [6, 7, 8], net, optimizer)
    optimizer.finish()
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_frozen_fragments(rank: int, gather: Gather) -> None:
    """A fragment that is frozen keeps its bits, and goes on when it is unfrozen; a new layer joins
    the smallest fragment."""
    net = make_net()
    optimizer = LocalSGD(
        make_optimizer(net),
        every=4,
        fragments=2,
        delay=1,
        compression=ALQ(bits=4, bucket_size=512, min_numel=1, error_feedback=1.0),
        **OUTER,
    )

    def train(steps: Iterable[int]) -> None:
        for step in steps:
            backward(net, rank, step)
            for p in added.parameters():
                p.grad = torch.full_like(p, 0.1 * (rank + 1))
            optimizer.step()

    added = nn.ParameterList()
    train(range(4))
    optimizer.average()
    net[0].requires_grad_(False)
    frozen = copy.deepcopy(net[0].state_dict())
    train(range(4, 12))
    optimizer.average()
    assert all(torch.equal(frozen[n], p) for n, p in net[0].state_dict().items())
    net[0].requires_grad_(True)
    added = nn.Linear(30, 30)
    with torch.no_grad():
        for p in added.parameters():
            p.fill_(0.5)
    optimizer.add_param_group({"params": list(added.parameters())})
    train(range(12, 20))
    optimizer.finish()
    assert not torch.equal(frozen["weight"], net[0].weight)
    for p in [*net.parameters(), *added.parameters()]:
        assert bool((gather(p.detach()) == p.detach()).all())


@pytest.mark.parametrize("frozen_after", [2, 3])
def test_a_layer_frozen_while_rounds_are_delayed(
    rank: int, gather: Gather, frozen_after: int
) -> None:
    """A layer that is frozen adopts the next average that is applied, and then keeps its bits.

    Its fragment's rounds begin after steps 2, 6, ..., and are applied one step later.
    """
    net = make_net()
    compressor = ALQ(bits=4, bucket_size=512, min_numel=1)
    streams = {"every": 4, "fragments": 2, "delay": 1}
    optimizer = LocalSGD(make_optimizer(net), compression=compressor, **streams, **OUTER)
    adopted: list[torch.Tensor] = []
    for step in range(1, 20):
        backward(net, rank, step)
        optimizer.step()
        if step == frozen_after:
            net[0].requires_grad_(False)
        if step == (3 if frozen_after == 2 else 7):
            adopted = [p.detach().clone() for p in net[0].parameters()]
            assert all(bool((gather(p) == p).all()) for p in adopted)
        for p, value in zip(net[0].parameters(), adopted, strict=False):
            assert torch.equal(p, value), step
    optimizer.finish()
    for p, value in zip(net[0].parameters(), adopted, strict=True):
        assert torch.equal(p, value)


def test_a_delayed_round_does_not_wait(rank: int, ranks: int, meet: Callable[[], None]) -> None:
    """It begins without the first rank, which the others then wait for.

    meet: Waits until all ranks have called it.
    """
    net = make_net().double()
    optimizer = LocalSGD(make_optimizer(net), every=2, delay=1)
    backward(net, rank, 1)
    optimizer.step()
    backward(net, rank, 2)
    if rank:
        meet()
    optimizer.step()
    if not rank:
        meet()
    backward(net, rank, 3)
    optimizer.step()
    assert optimizer.rounds == 1
    optimizer.finish()


def test_settings_change_with_a_round_in_flight(rank: int, ranks: int) -> None:
    """``set`` while a round is in flight changes the next one, on all ranks."""
    net = make_net()
    compressor = QSGD(bits=8, bucket_size=512)
    optimizer = LocalSGD(make_optimizer(net), every=4, fragments=2, delay=2, compression=compressor)
    for step in range(1, 9):
        backward(net, rank, step)
        if step == 4:
            time.sleep(0.3 * rank)  # the first rank's round waits for the others
        optimizer.step()
        if step == 4:
            time.sleep(0.3 * rank)  # and those have sent it by now
            compressor.set(bits=4)
    optimizer.finish()
    assert compressor.report()["bits_per_coordinate"] < 6
