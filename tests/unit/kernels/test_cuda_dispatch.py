"""Which kernels a tensor's device is given."""

from __future__ import annotations

import importlib.util
import inspect
import logging

import pytest
import torch
from triton_interpreter import DEVICE

from hvd_adaptive import kernels

# What each subject's kernels must offer; see the reference modules.
FUNCTIONS = {
    "": ("encode", "decode_add", "bucket_norms", "clipped", "histogram", "counts", "checksum"),
    "bucket": ("round_codes", "cut_codes", "decode_add"),
    "levels": (
        "orq_levels",
        "quantile_levels",
        "mean_magnitudes",
        "symmetric_levels",
        "conditional_means",
    ),
    "onebit": ("encode",),
    "natural": ("encode", "decode_add"),
    "qcs": ("encode", "decode_add"),
    "ecdq": ("bucket_steps", "quantize", "add"),
}


@pytest.mark.parametrize("subject", FUNCTIONS)
def test_same_functions_with_the_same_arguments(subject: str, monkeypatch: pytest.MonkeyPatch):
    reference = kernels.for_device(torch.device("meta"), subject)
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {"cuda", DEVICE.type})
    triton = kernels.for_device(DEVICE, subject)
    assert triton.__name__.split(".")[-1].startswith("cuda")
    assert reference.__name__.split(".")[-1].startswith("reference")
    for name in FUNCTIONS[subject]:
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (triton, reference))
        assert list(ours.parameters) == list(theirs.parameters), name
        assert [p.default for p in ours.parameters.values()] == [
            p.default for p in theirs.parameters.values()
        ], name


def test_what_triton_does_not_have_falls_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {"cuda", "cpu"})
    assert kernels.for_device(torch.device("cuda"), "sparse").__name__.endswith("reference_sparse")
    assert kernels.for_device(torch.device("cpu"), "sparse").__name__.endswith("cpu_sparse")


def test_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Tensors on a GPU are served, slowly, and the log says so; on a CPU nothing is said."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    kernels._has_triton.cache_clear()
    kernels._chosen.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="hvd_adaptive"):
            assert kernels.for_device(torch.device("cpu")).__name__.endswith("kernels.cpu")
            assert not caplog.records
            for _ in range(2):
                found = kernels.for_device(torch.device("cuda"))
                assert found.__name__.endswith("kernels.reference")
        assert [r.message for r in caplog.records] == [
            "triton is not installed: tensors on a GPU are encoded by plain torch, which is slow"
        ]
    finally:
        kernels._has_triton.cache_clear()
        kernels._chosen.cache_clear()
