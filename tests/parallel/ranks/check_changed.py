"""Parameters that change between steps, and gradients that change too late."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from nets import gradients_of
from training import (
    assert_same_everywhere,
    batches,
    distributed,
    loss_of,
    make_model,
    mean,
    residuals_of,
    trained,
)

from hvd_adaptive import ALQ, QSGD, Hierarchical, RankMismatchError, ScatterReduce

WARNING = "the gradient was changed between backward() and optimizer.step()"
# Of float64 gradients, quantised in float32; and of averages rounded to bfloat16.
TOLERANCE = {torch.float64: 1e-6, torch.bfloat16: 2.0**-7, torch.float32: 1e-6}
EXCHANGES = {
    "allgather": {},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=32)},
    "hierarchical": {"exchange": Hierarchical(ranks_per_node=1, second_stage_bits=32)},
}


def flat(model: torch.nn.Module, of: dict[str, torch.Tensor]) -> torch.Tensor:
    """What ``of`` has for the parameters, zeros where it has none, in one vector."""
    parts = [of.get(n, torch.zeros(p.numel())) for n, p in model.named_parameters()]
    return torch.cat([part.detach().reshape(-1).double() for part in parts])


def check_a_step(model, optimizer, compressor, tolerance: float) -> None:
    """What is applied and what residuals keep add up to all gradients, averaged exactly."""
    batch, dtype = batches(hvd.rank(), seed=7)(), next(model.parameters()).dtype
    optimizer.zero_grad()
    before = mean(flat(model, residuals_of(compressor)))
    own = gradients_of(model, lambda model: loss_of(lambda x: model(x.to(dtype)), batch))
    exact = mean(flat(model, own))
    loss_of(lambda x: model(x.to(dtype)), batch).backward()
    optimizer.step()
    after = mean(flat(model, residuals_of(compressor)))
    applied = {name: p.grad for name, p in model.named_parameters()}
    wrong = flat(model, applied) + after - (exact + before)
    assert wrong.norm() <= tolerance * exact.norm(), wrong.norm() / exact.norm()
    assert_same_everywhere(*applied.values())


@pytest.mark.parametrize("feedback", [1.0, None])
@pytest.mark.parametrize(
    ("exchange", "fusion_bytes", "dtype"),
    [
        ("allgather", 40_000, torch.float64),
        ("allgather", 2**24, torch.bfloat16),
        ("scatter_reduce", 40_000, torch.bfloat16),
        ("scatter_reduce", 2**24, torch.float64),
        ("hierarchical", 40_000, torch.float64),
    ],
)
def test_the_model_changes_its_dtype(exchange, fusion_bytes, dtype, feedback, caplog):
    """Residuals go on, by parameters' names. Without them nothing is lost but the rounding to 127
    levels of a bucket's largest coordinate: a share of 4/127 of the norm where that is four times
    the root mean square."""
    if feedback and exchange == "hierarchical":
        pytest.skip("not allowed")
    keywords = {"norm": "linf", "bucket_size": 128, "fusion_bytes": fusion_bytes}
    bits = 4 if feedback else 8
    compressor = QSGD(bits=bits, error_feedback=feedback, **keywords, **EXCHANGES[exchange])
    model, optimizer = trained(compressor, 2)
    assert any(bool(r.any()) for r in residuals_of(compressor).values()) == bool(feedback)
    for of in (dtype, dtype, torch.float32):
        check_a_step(model.to(of), optimizer, compressor, TOLERANCE[of] if feedback else 4 / 127)
    assert compressor.step == 5 and not caplog.records


def test_one_rank_alone_changes_its_dtype():
    model, optimizer = trained(QSGD(), 2)
    dtype = torch.float64 if hvd.rank() == 0 else torch.float32
    model.to(dtype)
    x, y = batches(hvd.rank())()
    with pytest.raises(RankMismatchError):
        loss_of(model, (x.to(dtype), y)).backward()
        optimizer.step()
    hvd.barrier()


def test_a_dtype_that_changes_too_late_is_an_error():
    model = make_model()
    optimizer = distributed(model, QSGD(seed=1))
    loss_of(model, batches(hvd.rank())()).backward()
    model.double()
    with pytest.raises(ValueError, match=r"0\.bias: its gradient is float64 \(300,\) where"):
        optimizer.step()
    hvd.barrier()


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def replace(model):
    for p in model.parameters():
        p.grad = p.grad * 0.5


def one_by_hand(model):
    with torch.no_grad():
        model[2].weight.grad[0].zero_()


@pytest.mark.parametrize("update_steps", [[], [0, 1]], ids=["early", "late"])
@pytest.mark.parametrize("change", [clip, replace, one_by_hand])
def test_a_change_that_is_too_late_is_told_once(change, update_steps, said):
    """Whether groups leave during the backward pass or at the end of it."""
    model, batch = make_model(), batches(hvd.rank())()
    optimizer = distributed(model, ALQ(update_steps=update_steps, fusion_bytes=40_000))
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        change(model)
        optimizer.step()
    (told,) = said(WARNING)
    first = "2.weight" if change is one_by_hand else "0.bias and 5 more"
    assert told.startswith(f"{first}: the gradient was changed") and "skip_synchronize" in told


@pytest.mark.parametrize("way", ["unscale_", "step", "off"])
def test_unscaling_that_is_too_late_is_told(way, said):
    """``scaler.step`` unscales what has not been unscaled; versions of tensors do not show it."""
    model, batch = make_model(), batches(hvd.rank())()
    optimizer = distributed(model, QSGD())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=way != "off")
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if way == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    told = said(WARNING)
    assert len(told) == (way != "off")
    assert all(text.startswith("0.bias and 5 more: the gradient was changed") for text in told)


class Views(torch.nn.Module):
    """Gradients that are views of one tensor, and one that two parameters may share."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.randn(40, 40) for _ in range(4)])
        self.a, self.b = (torch.nn.Parameter(torch.randn(160, 40)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (torch.cat(list(self.parts)) + (self.a + self.b)).t()


class Bag(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 40, sparse=sparse)
        self.out = torch.nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((x[:, 0] * 5).long() % 50))


def plainly(model, optimizer):
    optimizer.step()


def clipped(model, optimizer):
    optimizer.synchronize()
    clip(model)
    with optimizer.skip_synchronize():
        optimizer.step()


def amp(model, optimizer, clips=True):
    optimizer.synchronize()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    if not clips:
        return scaler.step(optimizer)
    clip(model)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def amp_twice(model, optimizer):
    """Without skip_synchronize(): averages travel once more, and Horovod warns of that."""
    amp(model, optimizer, clips=False)


CASES = {
    "linear": (lambda: torch.nn.Linear(40, 40), {}, 1),
    "groups": (lambda: torch.nn.Sequential(*[torch.nn.Linear(40, 40)] * 3), {"num_groups": 2}, 1),
    "several passes": (lambda: torch.nn.Linear(40, 40), {"backward_passes_per_step": 3}, 3),
    "views": (Views, {}, 1),
    "views, several passes": (Views, {"backward_passes_per_step": 3}, 3),
    "sparse": (lambda: Bag(True), {}, 1),
    "sparse as dense": (lambda: Bag(True), {"sparse_as_dense": True}, 1),
    "dense embedding": (lambda: Bag(False), {"backward_passes_per_step": 2}, 2),
}


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("step", [plainly, clipped, amp, amp_twice])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_told_of_what_is_right(case, step, to_none, said):
    make, keywords, passes = CASES[case]
    if "sparse" in case and step is not plainly:
        pytest.skip("torch clips no sparse gradients")
    model, compressor = make(), QSGD(bits=4, min_numel=10, fusion_bytes=4000)
    optimizer = distributed(model, compressor, **keywords)
    for number in range(3):
        torch.optim.SGD.zero_grad(optimizer, set_to_none=to_none)
        for more in range(passes):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(9 * number + more))
            model(x + hvd.rank()).square().sum().backward()
        step(model, optimizer)
    assert compressor.step == (6 if step is amp_twice else 3) and not said(WARNING)
