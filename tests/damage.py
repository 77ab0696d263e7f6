"""Damage to messages on their way."""

from __future__ import annotations

import torch

from hvd_adaptive.coding.payload import SIZE


def flipped(data: torch.Tensor) -> torch.Tensor:
    data[SIZE + 5] ^= 16
    return data


def truncated(data: torch.Tensor) -> torch.Tensor:
    return data[:-9]


def gone(data: torch.Tensor) -> torch.Tensor:
    return data[:0]
