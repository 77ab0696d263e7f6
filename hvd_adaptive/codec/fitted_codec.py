"""Define FittedCodec, the base of codecs that are fitted to gradients, in buckets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvd_adaptive.adapt.coverage import GROWTH, Coverage, Usable
from hvd_adaptive.adapt.statistics import Adaptation, weights_of
from hvd_adaptive.base.device import HOST, check_supported
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.coding.zeros import Zeros
from hvd_adaptive.settings import Settings


class FittedCodec(Codec):
    """Base of codecs that are fitted to gradients; see ``adapt.joint_update.Fitted``.

    Attributes:
        adaptation: Statistics and schedule.
        is_fitted: Whether a fit changes anything.
        norm: Norm by which buckets are divided: "l2" or "linf".
    """

    adaptation: Adaptation
    is_fitted = True
    norm: str = "l2"
    _share = 0.0  # Coverage.share of the last fit; 0 after none, or if it failed

    def has_more(self, collected: Sequence[np.ndarray]) -> bool:
        """Return whether these statistics contain notably more than those of the last fit."""
        return Coverage.of(collected).share > GROWTH * self._share

    def _usable(self, buckets: Sequence[torch.Tensor]) -> Usable:
        """Return the usable buckets, clipped if the settings say so."""
        weights, without_zeros = weights_of(buckets), self.leaves_zeros_out
        return Usable.among(buckets, weights, self.norm, self._clipped, without_zeros)

    def _usable_in(self, buckets: Sequence[torch.Tensor]) -> Usable:
        """Return ``_usable`` buckets; raise ValueError if there is none."""
        usable = self._usable(buckets)
        if not usable.buckets:
            raise ValueError("gradients: no bucket is finite and different from zero")
        return usable


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
