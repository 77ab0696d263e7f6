"""Steps that are given up, sparse parameters, the default exchange."""

from __future__ import annotations

import gc
import time

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model, train, wait_for
from gradient_schemes import make
from rank_optimizers import distributed, give_up
from settings_objects import exchange_of

from hvd_adaptive import ALQ, instances
from hvd_adaptive.exchange import auto
from hvd_adaptive.hooks.horovod.agreement import Agreement


def test_a_step_that_is_given_up():
    """load_state_dict between backward and step makes Horovod forget the gradients in flight."""
    model = make_model()
    compressor = ALQ(bits=8, bucket_size=256, update_steps=[])
    optimizer = distributed(model, compressor, prefix="abandoned.")
    x, y = batches(hvd.rank())()
    used = []
    for step in range(4):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        used.append(compressor._training.connection.drive.placeholders)
        if step == 2:
            give_up(optimizer)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            used.append(compressor._training.connection.drive.placeholders)
        optimizer.step()
    assert compressor.step == 4
    # Placeholders are used again unless Horovod may still reduce them.
    assert used[0] is used[1] is used[2] is not used[3] is used[4]
    assert_same_everywhere(flat_parameters(model), "abandoned")


def tear(model, optimizer, compressor, monkeypatch):
    """Backward after which rank 0 alone has sent groups, and which Horovod then forgets."""
    x, y = batches(hvd.rank())()

    def answered(grad):
        """Those that know all ranks to be there send groups with the gradients to come."""
        while not all(hvd.poll(handle) for handle, _ in optimizer._handles.values()):
            time.sleep(0.001)

    with monkeypatch.context() as torn:
        if hvd.rank():
            torn.setattr(Agreement, "answer", lambda agreement: None)
        hidden = model[0](x)
        hidden.register_hook(answered)
        torch.nn.functional.cross_entropy(model[1:](hidden), y).backward()
        names = compressor._training.connection.drive.step.names
        if hvd.rank() == 0:
            wait_for(lambda: names)
        assert bool(names) == (hvd.rank() == 0)
        give_up(optimizer)
    optimizer.zero_grad()


@pytest.mark.ranks
@pytest.mark.gloo
@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce", "hierarchical", "auto"])
def test_ranks_that_had_sent_different_groups_of_a_step_that_is_given_up(exchange, monkeypatch):
    """What some had sent and others had not neither joins a later step nor waits for ever: the
    step that ends next waits until all of it has ended."""
    model = make_model()
    compressor = ALQ(
        bits=8,
        update_steps=[],
        fusion_bytes=20_000,
        exchange="auto"
        if exchange == "auto"
        else exchange_of(exchange, ranks_per_node=1, second_stage_bits=8),
    )
    optimizer = distributed(model, compressor, prefix=f"uneven.{exchange}.")
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
    assert_same_everywhere(flat_parameters(model), f"uneven.{exchange}")
    abandoned = compressor._training.connection._binding.abandoned
    assert not (abandoned.attempt or abandoned._names or abandoned.flying or abandoned._substitutes)


def test_a_step_that_is_given_up_with_its_optimizer(monkeypatch):
    """The next optimizer's groups have the names of the last one's."""
    compressor = ALQ(bits=8, update_steps=[], fusion_bytes=20_000)
    for life in range(3):
        model = make_model()
        optimizer = distributed(model, compressor, prefix="gone.")
        train(model, optimizer, 2)
        assert_same_everywhere(flat_parameters(model), f"gone.{life}")
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
    for weight in weights:
        weight.grad = None
    for i in (2, 1, 0):
        (weights[i].sum() * (i + 1)).backward()
    optimizer.synchronize()
    for i, weight in enumerate(weights):
        torch.testing.assert_close(weight.grad.mean(), torch.tensor(i + 1.0), rtol=0.02, atol=0.0)
    assert_same_everywhere(torch.cat([w.grad for w in weights]), "lost")


@pytest.mark.parametrize("scheme", ["alq", "feedback", "ecdq"])
def test_a_sparse_parameter_is_not_sent_as_zeros(scheme):
    embedding = torch.nn.Embedding(3000, 16, sparse=True)
    head = torch.nn.Linear(16, 200)
    named = {"sparse.embedding": embedding.weight, "sparse.head": head.weight}
    compressor = make(scheme, bucket_size=128, fusion_bytes=16_000)
    head.bias.requires_grad_(False)
    optimizer = distributed(named, compressor)
    for _ in range(2):
        optimizer.zero_grad()
        head(embedding(torch.tensor([hvd.rank(), 5]))).sum().backward()
        optimizer.step()
    # Only the last piece of the 48,000 zeros shares a group with the dense gradient.
    assert head.weight.numel() <= compressor.report()["coordinates"] < 4000
    assert_same_everywhere(embedding.weight.detach(), "sparse.embedding")


def test_a_compressor_used_alone_first_finds_its_optimizer_later():
    compressor = ALQ(bits=8, bucket_size=100)
    hvd.allreduce(torch.ones(2000) * hvd.rank(), compression=compressor, name="alone")
    model = make_model()
    optimizer = distributed(model, compressor, prefix="later.")
    x, y = batches(hvd.rank())()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert compressor._training.connection.layout is not None
    assert_same_everywhere(flat_parameters(model), "later")


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_exchange_without_exchange(ranks, monkeypatch, caplog):
    """Up to ``ranks`` ranks allgather, beyond scatter_reduce; report() and the log name it."""
    monkeypatch.setattr(auto, "FEW_RANKS", ranks)
    expected = "allgather" if hvd.size() <= ranks else "scatter_reduce"
    found = []
    for exchange in (None, expected):
        instances.start_over()
        model, compressor = make_model(), ALQ(bits=4, exchange=exchange)
        optimizer = distributed(model, compressor, prefix=f"few.{ranks}.")
        with caplog.at_level("INFO", logger="hvd_adaptive"):
            train(model, optimizer, 3)
        assert compressor.report()["exchange"] == expected
        found.append(flat_parameters(model))
    assert torch.equal(*found)
    lines = [r.getMessage() for r in caplog.records if "exchange=None" in r.getMessage()]
    assert lines == [f"exchange=None: {expected}, for {hvd.size()} ranks"]
