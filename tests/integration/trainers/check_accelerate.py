"""``integrations.accelerate`` in the real library: save_state and load_state, two ranks."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from trainer_runs import same_everywhere, shared_folder, state_of

from hvd_adaptive import ALQ, LocalSGD
from hvd_adaptive.ddp import CompressionState, compression_hook
from hvd_adaptive.integrations.accelerate import compress


def make(**options):
    # Otherwise DDP builds its buckets anew after a step, and after a resume once more.
    kept = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kept], **options)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
    return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


def train(accelerator, model, optimizer, steps):
    for step in steps:
        for part in range(accelerator.gradient_accumulation_steps):
            generator = torch.Generator().manual_seed(100 * step + 10 * part)
            inputs = torch.randn(8, 16, generator=generator)[accelerator.process_index :: 2]
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs)[:, 0], inputs.sum(1).sin())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


def compressor() -> ALQ:
    return ALQ(bits=4, error_feedback=1.0)


@pytest.mark.parametrize("accumulated", [1, 2])
def check_a_resumed_loop_repeats_the_uninterrupted_one(accumulated, caplog):
    with shared_folder() as folder:
        accelerator, model, optimizer = make(gradient_accumulation_steps=accumulated)
        own = compressor()
        compress(accelerator, model, own)
        train(accelerator, model, optimizer, range(3))
        accelerator.save_state(folder)
        train(accelerator, model, optimizer, range(3, 6))
        assert own.step == 6
        assert 4 < own.report()["bits_per_coordinate"] < 9
        whole = state_of(model)

        accelerator.free_memory()
        accelerator, model, optimizer = make(gradient_accumulation_steps=accumulated)
        own = compressor()
        compress(accelerator, model, own)
        with caplog.at_level(logging.WARNING, logger="hvd_adaptive"):
            accelerator.load_state(folder)
            train(accelerator, model, optimizer, range(3, 6))
        assert own.step == 6
        assert not [r for r in caplog.records if r.name == "hvd_adaptive"]
        assert torch.equal(state_of(model), whole)
        same_everywhere(state_of(model))


def check_register_for_checkpointing_restores_what_ranks_share(caplog):
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
        same_everywhere(state_of(model))
    warned = "its residuals were saved by rank 0" in caplog.text
    assert warned == (accelerator.process_index != 0)


def check_a_model_that_is_prepared_again_continues():
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
    same_everywhere(state_of(model))


@pytest.mark.parametrize("prepares_model", [False, True])
def check_local_sgd(prepares_model, caplog):
    """A prepared LocalSGD counts the steps that accumulation lets happen; a model that DDP averages
    is warned of."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = LocalSGD(inner, every=2, compression=compressor(), momentum=0.5, lr=0.5)
    model = accelerator.prepare(net) if prepares_model else net
    prepared = accelerator.prepare(optimizer)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    before = state_of(net)
    with caplog.at_level(logging.WARNING, logger="hvd_adaptive"):
        for step in range(4):
            train(accelerator, model, prepared, [step])
            assert optimizer.rounds == (step + 1) // 2
            schedule.step()
    assert inner.param_groups[0]["lr"] < 0.1
    assert not torch.equal(before, state_of(net))
    same_everywhere(state_of(net))
    assert ("moved their parameters in the same way" in caplog.text) == prepares_model


def check_what_is_no_compressor_is_refused():
    accelerator, model, _ = make()
    with pytest.raises(ValueError, match="compressor=3: must be a compressor"):
        compress(accelerator, model, 3)
