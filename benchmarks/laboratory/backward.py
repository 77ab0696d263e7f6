"""The package's backward pass that costs nothing, for the laboratory's shapes."""

from __future__ import annotations

from hvd_adaptive.tools.bench.backward import FakeNetwork, Still

__all__ = ["FakeNetwork", "Still"]
