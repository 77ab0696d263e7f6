"""Error feedback by each door: what is lost, and residuals that outgrow (see tests/nets.py)."""

from __future__ import annotations

import pytest
import torch
from nets import flat_parameters, is_same, loss_of, make_net, own_gradients, train
from scheme_cases import scheme
from torch import nn

from hvd_adaptive import QSGD, ResidualError, ScatterReduce, Tuning

__all__ = ["test_nothing_is_lost", "test_residuals_that_outgrow_on_one_rank_stop_all"]
CASES = {
    "alq": scheme("alq-3", bucket_size=256, error_feedback=1.0, update_steps=[0, 3]),
    "qsgd": scheme("qsgd-2", bucket_size=64, error_feedback=0.15, fusion_bytes=20_000),
    "terngrad": scheme("terngrad", bucket_size=64, error_feedback=0.5, tail="full"),
    "sparse": scheme("sparse-0.2", bucket_size=256, error_feedback=0.2),
    "auto": scheme("qsgd-2", bucket_size=64, error_feedback="auto", fusion_bytes=20_000),
    "auto_tensors": scheme(
        "qsgd-4-linf",
        bucket_size=64,
        scope="tensor",
        error_feedback="auto",
        exchange=ScatterReduce(second_stage_bits=32),
    ),
}


class Branches(nn.Module):
    """Parameters that not every step, nor every rank, uses."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.head = nn.Linear(40, 60), nn.Linear(60, 10)
        self.odd, self.first, self.never = (nn.Linear(60, 60) for _ in range(3))
        self.rank, self.number = rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.trunk(x))
        if self.number % 2:
            x = x + self.odd(x)
        return self.head(x + self.first(x) if self.rank == 0 else x)


def residuals_of(compressor) -> dict[str, torch.Tensor]:
    return compressor.state_dict()["residuals"]["parameters"]


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost(door, rank, gather, case):
    """All that was applied and what the ranks still hold, on average, are the average of all
    gradients (Eqs 14a-d, whatever β)."""
    net, compressor = Branches(rank), CASES[case]()
    training = door(net, compressor, find_unused_parameters=True)
    named = dict(net.named_parameters())
    applied, given = ({n: torch.zeros_like(p).double() for n, p in named.items()} for _ in "ag")
    for step in range(6):
        net.number = step
        for name, gradient in own_gradients(net, step, rank).items():
            given[name] += gradient
        training.optimizer.zero_grad()
        training.average(loss_of(training.model, step, rank))
        for name, parameter in named.items():
            if parameter.grad is not None:
                applied[name] += parameter.grad
        assert net.never.weight.grad is None or not net.never.weight.grad.any()
        training.step()
    residuals = residuals_of(compressor)
    assert set(residuals) <= {n for n, p in named.items() if p.numel() >= 1024}
    for name, parameter in named.items():
        held = residuals.get(name, torch.zeros(parameter.numel())).view(parameter.shape)
        peers = gather(held)
        expected = gather(given[name]).mean(0)
        scale = max(float(expected.abs().max()), float(held.abs().max()))
        total = applied[name] + peers.double().mean(0)
        torch.testing.assert_close(total, expected, rtol=0, atol=2e-6 * scale)
        if name in ("trunk.weight", "odd.weight"):
            assert held.square().sum() > 1e-3 * given[name].square().sum(), "something is held"
            assert not torch.equal(peers[0], peers[1]), "each rank holds its own"


@pytest.mark.parametrize("worker", (True, False))
@pytest.mark.parametrize("place", (0, -1))
def test_residuals_that_outgrow_on_one_rank_stop_all(door, rank, ranks, gather, place, worker):
    """All ranks raise the same before parameters change, and all can go on."""
    broken, net = place % ranks, make_net()
    compressor = QSGD(
        bits=4,
        norm="linf",
        bucket_size=64,
        error_feedback=1.0,
        tuning=Tuning(worker=worker),
        fusion_bytes=20_000,
    )
    training = door(net, compressor)
    train(training, rank, range(3))
    residuals = compressor._training.residuals._current.values()
    kept = [residual.clone() for residual in residuals]
    if rank == broken:
        for residual in residuals:
            residual.copy_(1e5 * torch.randn(residual.shape))
    before = flat_parameters(net)
    with pytest.raises(ResidualError) as raised:
        train(training, rank, [3])
    message = str(raised.value)
    assert "step 3: error_feedback=1.0: residuals have outgrown" in message
    assert f" at rank {broken}; the measured" in message
    assert torch.equal(flat_parameters(net), before) and compressor.step == 3
    assert is_same(gather, message)
    for residual, own in zip(compressor._training.residuals._current.values(), kept, strict=True):
        assert rank == broken or torch.equal(residual, own)
        residual.zero_()
    if training.restart():
        assert all(bool(p.grad.isnan().all()) for p in net.parameters())
        train(training, rank, [4, 5])
        assert compressor.step == 5
        assert is_same(gather, flat_parameters(net))
