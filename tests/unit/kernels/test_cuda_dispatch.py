"""Which kernels a tensor's device is given; a subject's have the same signatures everywhere."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
from pathlib import Path

import pytest
import torch

import hvd_adaptive
from hvd_adaptive import kernels

LEVELS = ("mean_magnitudes", "symmetric_levels", "conditional_means")
SCANS = ("bucket_norms", "clipped", "histogram", "variances")
# What each subject's kernels must offer.
FUNCTIONS = {
    "tables": ("encode", "decode_add", *SCANS),
    "bucket": ("round_codes", "cut_codes", "decode_add"),
    "levels": ("orq_levels", "quantile_levels", *LEVELS),
    "onebit": ("encode",),
    "natural": ("encode", "decode_add"),
    "qcs": ("encode", "decode_add"),
    "sparse": ("encode", "add"),
    "eden": ("encode", "decode_add"),
    "ecdq": (
        *("bucket_steps", "quantize", "add", "counts", "add_runs", "put_numbers", "numbers"),
        "Splitter",
    ),
    "checksum": ("seal", "checksums", "checksum"),
    "zeros": ("has_zeros", "mark", "write", "read", "take", "put"),
    "codes": ("pack", "unpack"),
    "uniforms": ("uniforms",),
    "huffman": ("most_bytes", "encode", "decode", "encode_two", "decode_two"),
    "elias": ("encode", "decode"),
}
PACKAGE = Path(hvd_adaptive.__file__).parent
CPU, CUDA, META = (torch.device(kind) for kind in ("cpu", "cuda", "meta"))


@pytest.mark.parametrize("subject", kernels.SUBJECTS)
def test_same_functions_with_the_same_arguments(subject: str):
    for backend in kernels.SUBJECTS[subject]:
        if backend == "triton":
            pytest.importorskip("triton")
        for name in FUNCTIONS[subject]:
            ours, theirs = (
                inspect.signature(getattr(kernels.module(kind, subject), name))
                for kind in (backend, "reference")
            )
            assert [(p.name, p.default) for p in ours.parameters.values()] == [
                (p.name, p.default) for p in theirs.parameters.values()
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
    assert kernels.on_host(subject) is kernels.for_device(CPU, subject)


def test_unknown_subjects_are_refused():
    with pytest.raises(KeyError):
        kernels.for_device(CPU, "no such subject")


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


def test_the_libraries_are_not_the_folders_of_their_names():
    import numba

    triton = pytest.importorskip("triton")
    for library in (numba, triton):
        assert PACKAGE not in Path(library.__file__).parents
    from hvd_adaptive.kernels.numba import jit
    from hvd_adaptive.kernels.triton import launch

    assert jit.numba is numba and launch.triton is triton


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
