"""LocalSGD in fragments, and with parameter groups that change, beside a plain simulation of all
ranks."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable

import local_rounds
import pytest
import torch
from nets import hash_of, is_same
from states import through_disk
from streaming_simulation import RATE, assert_equal, backward, make_net, make_optimizer
from torch import nn

from hvd_adaptive import ALQ, QSGD, LocalSGD, RankMismatchError, instances

OUTER = local_rounds.OUTER["diloco"]


@pytest.mark.parametrize("act", ["raise", "skip"])
def test_a_fragment_that_is_not_finite(rank, ranks, act):
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


def test_frozen_fragments(rank, gather):
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
    assert is_same(gather, hash_of(net, added))


@pytest.mark.parametrize("saved_at", [5, 8, 9])
def test_a_run_that_freezes_layers_resumes(rank, saved_at):
    """The first layer is unfrozen after step 3, the last one frozen after step 7: the same bits,
    outer momentum of each parameter and groups of fragments included."""

    def made() -> tuple[nn.Module, LocalSGD]:
        instances.start_over()
        net = make_net()
        net[0].requires_grad_(False)
        compressor = ALQ(bits=4, bucket_size=512, min_numel=1, error_feedback="auto")
        streams = {"every": 3, "fragments": 3}
        return net, LocalSGD(make_optimizer(net), compression=compressor, **streams, **OUTER)

    def train(net: nn.Module, optimizer: LocalSGD, steps: Iterable[int]) -> None:
        for step in steps:
            net[0].requires_grad_(step > 3)
            net[4].requires_grad_(step <= 7)
            local_rounds.train(rank, [step], net, optimizer)

    whole, optimizer = made()
    train(whole, optimizer, range(1, saved_at + 1))
    saved = through_disk({"net": whole.state_dict(), "optimizer": optimizer.state_dict()})
    train(whole, optimizer, range(saved_at + 1, 14))
    optimizer.finish()
    net, optimizer = made()
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    train(net, optimizer, range(saved_at + 1, 14))
    optimizer.finish()
    assert_equal(net, list(whole.parameters()))


@pytest.mark.parametrize("frozen_after", [2, 3])
def test_a_layer_frozen_while_rounds_are_delayed(rank, gather, frozen_after):
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


def test_a_delayed_round_does_not_wait(rank, ranks, meet):
    """It begins without the first rank, which the others then wait for.

    meet: Waits until all ranks have called it.
    """
    net = make_net().double()
    optimizer = LocalSGD(make_optimizer(net), every=2, delay=1)
    local_rounds.train(rank, [1], net, optimizer)
    backward(net, rank, 2)
    if rank:
        meet()
    optimizer.step()
    if not rank:
        meet()
    local_rounds.train(rank, [3], net, optimizer)
    assert optimizer.rounds == 1
    optimizer.finish()


def test_settings_change_with_a_round_in_flight(rank, ranks):
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


CHANGED = {
    "adds": "ranks have different parameters in the optimizer's groups",
    "replaces": "ranks have added, replaced or unfrozen different parameters in a round",
}


def test_groups_that_change(rank, ranks, gather):
    """A layer is frozen, another unfrozen, and one is added: each is averaged as it moved."""
    net, added = make_net(), nn.Linear(20, 20)
    with torch.no_grad():
        for p in added.parameters():
            p.fill_(0.25)
    first, middle, last = net[0], net[2], net[4]
    middle.requires_grad_(False)
    inner = torch.optim.SGD(net.parameters(), lr=RATE)
    compressor = ALQ(bits=4, bucket_size=512, update_steps=[0])
    optimizer = LocalSGD(inner, every=2, momentum=0.9, lr=0.7, compression=compressor)
    generator = torch.Generator().manual_seed(rank)

    def train(steps: int, *layers: nn.Module) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            for p in (p for layer in layers for p in layer.parameters()):
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()

    started = copy.deepcopy(middle.state_dict())
    train(4, first, last)
    assert all(torch.equal(started[n], p) for n, p in middle.state_dict().items())
    frozen = copy.deepcopy(first.state_dict())
    first.requires_grad_(False)
    middle.requires_grad_(True)
    optimizer.add_param_group({"params": list(added.parameters())})
    train(1, middle, added, last)
    # In the middle of the round, the exact mean of what is new after one more step.
    exact = [gather(p.detach()).double() for p in [*middle.parameters(), *added.parameters()]]
    draws = [torch.Generator() for _ in range(ranks)]
    states = gather(generator.get_state())
    for other, draw in enumerate(draws):
        draw.set_state(states[other].clone())
        for mean in exact:
            mean[other] -= RATE * torch.randn(mean.shape[1:], generator=draw).double()
    train(1, middle, added, last)
    for p, mean in zip([*middle.parameters(), *added.parameters()], exact, strict=True):
        torch.testing.assert_close(p.detach().double(), mean.mean(0), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(frozen[n], p) for n, p in first.state_dict().items())
    train(4, middle, added, last)
    assert all(torch.equal(frozen[n], p) for n, p in first.state_dict().items())
    assert is_same(gather, hash_of(first, middle, last, added))
    assert optimizer.rounds == 5
    # Frozen in the middle of a round, with steps already taken: averaged once, and then still.
    train(1, middle, last)
    middle.requires_grad_(False)
    train(1, last)
    assert is_same(gather, hash_of(middle))
    frozen = copy.deepcopy(middle.state_dict())
    train(2, last)
    assert all(torch.equal(frozen[n], p) for n, p in middle.state_dict().items())


def test_a_parameter_that_is_replaced(rank, ranks, gather):
    """All ranks replace a parameter within a round, by numbers of their own. It becomes the exact
    mean once, and is averaged like the others from then on."""
    net = make_net()
    inner = make_optimizer(net)
    compressor = ALQ(bits=4, bucket_size=512, error_feedback=1.0)
    optimizer = LocalSGD(inner, every=2, momentum=0.9, lr=0.7, compression=compressor)

    local_rounds.train(rank, range(3), net, optimizer)
    members = inner.param_groups[0]["params"]
    place = next(i for i, p in enumerate(members) if p is net[2].weight)
    generator = torch.Generator().manual_seed(rank)
    net[2].weight = nn.Parameter(0.1 * torch.randn(80, 80, generator=generator))
    members[place] = net[2].weight
    backward(net, rank, 3)
    inner.step()
    exact = gather(net[2].weight.detach()).double().mean(0)
    for p in net.parameters():  # the step was taken
        p.grad = None
    optimizer.step()
    torch.testing.assert_close(net[2].weight.detach().double(), exact, rtol=1e-6, atol=1e-8)
    for begin in (4, 6):
        before = net[2].weight.detach().clone()
        local_rounds.train(rank, [begin, begin + 1], net, optimizer)
        assert not torch.equal(before, net[2].weight)
        assert is_same(gather, hash_of(net))
    assert optimizer.rounds == 4


def test_a_state_with_other_numbers_is_loaded(rank):
    """Its run has replaced a parameter, and continues in an object that has had rounds: residuals
    are found by the state's numbers."""

    def made() -> tuple[nn.Module, LocalSGD]:
        instances.start_over()
        net = make_net()
        compressor = QSGD(bits=4, min_numel=1, error_feedback=1.0)
        return net, LocalSGD(make_optimizer(net), every=2, compression=compressor)

    whole, optimizer = made()
    local_rounds.train(rank, range(2), whole, optimizer)
    members = optimizer.param_groups[0]["params"]
    inner_state = optimizer.optimizer.state.pop(members[0])
    whole[0].weight = members[0] = nn.Parameter(members[0].detach().clone())
    optimizer.optimizer.state[members[0]] = inner_state
    local_rounds.train(rank, range(2, 6), whole, optimizer)
    saved = through_disk({"net": whole.state_dict(), "optimizer": optimizer.state_dict()})
    local_rounds.train(rank, range(6, 10), whole, optimizer)
    net, optimizer = made()
    local_rounds.train(rank, range(2), net, optimizer)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    local_rounds.train(rank, range(6, 10), net, optimizer)
    assert_equal(net, list(whole.parameters()))


@pytest.mark.parametrize("act", CHANGED)
def test_groups_that_one_rank_changes(rank, act):
    """The first rank alone adds or replaces parameters: all are told."""
    net = make_net()
    inner = make_optimizer(net)
    optimizer = LocalSGD(inner, every=2)
    local_rounds.train(rank, range(3), net, optimizer)
    if rank == 0 and act == "adds":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    if rank == 0 and act == "replaces":
        net[2].weight = inner.param_groups[0]["params"][2] = nn.Parameter(torch.ones(80, 80))
    backward(net, rank, 3)
    with pytest.raises(RankMismatchError, match=CHANGED[act]):
        optimizer.step()
    assert optimizer.rounds == 1
