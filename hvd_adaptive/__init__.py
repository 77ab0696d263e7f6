"""Adaptive gradient compression for stock Horovod."""

from hvd_adaptive._version import __version__
from hvd_adaptive.errors import PayloadError, RankMismatchError
from hvd_adaptive.hooks.horovod.host import plug_in as _plug_in
from hvd_adaptive.monitor import Monitor
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
    "BinGrad",
    "LinearQuantile",
    "Monitor",
    "NaturalCompression",
    "OneBitSGD",
    "PayloadError",
    "RankMismatchError",
    "SignSGD",
    "SparseSGD",
    "TernGrad",
    "__version__",
]

_plug_in()
