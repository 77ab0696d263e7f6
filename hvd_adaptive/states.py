"""Read saved states with checks, since a file may contain anything; compute tensors' checksums.

Functions that read raise ValueError that names the entry, its value and the allowed range. ``of``
names the state in that message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.base.checks import check_flag, check_integer

# Largest counters: the limits of int64 and of the header's table version.
MOST, MOST_VERSION = 2**63 - 1, 2**32 - 1


def mapping(value: Any, of: str = "state") -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{of}: must be a mapping, not {type(value).__name__}")
    return value


def entry(state: Any, name: str, of: str = "state") -> Any:
    """Return the entry ``name`` of a state."""
    if name not in mapping(state, of):
        raise ValueError(f"{of}: has no entry {name!r}")
    return state[name]


def whole(state: Any, name: str, least: int = 0, most: int = MOST, of: str = "state") -> int:
    """Return the entry ``name``, an integer in [least, most]."""
    return check_integer(f"{of}: {name}", entry(state, name, of), least, most)


def flag(state: Any, name: str, of: str = "state") -> bool:
    """Return the entry ``name``, a bool."""
    return check_flag(f"{of}: {name}", entry(state, name, of))


def numbers(state: Any, name: str, of: str = "state") -> np.ndarray:
    """Return the entry ``name``, a 1-D tensor or list of real numbers, as float64.

    A tensor may be on any device, since states are often loaded onto a GPU.
    """
    value = entry(state, name, of)
    try:
        if isinstance(value, torch.Tensor) and value.is_complex():
            raise TypeError("complex numbers")
        read = torch.as_tensor(value, dtype=torch.float64, device="cpu").numpy()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"{of}: {name} must be a tensor of numbers, not {value!r}") from None
    if read.ndim != 1:
        raise ValueError(f"{of}: {name} must have one dimension, not shape {read.shape}")
    return read


@torch.no_grad()
def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return 32 bits of each dense tensor, computed on its device, and 0 for others."""
    return [_checksum(tensor) for tensor in tensors]


def _checksum(tensor: torch.Tensor) -> int:
    is_stored = tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda")
    if not is_stored or not tensor.numel():
        return 0
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8)
    rest = -data.numel() % 4
    if rest or data.storage_offset() % 4 or data.data_ptr() % 4:
        data = torch.cat([data, data.new_zeros(rest)])
    return kernels.for_device(data.device, "checksum").checksum(data.view(torch.int32), 0)
