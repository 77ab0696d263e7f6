"""Tests are repeatable."""

from __future__ import annotations

from repeatable import settle

settle()
