"""Cut gradients into the buckets that a fit uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_adaptive.base.device import HOST, check_supported
from hvd_adaptive.coding.zeros import Zeros
from hvd_adaptive.settings import Settings


def buckets_of(
    gradients: torch.Tensor | Sequence[torch.Tensor],
    settings: Settings,
    without_zeros: bool = False,
) -> list[torch.Tensor]:
    """Return the buckets (float32, 1-D) that ``encode`` would cut from gradients laid end to end.

    The partial bucket at the end is included unless ``tail="full"``. If no whole bucket exists, it
    is included in any case.

    Args:
        gradients: A tensor or a list of tensors of any shapes.
        settings: Settings of the codec.
        without_zeros: Whether the codec leaves zeros out of its buckets (coding/zeros.py).

    Raises:
        ValueError: ``gradients`` is anything else.
    """
    tensors = [gradients] if isinstance(gradients, torch.Tensor) else gradients
    if not isinstance(tensors, list | tuple) or not all(map(torch.is_tensor, tensors)):
        raise ValueError(
            f"gradients: must be a tensor or a list of tensors, not {type(gradients).__name__}"
        )
    for tensor in tensors:
        check_supported(tensor.device)
    flats = [g.detach().resolve_neg().reshape(-1).to(torch.float32) for g in tensors]
    flat = torch.cat(flats) if flats else torch.empty(0, **HOST)
    zeros = Zeros.of(flat) if without_zeros else None
    if zeros is not None:
        flat = zeros.others_of(flat)
    if not flat.numel():
        return []
    quantized = settings.quantized_part(flat.numel()) or flat.numel()
    return list(flat[:quantized].split(settings.bucket_size))
