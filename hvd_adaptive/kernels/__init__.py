"""Hold the hot loops, and choose the backend that runs them for a tensor.

A subject is a set of functions. Each backend that serves a subject has a module of that name, with
the same signatures and the same integers: ``reference`` (plain torch, any device, the oracle),
``numba`` (CPU) and ``triton`` (CUDA). Code that the backends share lies beside them in this folder.
A module is loaded when it is first needed, so that CPU kernels need no Triton and CUDA kernels need
no Numba.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from types import ModuleType

import torch

# The fast backends of each subject of tensors; ``reference`` serves all of them.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "tables": ("numba", "triton"),  # level tables, norms, histograms, errors
    "bucket": ("numba", "triton"),  # codes of buckets that have levels of their own
    "levels": ("numba", "triton"),  # levels of a bucket
    "onebit": ("numba",),
    "natural": ("numba",),
    "qcs": ("numba",),
    "eden": ("numba", "triton"),  # rotation and rounding of EDEN
    "zeros": ("numba",),  # places of exact zeros
    "checksum": ("numba", "triton"),
    "codes": ("numba", "triton"),  # bare codes to words and back
    "uniforms": ("triton",),  # random integers
}
# Types of devices whose tensors the Triton kernels accept. Tests add "cpu" to run them under
# Triton's interpreter.
TRITON_DEVICES = {"cuda"}


def for_device(device: torch.device, subject: str = "tables") -> ModuleType:
    """Return the fastest kernels of a subject for tensors on ``device``."""
    return module(_backend(device.type, subject, device.type in TRITON_DEVICES), subject)


def on_host(subject: str) -> ModuleType:
    """Return Numba's kernels of a subject; subjects that are not in SUBJECTS have only these."""
    return module("numba", subject)


@functools.cache
def module(backend: str, subject: str) -> ModuleType:
    """Return a backend's kernels of a subject."""
    with no_gc():
        return importlib.import_module(f"{__name__}.{backend}.{subject}")


@functools.cache
def _backend(kind: str, subject: str, triton: bool) -> str:
    backends = SUBJECTS[subject]
    if triton and "triton" in backends and _has_triton():
        return "triton"
    return "numba" if kind == "cpu" and "numba" in backends else "reference"


@functools.cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logging.getLogger("hvd_adaptive").warning(
            "triton is not installed: tensors on a GPU are encoded by plain torch, which is slow"
        )
    return found


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Collect no garbage within the block.

    Imports make many objects, all of which stay, so that Python collects again and again. In a
    process with torch a full collection takes longer than loading a kernel.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
