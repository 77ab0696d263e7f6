"""Tests are repeatable."""

from __future__ import annotations

from repeatable import first_compressors, settle

__all__ = ["first_compressors"]

settle()
