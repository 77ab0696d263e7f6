"""Parameters that change between steps, and gradients that change too late."""

from __future__ import annotations

import itertools
import logging

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, make_model, train
from rank_optimizers import distributed

from hvd_adaptive import ALQ, QSGD, Hierarchical, RankMismatchError, ScatterReduce

WARNING = "the gradient was changed between backward() and optimizer.step()"
SEEDS = itertools.count(5000)
LOSS = torch.nn.functional.cross_entropy
# Of float64 gradients, quantised in float32; and of averages rounded to bfloat16.
TOLERANCE = {torch.float64: 1e-6, torch.bfloat16: 2.0**-7, torch.float32: 1e-6}
EXCHANGES = {
    "allgather": {},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=32)},
    "hierarchical": {"exchange": Hierarchical(ranks_per_node=1, second_stage_bits=32)},
}


def mean_over_ranks(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return hvd.allgather(tensor.double()[None], name=name).mean(dim=0)


def flat(model: torch.nn.Module, of: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Gradients in one vector, or what ``of`` has for the parameters, zeros where it has none."""
    parts = []
    for name, p in model.named_parameters():
        part = p.grad if of is None else of.get(name, torch.zeros(p.numel()))
        parts.append(part.detach().reshape(-1).double())
    return torch.cat(parts)


def residuals(compressor) -> dict[str, torch.Tensor]:
    return compressor.state_dict().get("residuals", {}).get("parameters", {})


def backward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = batch
    LOSS(model(x.to(next(model.parameters()).dtype)), y).backward()


def check_a_step(model, optimizer, compressor, name: str, tolerance: float) -> None:
    """What is applied and what residuals keep add up to all gradients, averaged exactly."""
    batch = batches(hvd.rank(), seed=7)()
    optimizer.zero_grad()
    before = mean_over_ranks(flat(model, residuals(compressor)), f"{name}.before")
    alone = make_model()
    alone.load_state_dict(model.state_dict())
    alone.to(next(model.parameters()).dtype)
    backward(alone, batch)
    exact = mean_over_ranks(flat(alone), f"{name}.exact")
    backward(model, batch)
    optimizer.synchronize()
    after = mean_over_ranks(flat(model, residuals(compressor)), f"{name}.after")
    with optimizer.skip_synchronize():
        optimizer.step()
    wrong = flat(model) + after - (exact + before)
    assert wrong.norm() <= tolerance * exact.norm(), wrong.norm() / exact.norm()
    averages = torch.cat([p.grad.double().reshape(-1) for p in model.parameters()])
    assert_same_everywhere(averages, name)


CHANGES = [
    ("allgather", 40_000, torch.float64),
    ("allgather", 2**24, torch.bfloat16),
    ("scatter_reduce", 40_000, torch.bfloat16),
    ("scatter_reduce", 2**24, torch.float64),
]


@pytest.mark.parametrize(("exchange", "fusion_bytes", "dtype"), CHANGES)
def test_the_model_changes_its_dtype_with_residuals(exchange, fusion_bytes, dtype, caplog):
    """Residuals go on, by parameters' names."""
    model = make_model()
    compressor = QSGD(
        bits=4,
        norm="linf",
        bucket_size=512,
        error_feedback=1.0,
        fusion_bytes=fusion_bytes,
        **EXCHANGES[exchange],
    )
    optimizer = distributed(model, compressor)
    name = f"{exchange}.{fusion_bytes}.{dtype}"
    train(model, optimizer, 2)
    assert any(bool(r.any()) for r in residuals(compressor).values())
    model.to(dtype)
    for step in range(3):
        check_a_step(model, optimizer, compressor, f"{name}.{step}", TOLERANCE[dtype])
    model.float()
    check_a_step(model, optimizer, compressor, f"{name}.back", TOLERANCE[torch.float32])
    assert compressor.step == 6 and not caplog.records


@pytest.mark.parametrize(
    ("exchange", "fusion_bytes", "dtype"), [*CHANGES, ("hierarchical", 40_000, torch.float64)]
)
def test_the_model_changes_its_dtype(exchange, fusion_bytes, dtype):
    """Nothing is lost but the rounding to 127 levels of a bucket's largest coordinate: a share of
    4/127 of the norm where that is four times the root mean square."""
    model = make_model()
    keywords = {"bits": 8, "norm": "linf", "bucket_size": 128, "fusion_bytes": fusion_bytes}
    compressor = QSGD(**keywords, **EXCHANGES[exchange])
    optimizer = distributed(model, compressor)
    train(model, optimizer, 2)
    model.to(dtype)
    check_a_step(model, optimizer, compressor, f"plain.{exchange}.{fusion_bytes}.{dtype}", 4 / 127)


def warnings(caplog) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if WARNING in r.msg and r.levelno == logging.WARNING
    ]


def clip(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_values(model, optimizer):
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def foreach(model, optimizer):
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)


def replace(model, optimizer):
    for p in model.parameters():
        p.grad = p.grad * 0.5


def one_by_hand(model, optimizer):
    with torch.no_grad():
        model[2].weight.grad[0].zero_()


def set_data(model, optimizer):
    model[2].weight.grad.data = model[2].weight.grad * 0.5


TOO_LATE = [clip, clip_values, foreach, replace, one_by_hand, set_data]


@pytest.mark.parametrize("update_steps", [[], [0, 1]], ids=["early", "late"])
@pytest.mark.parametrize("change", TOO_LATE, ids=lambda f: f.__name__)
def test_a_change_that_is_too_late_is_told_once(change, update_steps, caplog):
    """Whether groups leave during the backward pass or at the end of it."""
    model = make_model()
    optimizer = distributed(model, ALQ(update_steps=update_steps, fusion_bytes=40_000))
    batch = batches(hvd.rank())()
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, batch)
        change(model, optimizer)
        optimizer.step()
    (told,) = warnings(caplog)
    several = change not in (one_by_hand, set_data)
    first = "0.bias and 5 more" if several else "2.weight"
    assert told.startswith(f"{first}: the gradient was changed") and "skip_synchronize" in told


@pytest.mark.parametrize("by_hand", [True, False], ids=["unscale_", "step"])
def test_unscaling_that_is_too_late_is_told(by_hand, caplog):
    """``scaler.step`` unscales what has not been unscaled; versions of tensors do not show it."""
    model = make_model()
    optimizer = distributed(model, QSGD(seed=next(SEEDS)))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = batches(hvd.rank())()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(LOSS(model(x), y)).backward()
        if by_hand:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    (told,) = warnings(caplog)
    assert told.startswith("0.bias and 5 more: the gradient was changed")


def test_a_scaler_that_is_off_changes_nothing(caplog):
    model = make_model()
    optimizer = distributed(model, QSGD(seed=next(SEEDS)))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x, y = batches(hvd.rank())()
    scaler.scale(LOSS(model(x), y)).backward()
    scaler.step(optimizer)
    assert not warnings(caplog)


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


def after_synchronize(model, optimizer):
    optimizer.synchronize()
    clip(model, optimizer)
    clip_values(model, optimizer)
    with optimizer.skip_synchronize():
        optimizer.step()


def amp(model, optimizer):
    optimizer.synchronize()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    clip(model, optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


def amp_twice(model, optimizer):
    """Without skip_synchronize(): averages travel once more, and Horovod warns of that."""
    optimizer.synchronize()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def plainly(model, optimizer):
    optimizer.step()


RIGHT = [plainly, after_synchronize, amp, amp_twice]
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
@pytest.mark.parametrize("step", RIGHT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_told_of_what_is_right(case, step, to_none, caplog):
    make, keywords, passes = CASES[case]
    if "sparse" in case and step is not plainly:
        pytest.skip("torch clips no sparse gradients")
    torch.manual_seed(3)
    model = make()
    compressor = QSGD(bits=4, min_numel=10, fusion_bytes=4000, seed=next(SEEDS))
    optimizer = distributed(model, compressor, **keywords)
    for number in range(3):
        torch.optim.SGD.zero_grad(optimizer, set_to_none=to_none)
        for more in range(passes):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(9 * number + more))
            model(x + hvd.rank()).square().sum().backward()
        step(model, optimizer)
    assert compressor.step == (6 if step is amp_twice else 3) and not warnings(caplog)


def test_one_rank_alone_changes_its_dtype():
    model = make_model()
    optimizer = distributed(model, QSGD(seed=next(SEEDS)))
    train(model, optimizer, 2)
    if hvd.rank() == 0:
        model.double()
    with pytest.raises(RankMismatchError):
        backward(model, batches(hvd.rank())())
        optimizer.step()
    hvd.barrier()


def test_a_dtype_that_changes_too_late_is_an_error():
    model = make_model()
    optimizer = distributed(model, QSGD(seed=next(SEEDS)))
    backward(model, batches(hvd.rank())())
    model.double()
    with pytest.raises(ValueError, match=r"0\.bias: its gradient is float64 \(300,\) where"):
        optimizer.step()
    hvd.barrier()
