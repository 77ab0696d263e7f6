"""The hook's state without other ranks: arguments, what is pickled, names of wrapped models."""

from __future__ import annotations

import copy
import pickle
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hvd_adaptive import ALQ, QSGD
from hvd_adaptive.ddp import CompressionState, compression_hook
from hvd_adaptive.parts import plain_names


def test_one_process_keeps_its_gradients(alone):
    net = nn.Linear(50, 40)
    twin = copy.deepcopy(net)
    model = nn.parallel.DistributedDataParallel(net)
    state = CompressionState(ALQ(bits=2), net.named_parameters())
    model.register_comm_hook(state, compression_hook)
    x = torch.randn(8, 50)
    model(x).square().sum().backward()
    twin(x).square().sum().backward()
    assert torch.equal(net.weight.grad, twin.weight.grad)
    assert state.compressor.step == 0


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"compressor": "alq"}, "compressor='alq': must be a compressor"),
        ({"compressor": ALQ}, "compressor=ALQ: is a class; give an instance"),
        ({"compressor": QSGD(process_set=Mock())}, "process_set: must be None"),
        ({"named_parameters": nn.Linear(2, 2)}, "named_parameters: .* give model.named_parameters"),
        ({"named_parameters": nn.Linear(2, 2).parameters()}, "named_parameters: must hold .*pairs"),
        ({"process_group": "gloo"}, "process_group: must be a process group, not str"),
    ],
)
def test_wrong_arguments(keywords, told):
    with pytest.raises(ValueError, match=told):
        CompressionState(**{"compressor": QSGD(bits=4)} | keywords)


def test_a_state_is_no_compressor_for_horovod():
    state = CompressionState(QSGD(bits=4))
    with pytest.raises(AttributeError, match="DistributedOptimizer takes the compressor itself"):
        state.compress(torch.ones(3))
    with pytest.raises(AttributeError, match=r"^CompressionState has no attribute 'bits'"):
        getattr(state, "bits")  # noqa: B009


def test_sharded_models_have_another_door(alone):
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"sharded by FSDP.*compress_reduce_scatter"):
        CompressionState(QSGD(bits=4), model.named_parameters())


class OnMeta:
    """A bucket of another device."""

    def buffer(self):
        return torch.ones(3, device="meta")

    def parameters(self):
        return []


PAIR = torch.ones(3), nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("make", "bucket", "told"),
    [
        (CompressionState, PAIR, "python_reducer.*set optimize_ddp"),
        (CompressionState, torch.ones(3), "is a tensor.*FSDP1 is not supported.*adaptive.average"),
        (CompressionState, OnMeta(), "tensors on meta: must be on the CPU or a GPU of CUDA or"),
        (lambda compressor: compressor, OnMeta(), "state: must be a CompressionState, not QSGD"),
    ],
)
def test_what_is_no_bucket_or_state(alone, make, bucket, told):
    with pytest.raises(ValueError, match=told):
        compression_hook(make(QSGD(bits=4)), bucket)


def test_a_compressor_serves_one_state():
    compressor = QSGD(bits=4)
    CompressionState(compressor)
    with pytest.raises(ValueError, match="already serves an optimizer or a model"):
        CompressionState(compressor)
    with pytest.raises(RuntimeError, match="serves a DistributedDataParallel model"):
        compressor.compress(torch.ones(2000))
    compressor.close()
    assert CompressionState(compressor).compressor is compressor


@pytest.mark.parametrize(
    "compressor",
    [
        ALQ(bits=4, update_steps=iter([0, 5]), coding="huffman", error_feedback=0.5),
        QSGD(intervals=3, named_parameters=nn.Linear(9, 9).named_parameters()),
    ],
    ids=lambda compressor: compressor.parts.default.name,
)
def test_pickled(compressor):
    """Scheme, settings that have changed, tables, step; parameters are not in it."""
    if hasattr(compressor, "fit"):
        compressor.fit(torch.randn(20_000, generator=torch.Generator().manual_seed(1)))
    compressor.step = 11
    state = CompressionState(compressor)
    compressor.set(bucket_size=300)
    loaded = pickle.loads(pickle.dumps(state))
    assert loaded.process_group is None and repr(loaded.compressor) == repr(compressor)
    assert loaded.compressor.step == 11
    assert loaded.compressor.settings.named_parameters is None
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(loaded.compressor.encode(flat, seed=3), compressor.encode(flat, seed=3))


def test_an_iterator_that_cannot_be_pickled_is_an_error():
    with pytest.raises(TypeError):
        pickle.dumps(CompressionState(ALQ(update_steps=(n for n in range(3)))))


@pytest.mark.parametrize(
    ("given", "patterns", "plain"),
    [
        (["module.conv.weight", "module.fc.bias"], [], ["conv.weight", "fc.bias"]),
        (["module._orig_mod.conv.weight"], [], ["conv.weight"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], [], ["a", "b"]),
        (["module.encoder._orig_mod.a", "module.head"], [], ["encoder.a", "head"]),
        (["module.a", "b"], [], ["module.a", "b"]),  # a submodule of the net's own
        (["a._orig_mod.w", "a.w"], [], ["a._orig_mod.w", "a.w"]),  # they would become equal
        (["module.a", "module.b"], ["module.a*"], ["module.a", "module.b"]),
        (["module._orig_mod.a"], ["module.*"], ["module.a"]),
        ([], [], []),
    ],
)
def test_wrappers_are_removed_unless_patterns_have_them(given, patterns, plain):
    found = plain_names([(name, None) for name in given], patterns)
    assert [name for name, _ in found] == plain


def test_patterns_match_names_of_a_wrapped_model(alone, caplog):
    net = nn.Sequential()
    net.add_module("conv1", nn.Conv2d(1, 8, 3))
    net.add_module("fc", nn.Linear(8, 8))
    model = nn.parallel.DistributedDataParallel(net)
    compressor = ALQ(bits=3, parameter_bits={"conv*": 4})
    CompressionState(compressor, model.named_parameters())
    assert not caplog.messages
    CompressionState(ALQ(parameter_bits={"covn*": 4}), model.named_parameters())
    assert "'covn*' matches no parameter; close names are 'conv" in caplog.messages[0]
