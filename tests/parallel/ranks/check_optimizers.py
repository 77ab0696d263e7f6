"""Every way in which Horovod's optimizer is used, beside an uncompressed twin."""

from __future__ import annotations

import gc
import warnings

import horovod.torch as hvd
import nets
import pytest
import torch
from nets import make_net
from scheme_cases import scheme
from training import (
    assert_same_everywhere,
    batches,
    distributed,
    flat_parameters,
    loss_of,
    make_model,
    mean,
    take_step,
)

from hvd_adaptive import ALQ, ECDQ, QSGD, Tuning

# With the largest relative error (of squares) that averages of 2 ranks may have.
SCHEMES = {
    "alq": (scheme("alq-8", bucket_size=256, update_steps=[0]), 0.002),
    "qsgd": (scheme("qsgd-8-linf", bucket_size=256, exchange="scatter_reduce"), 0.002),
    "orq": (scheme("orq-9", levels=17, bucket_size=256), 0.02),
    "feedback": (scheme("bingrad", bucket_size=256, error_feedback=1.0), 0.7),
    "ecdq": (scheme("ecdq-3", bits=5, bucket_size=256), 0.02),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def wrap(net, compressor, prefix="", **options):
    """With the learning rate 0: gradients are what is compared."""
    return distributed(net, compressor, lr=0.0, prefix=prefix, **options)


def backward(net: torch.nn.Module, passes: int = 1, seed: int = 0) -> None:
    for number in range(passes):
        nets.loss_of(net, 10 * seed + number, hvd.rank()).backward()


def gradients(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in net.parameters()])


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Error of squares."""
    return float((found - exact).square().sum() / exact.square().sum())


OPTIONS = {
    "three_passes": lambda net: {"backward_passes_per_step": 3},
    "predivide": lambda net: {"gradient_predivide_factor": 3.0},
    "sum": lambda net: {"op": hvd.Sum},
    "num_groups": lambda net: {"num_groups": 2},
    "groups": lambda net: {"groups": 3, "op": hvd.Sum, "backward_passes_per_step": 2},
    # One group of three; the other parameters stand alone.
    "groups_of_tensors": lambda net: {"groups": [[net[2].weight, net[0].weight, net[0].bias]]},
    "no_names": lambda net: {"named_parameters": None},
}


@every_scheme
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_are_the_uncompressed_twins(option, scheme):
    """Small tensors to the last bits, the others within the scheme's error. ``synchronize`` comes
    before the first ``step``, as with gradient clipping."""
    construct, tolerance = SCHEMES[scheme]
    twins, compressor = {"stock.": make_net(), "": make_net()}, construct()
    optimizers = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for prefix, net in twins.items():
            own = hvd.Compression.none if prefix else compressor
            optimizers[prefix] = wrap(net, own, f"{option}.{prefix}", **OPTIONS[option](net))
    squares = torch.zeros(2)
    for step in range(2):
        for prefix, optimizer in optimizers.items():
            optimizer.zero_grad()
            backward(twins[prefix], optimizer.backward_passes_per_step, step)
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        for exact, p in zip(*(net.parameters() for net in twins.values()), strict=True):
            if p.numel() < 1024:
                torch.testing.assert_close(p.grad, exact.grad, rtol=1e-5, atol=1e-7)
            squares[0] += (p.grad - exact.grad).square().sum()
            squares[1] += exact.grad.square().sum()
    assert 0 < squares[0] / squares[1] < tolerance
    assert compressor.step == 2
    assert compressor.report()["bits_per_coordinate"] < 12
    assert_same_everywhere(gradients(twins[""]))


@every_scheme
def test_synchronize_before_any_backward(scheme):
    """Every gradient is missing, so Horovod sends zeros. Training goes on as ever."""
    construct, tolerance = SCHEMES[scheme]
    net, compressor = make_net(), construct()
    optimizer = wrap(net, compressor)
    optimizer.synchronize()
    assert not gradients(net).any()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    backward(net)
    own = gradients(net)
    optimizer.synchronize()
    averages = gradients(net)
    assert 0 < relative(averages, mean(own)) < tolerance
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()  # synchronises once more: averages are quantised again
    again = relative(gradients(net), averages)
    assert again < tolerance and (again > 0 or scheme == "qsgd")  # whose averages are its levels
    assert compressor.step == 3
    if scheme == "alq":  # zeros fit no table: put off to the next step
        assert compressor.parts.default.table_version == 1
    assert_same_everywhere(gradients(net))


@pytest.mark.ranks
@every_scheme
def test_process_sets_made_while_horovod_runs(scheme):
    """Even ranks train apart from odd ones, the same network with the same settings, at the same
    time; then all together."""
    construct, tolerance = SCHEMES[scheme]
    size, place = hvd.size(), hvd.rank() % 2
    sets = [hvd.add_process_set(list(range(first, size, 2))) for first in (0, 1)]
    net, compressor, prefix = make_net(), construct(), f"process_set.{scheme}."
    optimizer = wrap(net, compressor, prefix, process_set=sets[place])
    for step in range(2):
        optimizer.zero_grad()
        backward(net, 1, step)
        own = gradients(net)
        optimizer.step()
        exact = hvd.allgather(own[None], name=f"{prefix}own")[place::2].mean(0)
        assert 0 < relative(gradients(net), exact) < 2 * tolerance
    everyone = hvd.allgather(gradients(net)[None], name=f"{prefix}all")
    for rank in range(size):
        assert torch.equal(everyone[rank], gradients(net)) == (rank % 2 == place), f"rank {rank}"
    hvd.barrier()
    for process_set in sets:
        hvd.remove_process_set(process_set)
    with pytest.raises(RuntimeError, match="was never added to Horovod, or was removed"):
        backward(net)
    together = make_net()
    last = wrap(together, construct())
    backward(together)
    last.step()
    assert_same_everywhere(gradients(together))


@every_scheme
def test_a_gan(scheme):
    """Two optimizers, each with a compressor of the same settings. The generator's loss runs
    backward through the discriminator: its gradients are dropped after ``synchronize``, or it is
    frozen meanwhile."""
    construct, _ = SCHEMES[scheme]
    generator, critic = torch.nn.Linear(60, 60), torch.nn.Linear(60, 30)
    compressors = [construct(), construct()]
    of_generator, of_critic = (
        distributed(net, compressor, lr=1e-3, prefix=prefix)
        for net, compressor, prefix in zip((generator, critic), compressors, "gc", strict=True)
    )
    for step in range(4):
        noise = torch.randn(8, 60, generator=torch.Generator().manual_seed(step + hvd.rank()))
        fake = critic(generator(noise).detach())
        take_step(of_critic, fake.square().mean() - critic(noise).mean())
        of_critic.zero_grad()
        critic.requires_grad_(step % 2 == 0)
        take_step(of_generator, -critic(generator(noise)).mean())
        if step % 2 == 0:
            of_critic.synchronize()
        critic.requires_grad_(True)
    assert [compressor.step for compressor in compressors] == [4, 6]
    assert_same_everywhere(generator, critic)


def test_one_compressor_shared_by_two_optimizers():
    """Told at the second one's first gradient, whichever comes first, and whether their parameters
    are different ones or the same."""
    compressor = QSGD(bucket_size=256)
    pair = [make_net(), make_net()]
    first, second = (wrap(net, compressor, f"{i}.") for i, net in enumerate(pair))
    told = "one compressor serves one optimizer at a time"
    for number in range(3):
        first.zero_grad()
        backward(pair[0])
        first.step()
        if number == 1:
            with pytest.raises(RuntimeError, match=told):
                backward(pair[1])
    assert_same_everywhere(gradients(pair[0]))
    again = wrap(pair[0], compressor, "again.")
    with pytest.raises(RuntimeError, match=told):
        again.synchronize()
    del second
    hvd.barrier()


def test_a_new_optimizer_takes_the_compressor_over():
    """Once the old one is gone; of the same parameters, or of others."""
    compressor = ALQ(bits=8, bucket_size=256)
    net = make_net()
    for net_of_epoch in (net, net, make_net(), make_net()):
        optimizer = wrap(net_of_epoch, compressor)
        backward(net_of_epoch)
        optimizer.step()
        assert_same_everywhere(gradients(net_of_epoch))
        del optimizer
        if net_of_epoch is net:  # or the old one's hooks are called, too, as in stock Horovod
            gc.collect()
    assert compressor.step == 4


def test_a_compressor_used_alone_first_finds_its_optimizer_later():
    model, compressor = make_model(), ALQ(bits=8, bucket_size=100)
    hvd.allreduce(torch.ones(2000) * hvd.rank(), compression=compressor, name="alone")
    take_step(distributed(model, compressor), loss_of(model, batches(hvd.rank())()))
    assert compressor._training.connection.layout is not None
    assert_same_everywhere(model)


@pytest.mark.parametrize("op", ["Adasum", "Min", "Max", "Product"])
def test_other_ops_are_refused(op):
    """By name, at the first gradient: nothing has been averaged, or stepped."""
    net = make_net()
    before = flat_parameters(net)
    kept = wrap(net, QSGD(bucket_size=256), f"{op}.", op=getattr(hvd, op))
    message = rf"op=hvd\.{op}: must be hvd\.Average or hvd\.Sum"
    with pytest.raises(ValueError, match=f"{message} to compress gradients"):
        backward(net)
    # Adasum's optimizer moves a parameter before it asks for compression: that was taken back.
    assert torch.equal(flat_parameters(net), before)
    (group,) = kept.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in net.parameters()]
    del kept
    hvd.barrier()


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_other_ops_of_hvd_allreduce_are_refused(op):
    keywords = {"compression": QSGD(), "name": f"refused.{op}"}
    with pytest.raises(ValueError, match=rf"op=hvd\.{op}: must be hvd\.Average or hvd\.Sum"):
        hvd.allreduce(torch.ones(2000), op=getattr(hvd, op), **keywords)
    with pytest.raises(ValueError, match="without other factors"):
        hvd.allreduce(torch.ones(2000), prescale_factor=0.5, **keywords)


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


@pytest.mark.parametrize("scheme", [ALQ, ECDQ])
def test_a_class_is_refused(scheme):
    """``compression=ALQ``, at the first gradient, or without an optimizer."""
    net = make_net()
    optimizer = wrap(net, scheme)
    told = rf"compression={scheme.__name__}: pass an instance, {scheme.__name__}\(\)"
    with pytest.raises(ValueError, match=told):
        backward(net)
    assert not optimizer._handles, "nothing was sent"
    with pytest.raises(ValueError, match=told):
        hvd.allreduce(torch.ones(9), compression=scheme, name="by class")


def test_groups_that_do_not_fit():
    net, tuning = make_net(), Tuning(in_flight_bytes=4096)
    optimizer = wrap(net, ALQ(bucket_size=2**20, tuning=tuning))
    with pytest.raises(ValueError, match="lower bucket_size"):
        backward(net)
        optimizer.step()
    hvd.barrier()
