"""Warn, once, of gradients that are mostly zero, and whose zeros are rounded to other numbers.

Gradients of embeddings are mostly zero, and unused rows would move. Fewer zeros are usual and
harmless, for example those of inactive units, and of pixels that are black in all images.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch

from hvd_adaptive.base.tensors import HostCopy
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.layout import Group, Member

logger = logging.getLogger("hvd_adaptive")

# Share of a gradient, larger than that of ReLUs and black pixels; number of names in the warning.
NOTABLE, NAMED = 0.75, 3


class RoundedZeros:
    """Zeros in the gradients of one step that schemes without a level 0 quantise.

    A gradient without any other number shows nothing: buckets of zeros stay zero. It may have
    others in a later step, as if the last layer begins with weights of zero.
    """

    def __init__(self) -> None:
        self._found: list[tuple[int, int, HostCopy]] = []

    def look(self, group: Group, values: torch.Tensor, codec: Codec, padding: int = 0) -> None:
        """Count the zeros among ``values``, a group's quantised coordinates, without waiting. Of
        each piece, ``padding`` zeros are no gradients.
        """
        if codec.has_zero or codec.leaves_zeros_out:
            return
        for piece in group.pieces:
            inside = values[piece.in_group]
            if (size := inside.numel() - padding) > 0:
                self._found.append((piece.slot, size, HostCopy(inside.count_nonzero())))

    def tell(self, members: Sequence[Member], absent: Collection[int] = ()) -> bool:
        """Warn of parameters whose gradients are mostly zero, except ``absent`` ones, which no rank
        has. Return whether to look at a later step: there is no warning, and a gradient was zero.
        """
        sizes: dict[str, int] = {}
        others: dict[str, int] = {}
        for slot, size, count in self._found:
            if slot in absent:
                continue
            name = members[slot].name
            sizes[name] = sizes.get(name, 0) + size
            others[name] = others.get(name, 0) + int(count)
        notable = {n: 1 - others[n] / sizes[n] for n in sizes if others[n]}
        notable = {name: share for name, share in notable.items() if share >= NOTABLE}
        if not notable:
            return not all(others.values())
        listed = [f"{name!r} ({share:.0%})" for name, share in notable.items()]
        logger.warning(
            "most coordinates of these gradients are exactly zero, and this scheme rounds zeros "
            "to other numbers, so that unused rows of an embedding move: %s%s; construct the "
            "compressor with keep_zeros=True, which keeps zeros, or with parameter_bits={%s}, "
            "which sends these gradients in full precision",
            ", ".join(listed[:NAMED]),
            f" and {len(listed) - NAMED} more" if len(listed) > NAMED else "",
            ", ".join(f"{name!r}: None" for name in list(notable)[:NAMED]),
        )
        return False
