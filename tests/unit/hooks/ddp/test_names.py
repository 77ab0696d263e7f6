"""Names of parameters in wrapped models."""

from __future__ import annotations

import pytest
from torch import nn

from hvd_adaptive import ALQ
from hvd_adaptive.ddp import CompressionState
from hvd_adaptive.parts import plain_names


def names_of(names, patterns=()):
    return [name for name, _ in plain_names([(name, None) for name in names], patterns)]


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (["module.conv.weight", "module.fc.bias"], ["conv.weight", "fc.bias"]),
        (["module._orig_mod.conv.weight"], ["conv.weight"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["module.encoder._orig_mod.a", "module.head"], ["encoder.a", "head"]),
        (["module.a", "b"], ["module.a", "b"]),  # a submodule of the net's own
        (["a._orig_mod.w", "a.w"], ["a._orig_mod.w", "a.w"]),  # they would become equal
        ([], []),
    ],
)
def test_wrappers_are_removed(given, plain):
    assert names_of(given) == plain


def test_patterns_with_wrappers_keep_them():
    assert names_of(["module.a", "module.b"], ["module.a*"]) == ["module.a", "module.b"]
    assert names_of(["module._orig_mod.a"], ["module.*"]) == ["module.a"]


def test_patterns_match_names_of_a_wrapped_model(alone, caplog):
    net = nn.Sequential()
    net.add_module("conv1", nn.Conv2d(1, 8, 3))
    net.add_module("fc", nn.Linear(8, 8))
    model = nn.parallel.DistributedDataParallel(net)
    compressor = ALQ(bits=3, parameter_bits={"conv*": 4})
    state = CompressionState(compressor, model.named_parameters())
    assert not caplog.messages
    assert set(state.session.names._by_id.values()) == {
        "conv1.weight",
        "conv1.bias",
        "fc.weight",
        "fc.bias",
    }
    CompressionState(ALQ(parameter_bits={"covn*": 4}), model.named_parameters())
    assert "'covn*' matches no parameter; close names are 'conv1." in caplog.messages[0]
