"""The hot loops: the same functions in each module, the same integers out of each.

reference: plain torch, any device, the oracle.  cpu: Numba.
"""

from __future__ import annotations

from types import ModuleType

import torch

from hvd_adaptive.kernels import cpu, reference


def for_device(device: torch.device) -> ModuleType:
    """The fastest kernels for tensors on ``device``."""
    return cpu if device.type == "cpu" else reference
