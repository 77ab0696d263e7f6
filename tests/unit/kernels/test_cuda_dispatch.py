"""Which kernels a tensor's device is given; a subject's have the same signatures everywhere."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import hvd_adaptive
from hvd_adaptive import kernels

PACKAGE = Path(hvd_adaptive.__file__).parent
CPU, CUDA, META = (torch.device(kind) for kind in ("cpu", "cuda", "meta"))


def functions(module: ModuleType) -> dict[str, inspect.Signature]:
    """The signatures of a module's own public functions and classes."""
    own = {n: f for n, f in vars(module).items() if inspect.isfunction(f) or inspect.isclass(f)}
    return {
        name: inspect.signature(function)
        for name, function in own.items()
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.parametrize("subject", kernels.SUBJECTS)
def test_same_functions_with_the_same_arguments(subject: str):
    theirs = functions(kernels.module("reference", subject))
    for backend in kernels.SUBJECTS[subject]:
        if backend == "triton":
            pytest.importorskip("triton")
        ours = functions(kernels.module(backend, subject))
        assert set(ours) & set(theirs)
        for name in set(ours) & set(theirs):
            assert [(p.name, p.default) for p in ours[name].parameters.values()] == [
                (p.name, p.default) for p in theirs[name].parameters.values()
            ], (backend, name)


@pytest.mark.parametrize("subject", kernels.SUBJECTS)
def test_each_device_has_its_backend(subject: str):
    pytest.importorskip("triton")
    fast = kernels.SUBJECTS[subject]
    wanted = {
        CPU: "numba" if "numba" in fast else "reference",
        CUDA: "triton" if "triton" in fast else "reference",
        META: "reference",
    }
    for device, backend in wanted.items():
        found = kernels.for_device(device, subject)
        assert found.__name__ == f"hvd_adaptive.kernels.{backend}.{subject}"


def test_the_registry_knows_every_module_of_a_subject_name():
    """A backend's file with the name of a subject serves it."""
    for backend in ("numba", "triton"):
        files = {path.stem for path in (PACKAGE / "kernels" / backend).glob("*.py")}
        serves = {subject for subject, fast in kernels.SUBJECTS.items() if backend in fast}
        assert files & set(kernels.SUBJECTS) == serves


def test_nobody_outside_names_a_backend():
    named = re.compile(
        r"kernels[./]+(numba|triton|reference)\b|module\(.(numba|triton|reference)\b"
    )
    for path in PACKAGE.rglob("*.py"):
        if (PACKAGE / "kernels") not in path.parents:
            assert not named.search(path.read_text(encoding="utf-8")), path


def test_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Tensors on a GPU are served, slowly, and the log says so; on a CPU nothing is said."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    kernels._has_triton.cache_clear()
    kernels._backend.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="hvd_adaptive"):
            assert kernels.for_device(CPU) is kernels.module("numba", "tables")
            assert not caplog.records
            for _ in range(2):
                assert kernels.for_device(CUDA) is kernels.module("reference", "tables")
        assert [r.message for r in caplog.records] == [
            "triton is not installed: tensors on a GPU are encoded by plain torch, which is slow"
        ]
    finally:
        kernels._has_triton.cache_clear()
        kernels._backend.cache_clear()
