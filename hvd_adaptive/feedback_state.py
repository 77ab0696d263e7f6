"""Check the residuals in a saved state."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from hvd_adaptive import states
from hvd_adaptive.base.finite import all_finite
from hvd_adaptive.feedback_weight import check_weights


def check_residuals(state: Mapping[str, Any]) -> None:
    """Raise ValueError if the residuals of error feedback in a compressor's state are invalid or
    not the ones that were saved with it, or if their weights are invalid.
    """
    check_weights(state)
    if "residuals" in state:
        _check_readable(state["residuals"])
    known = states.whole(state, "residuals_checksum") if "residuals_checksum" in state else None
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
        size = states.whole(saved, "size", of="residuals")
        states.whole(saved, "rank", 0, max(0, size - 1), of="residuals")
        parameters = states.mapping(states.entry(saved, "parameters", "residuals"), "parameters")
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
    return zlib.crc32(repr((own, states.checksums(parameters.values()))).encode()) or 1
