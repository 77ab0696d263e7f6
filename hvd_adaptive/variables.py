"""Name this package's environment variables."""

from __future__ import annotations

# If it is set, training waits for kernels (kernels/meanwhile.py).
WAIT = "HVD_ADAPTIVE_WAIT_FOR_KERNELS"
