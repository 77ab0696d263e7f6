"""Gradients as the buckets that a fit uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_adaptive.device import HOST


def buckets_of(
    gradients: torch.Tensor | Sequence[torch.Tensor], bucket_size: int
) -> list[torch.Tensor]:
    """Full buckets (float32, 1-D) of gradients laid end to end, as in training; a shorter one only
    where there is no other.

    gradients: a tensor or a list of them, any shapes; ValueError where it is anything else.
    """
    tensors = [gradients] if isinstance(gradients, torch.Tensor) else gradients
    if not isinstance(tensors, list | tuple) or not all(map(torch.is_tensor, tensors)):
        raise ValueError(
            f"gradients: must be a tensor or a list of tensors, not {type(gradients).__name__}"
        )
    flats = [g.detach().resolve_neg().reshape(-1).to(torch.float32) for g in tensors]
    flat = torch.cat(flats) if flats else torch.empty(0, **HOST)
    whole = flat.numel() // bucket_size * bucket_size
    if whole:
        return list(flat[:whole].split(bucket_size))
    return [flat] if flat.numel() else []
