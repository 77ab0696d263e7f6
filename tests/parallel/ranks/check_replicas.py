"""Parameters that differ between ranks: all of them warn, once, and go on."""

from __future__ import annotations

import logging

import horovod.torch as hvd
import pytest
import torch
from conftest import make_model, train

from hvd_adaptive import QSGD, Tuning


def differing(model: torch.nn.Module, name: str) -> None:
    """As if the first rank alone had loaded a checkpoint."""
    if hvd.rank() == 0:
        with torch.no_grad():
            dict(model.named_parameters())[name].view(-1)[5] += 1e-3


def distributed(model: torch.nn.Module, compressor, parameters=()) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(parameters or model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [m for m in caplog.messages if m.startswith("ranks have different parameters")]


@pytest.mark.parametrize("worker", [True, False])
def test_the_first_step_names_the_first_parameter(worker, caplog):
    model = make_model()
    optimizer = distributed(model, QSGD(bits=4, tuning=Tuning(worker=worker)))
    names = [name for name, _ in model.named_parameters()]
    differing(model, names[-1])
    differing(model, names[2])
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        train(model, optimizer, 3, seed=1)
    (message,) = told(caplog)
    others = "rank 1" if hvd.size() == 2 else f"ranks 1-{hvd.size() - 1}"
    assert f"parameter {names[2]} of {others} differs" in message
    assert "and 1 more do" in message


@pytest.mark.parametrize("held", [True, False])
def test_frozen_parameters(held, caplog):
    """They are compared, whether the optimizer holds them or not."""
    model = make_model()
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if held or p.requires_grad]
    optimizer = distributed(model, QSGD(bits=4), trained)
    differing(model, "0.weight")
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        train(model, optimizer, 2, seed=1)
    (message,) = told(caplog)
    assert "parameter 0.weight of rank" in message and "more do" not in message


def test_parameters_of_no_optimizer(caplog):
    """Parameters that the optimizer does not hold, and that require a gradient, are others'."""
    model = make_model()
    optimizer = distributed(model, QSGD(bits=4), list(model.parameters())[1:])
    differing(model, "0.weight")
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        train(model, optimizer, 2, seed=1)
    assert not told(caplog)


@pytest.mark.parametrize("by", ["all ranks", "one rank"])
def test_the_first_step_after_a_state_was_loaded(by, caplog):
    """By any rank, and with the same step; changed settings compare nothing again."""
    model, compressor = make_model(), QSGD(bits=4)
    optimizer = distributed(model, compressor)
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        train(model, optimizer, 2, seed=1)
        differing(model, "0.weight")
        compressor.set(bits=5)
        train(model, optimizer, 1, seed=2)
        assert not told(caplog)
        if by == "all ranks" or hvd.rank() == hvd.size() - 1:
            compressor.load_state_dict(compressor.state_dict())
        train(model, optimizer, 2, seed=3)
    assert len(told(caplog)) == 1 and "parameter 0.weight of" in told(caplog)[0]
