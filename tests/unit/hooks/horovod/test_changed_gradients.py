"""What a Watch notes of gradients; tests/parallel/ranks/check_changed.py has what it warns of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_adaptive import QSGD
from hvd_adaptive.hooks.horovod.served import ServedParameters, Watch, gradient_dtype
from hvd_adaptive.layout import Member, build_layout


def test_no_gradient_is_a_change_and_tensors_without_a_version_are_none():
    own, none = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    own.grad = torch.ones(4)
    with torch.inference_mode():
        versionless = torch.ones(4)
    dense_copy = torch.ones(4)  # of a sparse gradient
    members = [Member("p", (4,), torch.float32)]
    watches = [Watch(members, [parameter]) for parameter in (own, none, none)]
    for watch, gradient in zip(watches, (own.grad, versionless, dense_copy), strict=True):
        watch.look(0, gradient)
        assert watch.changed() == []
    own.grad = None
    assert watches[0].changed() == ["p"]


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
    compressor = QSGD(bits=4)
    served = lambda p: ServedParameters(compressor, None, [p])  # noqa: E731
    assert served(parameter).are_current(layout)
    parameter.data = parameter.data.double()
    assert gradient_dtype(parameter) == torch.float64
    assert not served(parameter).are_current(layout)
    assert not served(torch.nn.Parameter(torch.zeros(3, 4))).are_current(layout)
    watch = Watch(layout.members, [parameter])
    watch.look(0, torch.zeros(4, 3))
    for wrong in (torch.zeros(4, 3).half(), torch.zeros(12)):
        with pytest.raises(ValueError, match=r"w: its gradient is .* float32 \(4, 3\) was"):
            watch.look(0, wrong)
