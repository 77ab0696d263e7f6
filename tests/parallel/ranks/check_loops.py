"""The ways in which training loops are written."""

from __future__ import annotations

import shutil

import horovod.torch as hvd
import pytest
import torch
from training import (
    assert_same_everywhere,
    batches,
    distributed,
    every_scheme,
    flat_parameters,
    loss_of,
    make,
    make_model,
    take_step,
    train,
)

from hvd_adaptive import QSGD, instances


@every_scheme
def test_adam_with_every_option_of_its_loop(scheme):
    """Fused and for-each steps want gradients of the weights' strides."""
    ends = []
    for options in ({"fused": True}, {"foreach": True}):
        instances.start_over()
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Unflatten(1, (4, 5, 5)),
            torch.nn.Conv2d(4, 16, 5),
            torch.nn.Flatten(),
            torch.nn.Linear(16, 10),
        ).to(memory_format=torch.channels_last)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-3, **options),
            named_parameters=model.named_parameters(),
            compression=make(scheme, min_numel=100),
        )
        train(model, optimizer, 3)
        for tensor in (model[1].weight, model[1].weight.grad):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert_same_everywhere(model)
        ends.append(flat_parameters(model))
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


@every_scheme
def test_lbfgs_closures(scheme):
    """The closure synchronises, each time that it is called; its loss is everybody's."""
    model = make_model(width=30)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
        named_parameters=model.named_parameters(),
        compression=make(scheme, min_numel=100),
    )
    batch, called = batches(hvd.rank())(), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.synchronize()
        called.append(loss.item())
        return hvd.allreduce(loss.detach(), name="closure.loss")

    for _ in range(2):
        with optimizer.skip_synchronize():
            optimizer.step(closure)
    assert len(called) > 2 and called[-1] < called[0]
    assert_same_everywhere(model)


def assert_compiled_alike(scheme: str, backend: str, everywhere: bool = True) -> None:
    plain, other = make_model(width=30), make_model(width=30)
    compiled = torch.compile(other, backend=backend) if everywhere or hvd.rank() == 0 else other
    for model, call in ((plain, plain), (other, compiled)):
        instances.start_over()
        train(call, distributed(model, make(scheme, min_numel=100)), 3)
    assert_same_everywhere(other)
    torch.testing.assert_close(flat_parameters(other), flat_parameters(plain))


@pytest.mark.parametrize("scheme", ["alq", "feedback"])
def test_a_compiled_model(scheme):
    assert_compiled_alike(scheme, "aot_eager")


@pytest.mark.timeout(240)
def test_a_model_compiled_by_inductor():
    """On one rank of two, once: a C++ compiler takes seconds."""
    if hvd.size() != 2 or not hvd.mpi_enabled():
        pytest.skip("with 2 ranks under mpirun")
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    assert_compiled_alike("alq", "inductor", everywhere=False)


def test_nothing_but_a_step_changes_torchs_generators():
    model, batch = make_model(), batches(hvd.rank())()
    optimizer = distributed(model, make("alq", min_numel=100))
    torch.use_deterministic_algorithms(True)
    try:
        before = torch.get_rng_state()
        for _ in range(2):
            take_step(optimizer, loss_of(model, batch))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("scheme", ["alq", "feedback"])
def test_unfrozen_after_construction_is_told(scheme, said):
    """Horovod has no hook for what was frozen when its optimizer was made."""
    model = make_model(width=30)
    model[2].weight.requires_grad_(False)
    optimizer = distributed(model, make(scheme, min_numel=100))
    train(model, optimizer, 1)
    assert not said("2.weight")
    model[2].weight.requires_grad_(True)
    train(model, optimizer, 2)
    (message,) = said("2.weight")
    assert "was frozen when hvd.DistributedOptimizer was made" in message


def test_what_joins_the_optimizer_later_is_told(said):
    """A group that is added after the first step, and a layer that is unfrozen in it still later:
    each is named once."""
    model, compressor = make_model(width=30), QSGD(bits=4)
    model[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
    extra = torch.nn.Parameter(torch.zeros(7))  # without a name
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": [*model[2].parameters(), extra]})
    train(model, optimizer, 1)
    assert not said("added to it later")
    for number, name in enumerate(("bias", "weight")):
        getattr(model[2], name).requires_grad_(True)
        compressor.set(bits=5 + number)  # the compressor is bound anew
        train(model, optimizer, 2)
        messages = said("added to it later")
        assert len(messages) == number + 1 and messages[number].startswith(f"2.{name}: ")
    extra.grad = torch.ones(7)
    loss_of(model, batches(hvd.rank())()).backward()
    optimizer.step()
    assert said("parameter 2 of group 1: ")
