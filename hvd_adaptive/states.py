"""Read saved states with checks, since a file may contain anything; compute tensors' checksums.

Functions that read raise ValueError that names the entry, its value and the allowed range. ``of``
names the state in that message.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.base.checks import check_flag, check_integer
from hvd_adaptive.base.finite import all_finite

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


def check_residuals(state: Mapping[str, Any]) -> None:
    """Raise ValueError if the residuals of error feedback in a compressor's state are invalid, or
    not the ones that were saved with it.
    """
    if "residuals" in state:
        _check_readable(state["residuals"])
    known = whole(state, "residuals_checksum") if "residuals_checksum" in state else None
    saved = state.get("residuals")
    if known is not None and known != (0 if saved is None else residuals_checksum(saved)):
        raise ValueError(
            "state: residuals are missing, or of several ranks. torch.distributed.checkpoint keeps "
            "one rank's tensors of a name, and reads those that a new state has, but each rank has "
            "residuals of its own: save {'compression': state} with the CompressionState of "
            "hvd_adaptive.ddp, PerRank(compressor=compressor) of hvd_adaptive.checkpoint, or a "
            "file of each rank by torch.save. To go on without residuals, "
            "remove the entries 'residuals' and 'residuals_checksum'"
        )


def _check_readable(saved: Any) -> None:
    try:
        size = whole(saved, "size", of="residuals")
        whole(saved, "rank", 0, max(0, size - 1), of="residuals")
        parameters = mapping(entry(saved, "parameters", "residuals"), "parameters")
    except ValueError as error:
        raise ValueError(f"state: residuals cannot be read: {error}") from None
    for name, r in parameters.items():
        if not isinstance(name, str):
            raise ValueError(f"state: residuals must have parameters' names as keys, not {name!r}")
        if not isinstance(r, torch.Tensor) or r.dtype != torch.float32 or r.dim() != 1:
            raise ValueError(f"state: residual of {name!r} must be a float32 tensor and 1-D")
        if r.layout != torch.strided:
            raise ValueError(f"state: residual of {name!r} must be dense, not {r.layout}")
    if not all_finite(parameters.values()):
        raise ValueError("state: residuals must be finite")


def residuals_checksum(saved: Mapping[str, Any]) -> int:
    """Return 32 bits of one rank's residuals, which are never 0."""
    parameters = dict(sorted(saved["parameters"].items()))
    own = int(saved["rank"]), int(saved["size"]), [*parameters]
    return zlib.crc32(repr((own, checksums(parameters.values()))).encode()) or 1
