"""``integrations.accelerate`` in the real library: save_state and load_state, two ranks."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from nets import flat_parameters
from trainer_runs import SCALE, compressor, network, same_everywhere, shared_folder, with_fp16

from hvd_adaptive import LocalSGD
from hvd_adaptive.ddp import CompressionState, compression_hook
from hvd_adaptive.integrations.accelerate import compress


def make(**options):
    # Otherwise DDP builds its buckets anew after a step, and after a resume once more.
    kept = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kept], **options)
    if accelerator.mixed_precision == "fp16":
        with_fp16(accelerator)
    net = network()
    return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


def train(accelerator, model, optimizer, steps, overflows=None):
    """overflows: The step in which rank 0 does."""
    for step in steps:
        for part in range(accelerator.gradient_accumulation_steps):
            generator = torch.Generator().manual_seed(100 * step + 10 * part)
            inputs = torch.randn(8, 16, generator=generator)[accelerator.process_index :: 2]
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs)[:, 0], inputs.sum(1).sin())
                overflow = accelerator.is_main_process and step == overflows
                accelerator.backward(loss * torch.inf if overflow else loss)
                optimizer.step()
                optimizer.zero_grad()


@pytest.fixture
def another_precision():
    """Accelerate keeps one for the process."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_bf16_and_a_compiled_model(precision, another_precision):
    accelerator, model, optimizer = make(mixed_precision=precision)
    if precision == "no":
        model = torch.compile(model, backend="aot_eager")
    own = compressor()
    compress(accelerator, model, own)
    before = flat_parameters(model)
    train(accelerator, model, optimizer, range(3))
    assert own.step == 3
    assert 4 < own.report()["bits_per_coordinate"] < 9
    assert not torch.equal(flat_parameters(model), before)
    same_everywhere(flat_parameters(model))


def test_register_for_checkpointing_restores_what_ranks_share(caplog):
    """Accelerate saves objects of rank 0 alone: others lose their residuals, with a warning."""
    with shared_folder() as folder:
        accelerator, model, optimizer = make()
        own = compressor()
        state = CompressionState(own, model.named_parameters())
        model.register_comm_hook(state, compression_hook)
        accelerator.register_for_checkpointing(own)
        train(accelerator, model, optimizer, range(3))
        accelerator.save_state(folder)
        train(accelerator, model, optimizer, range(3, 4))
        with caplog.at_level(logging.WARNING, logger="hvd_adaptive"):
            accelerator.load_state(folder)
            assert own.step == 3
            train(accelerator, model, optimizer, range(3, 4))
        assert own.step == 4
        same_everywhere(flat_parameters(model))
    warned = "its residuals were saved by rank 0" in caplog.text
    assert warned == (accelerator.process_index != 0)


def test_a_model_that_is_prepared_again_continues():
    accelerator, model, optimizer = make()
    own = compressor()
    attachment = compress(accelerator, model, own)
    train(accelerator, model, optimizer, range(2))
    net = accelerator.unwrap_model(model)
    accelerator.free_memory()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    attachment.attach(model)
    attachment.attach(model)  # it has the hook
    train(accelerator, model, optimizer, range(2, 4))
    assert own.step == 4
    same_everywhere(flat_parameters(model))


@pytest.mark.parametrize("prepares_model", [False, True])
def test_local_sgd(prepares_model, caplog):
    """A prepared LocalSGD counts the steps that accumulation lets happen; a model that DDP averages
    is warned of."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = network()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = LocalSGD(inner, every=2, compression=compressor(), momentum=0.5, lr=0.5)
    model = accelerator.prepare(net) if prepares_model else net
    prepared = accelerator.prepare(optimizer)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    before = flat_parameters(net)
    with caplog.at_level(logging.WARNING, logger="hvd_adaptive"):
        for step in range(4):
            train(accelerator, model, prepared, [step])
            assert optimizer.rounds == (step + 1) // 2
            schedule.step()
    assert inner.param_groups[0]["lr"] < 0.1
    assert not torch.equal(before, flat_parameters(net))
    same_everywhere(flat_parameters(net))
    assert ("moved their parameters in the same way" in caplog.text) == prepares_model


def test_local_sgd_overflows_on_one_rank(another_precision):
    """The schedule takes that step on every rank, and the round comes after it."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    with_fp16(accelerator)
    net = network()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = LocalSGD(inner, every=2, compression=compressor())
    prepared = accelerator.prepare(optimizer)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    for step in range(4):
        before = flat_parameters(net)
        train(accelerator, net, prepared, [step], overflows=2)
        moves = step % 2 == 1 or not (step == 2 and accelerator.is_main_process)
        assert torch.equal(before, flat_parameters(net)) != moves
        assert not prepared.step_was_skipped
        schedule.step()
        # Accelerate takes a step of the schedule for each rank.
        assert inner.param_groups[0]["lr"] == 0.1 * 0.5 ** (2 * (step + 1))
    scale = SCALE / 2 if accelerator.is_main_process else SCALE
    assert accelerator.scaler.get_scale() == scale
    assert optimizer.rounds == 2
    same_everywhere(flat_parameters(net))


def test_what_is_no_compressor_is_refused():
    accelerator, model, _ = make()
    with pytest.raises(ValueError, match="compressor=3: must be a compressor"):
        compress(accelerator, model, 3)
