"""Exceptions that users may want to catch."""

from __future__ import annotations


class PayloadError(ValueError):
    """A payload that is short, foreign, corrupt, or encoded with another table or settings."""


class RankMismatchError(RuntimeError):
    """Ranks disagree on settings, parameters, step or order; raised on every rank alike."""
