"""LocalSGD whose optimizer's parameter groups change during training."""

from __future__ import annotations

import copy

import pytest
import torch
from streaming_simulation import RATE, Gather, backward, make_net, make_optimizer
from torch import nn

from hvd_adaptive import ALQ, LocalSGD, RankMismatchError

CHANGED = {
    "adds": "ranks have different parameters in the optimizer's groups",
    "replaces": "ranks have added, replaced or unfrozen different parameters in a round",
}


def test_groups_that_change(rank: int, ranks: int, gather: Gather) -> None:
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

    def equal_on_all(layer: nn.Module) -> bool:
        flat = nn.utils.parameters_to_vector(layer.parameters()).detach()
        return bool((gather(flat) == flat).all())

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
    assert all(map(equal_on_all, (first, middle, last, added)))
    assert optimizer.rounds == 5
    # Frozen in the middle of a round, with steps already taken: averaged once, and then still.
    train(1, middle, last)
    middle.requires_grad_(False)
    train(1, last)
    assert equal_on_all(middle)
    frozen = copy.deepcopy(middle.state_dict())
    train(2, last)
    assert all(torch.equal(frozen[n], p) for n, p in middle.state_dict().items())


def test_a_parameter_that_is_replaced(rank: int, ranks: int, gather: Gather) -> None:
    """All ranks replace a parameter within a round, by numbers of their own. It becomes the exact
    mean once, and is averaged like the others from then on."""
    net = make_net()
    inner = make_optimizer(net)
    compressor = ALQ(bits=4, bucket_size=512, error_feedback=1.0)
    optimizer = LocalSGD(inner, every=2, momentum=0.9, lr=0.7, compression=compressor)

    def train(first: int, steps: int) -> None:
        for step in range(first, first + steps):
            backward(net, rank, step)
            optimizer.step()

    train(0, 3)
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
        train(begin, 2)
        assert not torch.equal(before, net[2].weight)
        for p in net.parameters():
            assert bool((gather(p.detach()) == p.detach()).all())
    assert optimizer.rounds == 4


@pytest.mark.parametrize("act", CHANGED)
def test_groups_that_one_rank_changes(rank: int, act: str) -> None:
    """The first rank alone adds or replaces parameters: all are told."""
    net = make_net()
    inner = make_optimizer(net)
    optimizer = LocalSGD(inner, every=2)
    for step in range(3):
        backward(net, rank, step)
        optimizer.step()
    if rank == 0 and act == "adds":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    if rank == 0 and act == "replaces":
        net[2].weight = inner.param_groups[0]["params"][2] = nn.Parameter(torch.ones(80, 80))
    backward(net, rank, 3)
    with pytest.raises(RankMismatchError, match=CHANGED[act]):
        optimizer.step()
    assert optimizer.rounds == 1
