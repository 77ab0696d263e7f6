"""Steps that are given up: Horovod forgets gradients in flight (``load_state_dict`` between the
backward pass and the step). tests/unit/hooks/horovod/test_any_order.py explores their schedules."""

from __future__ import annotations

import gc
import time

import horovod.torch as hvd
import pytest
import torch
from settings_objects import exchange_of
from training import (
    assert_same_everywhere,
    batches,
    distributed,
    flat_parameters,
    give_up,
    loss_of,
    make_model,
    train,
    trained,
    wait_for,
)

from hvd_adaptive import ALQ, instances
from hvd_adaptive.hooks.horovod.agreement import Agreement


def tear(model, optimizer, compressor, monkeypatch):
    """Backward after which the first rank alone has sent groups, and which is then given up."""

    def answered(grad):
        """Those that know all ranks to be there send groups with the gradients to come."""
        while not all(hvd.poll(handle) for handle, _ in optimizer._handles.values()):
            time.sleep(0.001)

    def forward(x):
        hidden = model[0](x)
        hidden.register_hook(answered)
        return model[1:](hidden)

    sends = hvd.rank() == 0
    with monkeypatch.context() as torn:
        if not sends:
            torn.setattr(Agreement, "answer", lambda agreement: None)
        loss_of(forward, batches(hvd.rank())()).backward()
        names = compressor._training.connection.drive.step.names
        if sends:
            wait_for(lambda: names)
        assert bool(names) == sends
        give_up(optimizer)
    optimizer.zero_grad()


@pytest.mark.ranks
@pytest.mark.gloo
@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce", "hierarchical", "auto"])
def test_ranks_that_had_sent_different_groups(exchange, monkeypatch):
    """What some had sent and others had not neither joins a later step nor waits for ever: the
    step that ends next waits until all of it has ended."""
    model, settings = make_model(), {"ranks_per_node": 1, "second_stage_bits": 8}
    kind = "auto" if exchange == "auto" else exchange_of(exchange, **settings)
    compressor = ALQ(bits=8, update_steps=[], fusion_bytes=20_000, exchange=kind)
    optimizer = distributed(model, compressor)
    train(model, optimizer, 2)
    for _ in range(2):
        tear(model, optimizer, compressor, monkeypatch)
        train(model, optimizer, 1)
        if exchange == "allgather":  # what was given up has been sent, too
            report = compressor.report()
            of_step = report["payload_bytes"] * (hvd.size() - 1)
            assert (report["wire_bytes"] > of_step) == (hvd.rank() == 0)
        train(model, optimizer, 1)
    assert compressor.step == 6
    assert_same_everywhere(model)
    abandoned = compressor._training.connection._binding.abandoned
    assert not (abandoned.attempt or abandoned._names or abandoned.flying or abandoned._substitutes)


def test_a_step_that_is_given_up_with_its_optimizer(monkeypatch):
    """The next optimizer's groups have the names of the last one's."""
    compressor = ALQ(bits=8, update_steps=[], fusion_bytes=20_000)
    for _ in range(3):
        model, optimizer = trained(compressor, 2)
        assert_same_everywhere(model)
        tear(model, optimizer, compressor, monkeypatch)
        del model, optimizer
        gc.collect()


def test_a_backward_that_was_lost_in_part():
    """Horovod forgets a backward that reached two of three gradients; the next one, in another
    order, must neither join it nor mix with it."""
    weights = [torch.nn.Parameter(torch.zeros(3000)) for _ in range(3)]
    compressor = ALQ(bits=8, bucket_size=100, update_steps=[], fusion_bytes=12_000)
    optimizer = distributed({f"lost.{i}": w for i, w in enumerate(weights)}, compressor)
    (weights[0].sum() * 1000 + weights[1].sum() * 1000).backward()
    give_up(optimizer)
    optimizer.zero_grad()
    for i in (2, 1, 0):
        (weights[i].sum() * (i + 1)).backward()
    optimizer.step()
    for i, weight in enumerate(weights):
        torch.testing.assert_close(weight.grad.mean(), torch.tensor(i + 1.0), rtol=0.02, atol=0.0)
    assert_same_everywhere(*(w.grad for w in weights))


def test_a_state_that_is_restored_in_mid_step():
    """What follows is the same bits as without the step that is given up, the report too."""
    ends = []
    for interrupted in (False, True):
        instances.start_over()
        model, compressor = make_model(), ALQ(bits=3, error_feedback="auto", update_steps=[0])
        optimizer = distributed(model, compressor, prefix=f"restored.{interrupted}.")
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compressor)
        train(model, optimizer, 2)
        state.save()
        if interrupted:
            loss_of(model, batches(hvd.rank(), 9)()).backward()
            meter = compressor._training.meter
            wait_for(lambda of=meter: of.squares and of.current.coordinates)
            handles = [handle for handle, _ in optimizer._handles.values()]
            state.restore()
            for handle in handles:
                hvd.synchronize(handle)
            optimizer.zero_grad()
        train(model, optimizer, 3, seed=1)
        report = compressor.report()
        figures = report["coordinates"], report["payload_bytes"], report["relative_error"]
        ends.append((figures, flat_parameters(model)))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])
