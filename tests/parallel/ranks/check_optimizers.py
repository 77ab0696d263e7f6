"""Every way in which Horovod's optimizer is used, beside an uncompressed twin."""

from __future__ import annotations

import gc
import itertools
import warnings

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, flat_parameters

from hvd_adaptive import ALQ, ECDQ, ORQ, QSGD, BinGrad

# With the largest relative error (of squares) that averages of 2 ranks may have.
SCHEMES = {
    "alq": (lambda: ALQ(bits=8, bucket_size=256, update_steps=[0]), 0.002),
    "qsgd": (lambda: QSGD(bits=8, norm="linf", bucket_size=256, exchange="scatter_reduce"), 0.002),
    "orq": (lambda: ORQ(levels=17, bucket_size=256), 0.02),
    "feedback": (lambda: BinGrad(bucket_size=256, error_feedback=1.0), 0.7),
    "ecdq": (lambda: ECDQ(bits=5, bucket_size=256), 0.02),
}
# Stock Horovod allows no two gradients of one name in flight.
NAMES = itertools.count()


def make_net() -> torch.nn.Module:
    """Weights of 3,000 and 1,500 coordinates, which are quantised, and two small biases."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(60, 50), torch.nn.Tanh(), torch.nn.Linear(50, 30)
    return torch.nn.Sequential(*layers)


def named(net: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    prefix = f"optimizers.{next(NAMES)}"
    return [(f"{prefix}.{name}", p) for name, p in net.named_parameters()]


def wrap(net: torch.nn.Module, compressor, **options):
    """With the learning rate 0: gradients are what is compared."""
    return hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0),
        **{"named_parameters": named(net), "compression": compressor} | options,
    )


def backward(net: torch.nn.Module, passes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + hvd.rank())
    for _ in range(passes):
        x, y = torch.randn(8, 60, generator=generator), torch.randn(8, 30, generator=generator)
        (net(x) - y).square().mean().backward()


def groups_of(net: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """One group of three; the fourth parameter stands alone."""
    return [[net[2].weight, net[0].weight, net[0].bias]]


OPTIONS = {
    "three_passes": lambda net: {"backward_passes_per_step": 3},
    "predivide": lambda net: {"gradient_predivide_factor": 3.0},
    "sum": lambda net: {"op": hvd.Sum},
    "num_groups": lambda net: {"num_groups": 2},
    "groups": lambda net: {"groups": 3, "op": hvd.Sum, "backward_passes_per_step": 2},
    "groups_of_tensors": lambda net: {"groups": groups_of(net)},
    "no_names": lambda net: {"named_parameters": None},
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_are_the_uncompressed_twins(option, scheme):
    """Small tensors to the last bits, the others within the scheme's error. ``synchronize`` comes
    before the first ``step``, as with gradient clipping."""
    construct, tolerance = SCHEMES[scheme]
    nets = [make_net(), make_net()]
    optimizers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for net, compressor in zip(nets, (hvd.Compression.none, construct()), strict=True):
            optimizers.append(wrap(net, compressor, **OPTIONS[option](net)))
    passes = optimizers[0].backward_passes_per_step
    squares = torch.zeros(2)
    for step in range(2):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            backward(net, passes, step)
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        for exact, p in zip(*(net.parameters() for net in nets), strict=True):
            if p.numel() < 1024:
                torch.testing.assert_close(p.grad, exact.grad, rtol=1e-5, atol=1e-7)
            squares[0] += (p.grad - exact.grad).square().sum()
            squares[1] += exact.grad.square().sum()
    assert 0 < squares[0] / squares[1] < tolerance
    compressor = optimizers[1]._compression
    assert compressor.step == 2
    assert compressor.report()["bits_per_coordinate"] < 12
    grads = torch.cat([p.grad.reshape(-1) for p in nets[1].parameters()])
    assert_same_everywhere(grads, f"{option}.{scheme}")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_synchronize_before_any_backward(scheme):
    """Every gradient is missing, so Horovod sends zeros. Training goes on as ever."""
    construct, tolerance = SCHEMES[scheme]
    net, compressor = make_net(), construct()
    optimizer = wrap(net, compressor)
    optimizer.synchronize()
    assert all(not p.grad.any() for p in net.parameters())
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    backward(net, 1, 0)
    own = [p.grad.clone() for p in net.parameters()]
    optimizer.synchronize()
    exact = [hvd.allreduce(g, name=f"early.{scheme}.{i}") for i, g in enumerate(own)]
    error = sum((p.grad - e).square().sum() for p, e in zip(net.parameters(), exact, strict=True))
    assert 0 < error / sum(e.square().sum() for e in exact) < tolerance
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()  # synchronises once more: averages of equal gradients
    assert compressor.step == 3
    if scheme == "alq":
        assert (
            compressor.parts.default.table_version == 1
        )  # zeros fit no table: put off to the next step
    assert_same_everywhere(torch.cat([p.grad.reshape(-1) for p in net.parameters()]), "early")


@pytest.mark.ranks
@pytest.mark.parametrize("scheme", SCHEMES)
def test_process_sets_made_while_horovod_runs(scheme):
    """Even ranks train apart from odd ones, the same network with the same settings, at the same
    time; then all together."""
    construct, tolerance = SCHEMES[scheme]
    size = hvd.size()
    sets = [hvd.add_process_set(list(range(first, size, 2))) for first in (0, 1)]
    mine, compressor = sets[hvd.rank() % 2], construct()
    net, prefix = make_net(), f"process_set.{scheme}"
    optimizer = wrap(
        net,
        compressor,
        named_parameters=[(f"{prefix}.{name}", p) for name, p in net.named_parameters()],
        process_set=mine,
    )
    for step in range(2):
        optimizer.zero_grad()
        backward(net, 1, step)
        own = [p.grad.clone() for p in net.parameters()]
        optimizer.step()
        squares = torch.zeros(2)
        for index, (p, g) in enumerate(zip(net.parameters(), own, strict=True)):
            exact = hvd.allreduce(g, name=f"{prefix}.exact.{index}", process_set=mine)
            squares += torch.stack([(p.grad - exact).square().sum(), exact.square().sum()])
        assert 0 < squares[0] / squares[1] < 2 * tolerance
    grads = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    everyone = hvd.allgather(grads[None], name=f"{prefix}.all")
    for rank in range(size):
        alike = rank % 2 == hvd.rank() % 2
        assert torch.equal(everyone[rank], grads) == alike, f"rank {rank}"
    hvd.barrier()
    for process_set in sets:
        hvd.remove_process_set(process_set)
    with pytest.raises(RuntimeError, match="was never added to Horovod, or was removed"):
        backward(net, 1, 0)
    together = make_net()
    last = wrap(together, construct())
    backward(together, 1, 0)
    last.step()
    assert_same_everywhere(flat_parameters(together), f"{prefix}.together")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gan(scheme):
    """Two optimizers, each with a compressor of the same settings. The generator's loss runs
    backward through the discriminator: its gradients are dropped after ``synchronize``, or it is
    frozen meanwhile."""
    construct, _ = SCHEMES[scheme]
    torch.manual_seed(0)
    generator, critic = torch.nn.Linear(60, 60), torch.nn.Linear(60, 30)
    compressors = [construct(), construct()]
    pairs = zip((generator, critic), compressors, strict=True)
    of_generator, of_critic = (
        hvd.DistributedOptimizer(
            torch.optim.Adam(net.parameters(), lr=1e-3),
            named_parameters=named(net),
            compression=compressor,
        )
        for net, compressor in pairs
    )
    for step in range(4):
        noise = torch.randn(8, 60, generator=torch.Generator().manual_seed(step + hvd.rank()))
        of_critic.zero_grad()
        (critic(generator(noise).detach()).square().mean() - critic(noise).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
        critic.requires_grad_(step % 2 == 0)
        (-critic(generator(noise)).mean()).backward()
        of_generator.step()
        if step % 2 == 0:
            of_critic.synchronize()
        critic.requires_grad_(True)
    assert [compressor.step for compressor in compressors] == [4, 6]
    for net in (generator, critic):
        assert_same_everywhere(flat_parameters(net), f"gan.{scheme}")


def test_one_compressor_shared_by_two_optimizers():
    """Told at the second one's first gradient, whichever comes first, and whether their parameters
    are different ones or the same."""
    compressor = QSGD(bucket_size=256)
    nets = [make_net(), make_net()]
    first, second = (wrap(net, compressor) for net in nets)
    for _ in range(2):
        first.zero_grad()
        backward(nets[0], 1, 0)
        first.step()
    with pytest.raises(RuntimeError, match="one compressor serves one optimizer at a time"):
        backward(nets[1], 1, 0)
    first.zero_grad()
    backward(nets[0], 1, 0)
    first.step()
    assert_same_everywhere(flat_parameters(nets[0]), "shared")
    again = wrap(nets[0], compressor)
    with pytest.raises(RuntimeError, match="one compressor serves one optimizer at a time"):
        again.synchronize()
    del second
    hvd.barrier()


def test_a_new_optimizer_takes_the_compressor_over():
    """Once the old one is gone; of the same parameters, or of others."""
    compressor = ALQ(bits=8, bucket_size=256)
    net = make_net()
    for net_of_epoch in (net, net, make_net(), make_net()):
        optimizer = wrap(net_of_epoch, compressor)
        backward(net_of_epoch, 1, 0)
        optimizer.step()
        assert_same_everywhere(flat_parameters(net_of_epoch), "taken over")
        del optimizer
        if net_of_epoch is net:  # or the old one's hooks are called, too, as in stock Horovod
            gc.collect()
    assert compressor.step == 4


@pytest.mark.parametrize("op", ["Adasum", "Min", "Max", "Product"])
def test_other_ops_are_refused(op):
    """By name, at the first gradient: nothing has been averaged, or stepped."""
    net = make_net()
    before = flat_parameters(net)
    kept = wrap(net, QSGD(bucket_size=256), op=getattr(hvd, op))
    message = rf"op=hvd\.{op}: must be hvd\.Average or hvd\.Sum to compress gradients"
    with pytest.raises(ValueError, match=message):
        backward(net, 1, 0)
    # Adasum's optimizer moves a parameter before it asks for compression: that was taken back.
    assert torch.equal(flat_parameters(net), before)
    (group,) = kept.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in net.parameters()]
    del kept
    hvd.barrier()


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_other_ops_of_hvd_allreduce_are_refused(op):
    with pytest.raises(ValueError, match=rf"op=hvd\.{op}: must be hvd\.Average or hvd\.Sum"):
        hvd.allreduce(
            torch.ones(2000), compression=QSGD(), op=getattr(hvd, op), name=f"refused.{op}"
        )
    with pytest.raises(ValueError, match="without other factors"):
        hvd.allreduce(
            torch.ones(2000), compression=QSGD(), prescale_factor=0.5, name=f"prescaled.{op}"
        )


def test_a_group_with_a_missing_gradient_is_refused():
    """Horovod calls compress(None) for it: here a half backward was thrown away."""
    net = make_net()
    optimizer = wrap(net, QSGD(bucket_size=256), groups=[[net[0].weight, net[2].weight]])
    net[0].weight.sum().backward()
    net.zero_grad(set_to_none=True)
    with pytest.raises(ValueError, match=r"groups=.*no gradient"):
        net[2].weight.sum().backward()
    del optimizer
    hvd.barrier()
