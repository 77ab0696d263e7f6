"""One file per published method."""

from hvd_adaptive.schemes.alq import ALQ

__all__ = ["ALQ"]
