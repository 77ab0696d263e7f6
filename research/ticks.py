"""Numbers at the axes of the figures."""

from __future__ import annotations

from matplotlib.ticker import FuncFormatter

PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
