"""Adaptive gradient compression for stock Horovod."""

from hvd_adaptive._version import __version__
from hvd_adaptive.errors import PayloadError, RankMismatchError
from hvd_adaptive.schemes import ALQ, AMQ, NUQSGD, QSGD, TernGrad

__all__ = [
    "ALQ",
    "AMQ",
    "NUQSGD",
    "QSGD",
    "PayloadError",
    "RankMismatchError",
    "TernGrad",
    "__version__",
]
