"""Arguments of average() in one process; tests/parallel has several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hvd_adaptive import ALQ, QSGD, average


def test_before_ranks_are_known():
    with pytest.raises(RuntimeError, match=r"before torch\.distributed\.init_process_group\(\)"):
        average([torch.ones(3)], QSGD(bits=4))


def test_one_rank_gets_copies(alone):
    compressor, own = ALQ(bits=3), torch.randn(2000)
    averages = average([own, None], compressor)
    assert torch.equal(averages[0], own) and averages[1] is None
    assert averages[0].data_ptr() != own.data_ptr() and compressor.step == 0
    assert torch.equal(average([own], compressor, async_op=True).wait()[0], own)
    weight = torch.ones(3, requires_grad=True)
    (3 * average([2 * weight], compressor)[0]).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 6.0))


def test_one_rank_whose_group_is_destroyed():
    compressor = ALQ(bits=3)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert torch.equal(average([torch.ones(3)], compressor)[0], torch.ones(3))
        dist.destroy_process_group()
        with pytest.raises(RuntimeError, match=r"before torch.*init_process_group\(\)"):
            average([torch.ones(3)], compressor)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (torch.ones(3), r"tensors: must be a list of tensors, not Tensor; for one give \[tensor\]"),
        ([torch.ones(3), 4.0], r"tensors\[1\]: must be a tensor or None, not float"),
        ([torch.ones(3, dtype=torch.int64)], r"tensors\[0\]: must be float16.*not torch.int64"),
        ([torch.ones(3, dtype=torch.cfloat)], r"tensors\[0\]: is complex"),
        ([torch.ones(3).to_sparse()], r"tensors\[0\]: must be a dense tensor"),
        ([torch.nn.Parameter(torch.ones(3))], r"tensors\[0\]: is a parameter; give .* p.grad"),
    ],
)
def test_wrong_tensors(alone, tensors, told):
    with pytest.raises(ValueError, match=told):
        average(tensors, QSGD(bits=4))


def test_wrong_compressors_and_groups(alone):
    with pytest.raises(ValueError, match="compressor=QSGD: is a class"):
        average([torch.ones(3)], QSGD)
    with pytest.raises(ValueError, match="group: must be a process group"):
        average([torch.ones(3)], QSGD(bits=4), group="gloo")
    with pytest.raises(ValueError, match="parameter_bits: the tensors' names are unknown"):
        average([torch.ones(3)], QSGD(bits=4, parameter_bits={"a": 8}))


@pytest.mark.parametrize(
    "tensors", [3, [3], [["float32"]], [["int8", [3]]], [["float32", [-1]]], [["float32", 3]]]
)
def test_states_of_no_tensors_are_refused(tensors):
    compressor = QSGD(bits=4)
    good = compressor.state_dict() | {"tensors": [["float32", [3, 4]], None]}
    compressor.load_state_dict(good)
    with pytest.raises(ValueError, match="state: tensors"):
        compressor.load_state_dict(good | {"tensors": tensors})
    assert compressor.state_dict()["tensors"] == good["tensors"]
