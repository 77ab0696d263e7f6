"""Warn, once, of gradients whose exact zeros are rounded to other numbers."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.device import HostCopy
from hvd_adaptive.layout import Layout

logger = logging.getLogger("hvd_adaptive")

# Of a parameter's gradient; names in the warning.
NOTABLE, NAMED = 0.01, 3


class RoundedZeros:
    """Zeros in the gradients of one step that schemes without a level 0 quantise.

    Args:
        layout: The layout of the step.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._found: list[tuple[int, int, HostCopy]] = []

    def look(self, index: int, values: torch.Tensor, codec: Codec) -> None:
        """Count the zeros among the quantised coordinates of group ``index``, without waiting."""
        if codec.has_zero or codec.leaves_zeros_out:
            return
        for piece in self._layout.groups[index].pieces:
            inside = values[piece.in_group]
            if inside.numel():
                self._found.append((piece.slot, inside.numel(), HostCopy(inside.count_nonzero())))

    def tell(self, absent: Collection[int]) -> None:
        """Warn of parameters of which notable parts are zero.

        Args:
            absent: Slots of parameters that no rank has a gradient of; their averages are zeros.
        """
        sizes: dict[str, int] = {}
        others: dict[str, int] = {}
        for slot, size, count in self._found:
            if slot in absent:
                continue
            name = self._layout.members[slot].name
            sizes[name] = sizes.get(name, 0) + size
            others[name] = others.get(name, 0) + int(count)
        notable = {n: 1 - others[n] / sizes[n] for n in sizes}
        notable = {name: share for name, share in notable.items() if share >= NOTABLE}
        if not notable:
            return
        listed = [f"{name!r} ({share:.0%})" for name, share in notable.items()]
        logger.warning(
            "parts of these gradients are exactly zero, and this scheme rounds zeros to other "
            "numbers, so that parameters move that should not: %s%s; keep_zeros=True keeps zeros, "
            "and parameter_bits={%s} sends such gradients in full precision",
            ", ".join(listed[:NAMED]),
            f" and {len(listed) - NAMED} more" if len(listed) > NAMED else "",
            ", ".join(f"{name!r}: None" for name in list(notable)[:NAMED]),
        )
