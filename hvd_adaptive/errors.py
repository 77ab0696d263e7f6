"""Define exceptions that users may catch."""

from __future__ import annotations


class PayloadError(ValueError):
    """The payload is short, foreign, corrupt, or encoded with another table or settings."""


class RankMismatchError(RuntimeError):
    """Ranks differ in settings, parameters, step or order; raised on every rank alike."""


class ResidualError(RuntimeError):
    """Residuals of error feedback have outgrown the gradients; raised on every rank alike."""
