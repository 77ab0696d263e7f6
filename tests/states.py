"""States of compressors: through a file, and compared bit for bit."""

from __future__ import annotations

import io
from typing import Any

import torch


def through_disk(state: dict) -> dict:
    """The state as its file has it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plain(value: Any) -> Any:
    """What compares bit for bit, NaN included."""
    if isinstance(value, torch.Tensor):
        flat = torch.empty(value.numel(), dtype=value.dtype, device="cpu")
        flat.copy_(value.detach().reshape(-1))
        kind = str(value.dtype), str(value.device), tuple(value.shape)
        return kind, flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {name: plain(of_name) for name, of_name in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return type(value).__name__, repr(value)
