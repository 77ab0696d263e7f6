"""Compress gradients for PyTorch's DDP, FSDP2 and stock Horovod.

Importing the package imports nothing else, not even torch. A name's module is imported when the
name is first used. So commands start quickly.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from hvd_adaptive._version import __version__
from hvd_adaptive.connection import load_framework_by

if TYPE_CHECKING:
    from hvd_adaptive.base.errors import PayloadError, RankMismatchError, ResidualError
    from hvd_adaptive.connection import describe
    from hvd_adaptive.hooks.average import average
    from hvd_adaptive.local_sgd import LocalSGD
    from hvd_adaptive.monitor import Monitor
    from hvd_adaptive.options import Auto, Hierarchical, ScatterReduce, Tuning
    from hvd_adaptive.schemes import (
        ALQ,
        AMQ,
        DRIVE,
        ECDQ,
        EDEN,
        NUQSGD,
        ORQ,
        QCS,
        QSGD,
        BinGrad,
        LinearQuantile,
        NaturalCompression,
        OneBitSGD,
        SignSGD,
        SparseSGD,
        TernGrad,
    )

__all__ = [
    "ALQ",
    "AMQ",
    "DRIVE",
    "ECDQ",
    "EDEN",
    "NUQSGD",
    "ORQ",
    "QCS",
    "QSGD",
    "Auto",
    "BinGrad",
    "Hierarchical",
    "LinearQuantile",
    "LocalSGD",
    "Monitor",
    "NaturalCompression",
    "OneBitSGD",
    "PayloadError",
    "RankMismatchError",
    "ResidualError",
    "ScatterReduce",
    "SignSGD",
    "SparseSGD",
    "TernGrad",
    "Tuning",
    "__version__",
    "average",
    "describe",
]

# Modules that users import.
_SUBMODULES = ("checkpoint", "custom", "ddp", "fsdp", "integrations", "optim", "simulate", "theory")

# Modules of the names that are not schemes.
_MODULES = {
    **dict.fromkeys(("Auto", "Hierarchical", "ScatterReduce", "Tuning"), "options"),
    "average": "hooks.average",
    "describe": "connection",
    "LocalSGD": "local_sgd",
    "Monitor": "monitor",
    "PayloadError": "base.errors",
    "RankMismatchError": "base.errors",
    "ResidualError": "base.errors",
}


def __getattr__(name: str) -> Any:
    """Import what ``name`` stands for: an exported class, or a module of the package."""
    if name in __all__:
        module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'schemes')}")
        value = globals()[name] = getattr(module, name)
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, *(name for name in globals() if name[:2] == "__")])


def _horovod() -> Any:
    from hvd_adaptive.hooks.horovod import session

    return session


load_framework_by(_horovod)
