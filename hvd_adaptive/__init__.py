"""Adaptive gradient compression for stock Horovod."""

from hvd_adaptive._version import __version__
from hvd_adaptive.errors import PayloadError, RankMismatchError
from hvd_adaptive.schemes import ALQ

__all__ = ["ALQ", "PayloadError", "RankMismatchError", "__version__"]
