"""hooks/horovod/changed.py without ranks: what counts as a change, and what does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_adaptive import ALQ, QSGD, simulate
from hvd_adaptive.ddp import CompressionState
from hvd_adaptive.hooks.horovod.served import Watch, gradient_dtype, is_laid_out
from hvd_adaptive.layout import Member, build_layout


def watched(*gradients: torch.Tensor) -> tuple[Watch, list[torch.nn.Parameter]]:
    parameters = []
    for gradient in gradients:
        parameters.append(torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype)))
        parameters[-1].grad = gradient
    members = [Member(f"p{i}", tuple(g.shape), g.dtype) for i, g in enumerate(gradients)]
    return Watch(members, parameters), parameters


def look(watch: Watch, parameters: list[torch.nn.Parameter]) -> None:
    for slot, parameter in enumerate(parameters):
        watch.look(slot, parameter.grad)


def test_what_is_untouched_is_not_told():
    watch, parameters = watched(torch.ones(4), torch.ones(0), torch.ones(()), torch.ones(2, 3).t())
    look(watch, parameters)
    for parameter in parameters:  # reading, as encoding does
        parameter.grad.detach().reshape(-1).clone()
        parameter.grad.numpy()
    assert watch.changed() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(2),
        lambda p: p.grad.detach().zero_(),
        lambda p: p.grad[1:].fill_(0),
        lambda p: torch._foreach_mul_([p.grad], 2.0),
        lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
        lambda p: setattr(p, "grad", p.grad.clone()),
        lambda p: setattr(p, "grad", None),
        lambda p: setattr(p.grad, "data", p.grad * 2),
    ],
)
def test_changes_are_told(change):
    watch, parameters = watched(torch.ones(4), torch.ones(5))
    look(watch, parameters)
    change(parameters[1])
    assert watch.changed() == ["p1"]


def test_views_share_a_version_and_later_ones_may_still_grow():
    """Autograd adds to the second view after the first one was handed over."""
    base = torch.ones(8)
    watch, parameters = watched(base[:4], base[4:])
    watch.look(0, parameters[0].grad)
    parameters[1].grad.add_(1)
    watch.look(1, parameters[1].grad)
    assert watch.changed() == []
    parameters[0].grad.add_(1)
    assert watch.changed() == ["p0", "p1"], "they cannot be told apart"


def test_tensors_without_a_version_and_copies_are_left_alone():
    with torch.inference_mode():
        gradient = torch.ones(4)
    watch, (parameter,) = watched(torch.ones(4))
    parameter.grad = None
    watch.look(0, torch.ones(4))  # a dense copy of a sparse gradient
    assert watch.changed() == []
    watch.look(0, gradient)
    assert watch.changed() == []


def test_look_returns_whether_no_backward_pass_has_reached_the_parameter():
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(4)]
    gradients = [torch.zeros(4), torch.ones(4), torch.zeros(4), torch.tensor([0.0, 0, 0, 1])]
    members = [Member(f"p{i}", (4,), torch.float32) for i in range(4)]
    missing = dict(zip(parameters, (2, 0, 0, 2), strict=True))
    optimizer = SimpleNamespace(_allreduce_delay=missing, backward_passes_per_step=2)
    watch = Watch(members, parameters, lambda: optimizer)
    assert [watch.look(i, g) for i, g in enumerate(gradients)] == [True, False, False, False]
    assert Watch(members, parameters).look(0, gradients[0]) is False


def test_dtypes_and_shapes():
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    layout = build_layout(
        [Member("w", (4, 3), gradient_dtype(parameter))],
        min_numel=0,
        bucket_size=8,
        tail="quantize",
        most_coordinates=64,
    )
    assert is_laid_out(layout, [parameter])
    parameter.data = parameter.data.double()
    assert gradient_dtype(parameter) == torch.float64 and not is_laid_out(layout, [parameter])
    assert not is_laid_out(layout, [torch.nn.Parameter(torch.zeros(3, 4))])
    watch = Watch(layout.members, [parameter])
    watch.look(0, torch.zeros(4, 3))
    for wrong in (torch.zeros(4, 3).half(), torch.zeros(12)):
        with pytest.raises(ValueError, match=r"w: its gradient is .* float32 \(4, 3\) was"):
            watch.look(0, wrong)


def test_a_class_is_refused_where_no_optimizer_can_stand_for_it():
    told = r"compressor=ALQ: is a class; give an instance, compressor=ALQ\(\.\.\.\)"
    with pytest.raises(ValueError, match=told):
        CompressionState(ALQ)
    weight = torch.nn.Parameter(torch.zeros(9))
    with pytest.raises(ValueError, match=told):
        simulate.Ranks([("w", weight)], ALQ, 2)
    with pytest.raises(ValueError, match=r"compression=ALQ: pass an instance, ALQ\(\)"):
        ALQ.compress(torch.ones(3))
    assert QSGD.compress.__doc__ == QSGD().compress.__doc__
    tensor = torch.ones(3, dtype=torch.int64)
    assert QSGD.compress(QSGD(), tensor)[0] is tensor, "as any method, called on the class"
