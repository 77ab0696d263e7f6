"""The hot loops: the same functions in each module of a subject, the same integers out of each.

reference: plain torch, any device, the oracle.  cpu: Numba.  cuda: Triton. Each is loaded when a
tensor first asks for it: Numba and Triton need not be there for the others.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from types import ModuleType
from typing import Any

import torch

# Types of devices whose tensors the Triton kernels take. Tests add "cpu" to run them under Triton's
# interpreter.
TRITON_DEVICES = {"cuda"}


def for_device(device: torch.device, subject: str = "") -> ModuleType:
    """The fastest kernels for tensors on ``device``.

    subject: "" for level tables, norms and statistics, or what follows the underscore in the
    modules' names: "bucket", "levels", "onebit", "natural", "qcs", "sparse", "ecdq", "checksum",
    "variance".
    """
    kind = device.type
    return _chosen(kind, subject, kind in TRITON_DEVICES)


@functools.cache
def _chosen(kind: str, subject: str, triton: bool) -> ModuleType:
    if triton and _has_triton() and _exists("cuda", subject):
        return _module("cuda", subject)
    fast = kind == "cpu" and _exists("cpu", subject)
    return _module("cpu" if fast else "reference", subject)


def has_triton(device: torch.device) -> bool:
    """Whether tensors on ``device`` are given the Triton kernels."""
    return device.type in TRITON_DEVICES and _has_triton()


class Lazy:
    """A module of this package, loaded when first used: ``Lazy("cpu_codes").pack(...)``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(f"{__name__}.{self._name}"), attribute)
        setattr(self, attribute, value)
        return value


def _name(family: str, subject: str) -> str:
    return f"{__name__}.{family}_{subject}" if subject else f"{__name__}.{family}"


def _module(family: str, subject: str) -> ModuleType:
    return importlib.import_module(_name(family, subject))


def _exists(family: str, subject: str) -> bool:
    return importlib.util.find_spec(_name(family, subject)) is not None


@functools.cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logging.getLogger("hvd_adaptive").warning(
            "triton is not installed: tensors on a GPU are encoded by plain torch, which is slow"
        )
    return found
