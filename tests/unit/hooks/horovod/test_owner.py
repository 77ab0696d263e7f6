"""The order of registration, as an optimizer's groups of parameters show it."""

from __future__ import annotations

import torch

from hvd_adaptive.hooks.horovod.owner import in_modules


def block() -> torch.nn.Module:
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(4, 4)
    model.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(4, 2, 8) for _ in range(11))
    model.classifier = torch.nn.Linear(4, 4)
    return model


def test_one_group_keeps_its_order():
    named = list(block().named_parameters())
    assert in_modules(named) == named
    assert in_modules(named[::-1]) == named[::-1]


def test_weights_and_biases_of_a_module_are_together():
    """Decayed weights first, biases and norms second, as is usual."""
    named = list(block().named_parameters())
    decayed = [pair for pair in named if pair[1].dim() > 1]
    others = [pair for pair in named if pair[1].dim() < 2]
    found = [name for name, _ in in_modules(decayed + others)]
    modules = [".".join(name.split(".")[:2]) for name in found if name.startswith("layers")]
    assert list(dict.fromkeys(modules)) == [f"layers.{i}" for i in range(11)]
    assert modules == sorted(modules, key=lambda name: int(name.split(".")[1]))
    assert found[:2] == ["lm_head.weight", "lm_head.bias"]
    assert found[-2:] == ["classifier.weight", "classifier.bias"]
