"""Define Results: the gradients of one step, and the averages that replace them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hvd_adaptive.layout import Layout, view_of, views_beside
from hvd_adaptive.run.arrivals import Arrivals

if TYPE_CHECKING:
    from hvd_adaptive.run.rank_context import RankContext


class Results:
    """Gather groups, and hold their averages until each member's is returned (``trip.Gradients``).

    Until ``write_early`` averages stay in memory of their own, because autograd may still add to
    gradients, and the program may read them. Later ones replace the gradients at once.

    Args:
        groups: Owns the memory that groups share.
        arrivals: The gradients.
        layout: The layout.

    Attributes:
        is_early: Averages stay in memory of their own.
    """

    def __init__(self, groups: RankContext, arrivals: Arrivals, layout: Layout) -> None:
        self._groups, self._arrivals, self._layout = groups, arrivals, layout
        self.is_early = True
        self._early: dict[int, torch.Tensor] = {}
        self._kept: dict[int, torch.Tensor] = {}  # those that could not be written back

    def gather(self, index: int, changed: bool) -> torch.Tensor:
        """Return a group's coordinates, valid until the next call; see ``trip.Gradients``."""
        group = self._layout.groups[index]
        self._arrivals.join(group)
        if not changed and (own := self._arrivals.own_memory(group)) is not None:
            return own
        device = self._arrivals.device or torch.device("cpu")
        flat = self.buffer("gradients", group.coordinates, group.dtype, device)
        return self._arrivals.gather(group, flat)

    def buffer(
        self, use: str, coordinates: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See ``Memory.buffer``."""
        return self._groups.buffer(use, coordinates, dtype, device)

    def result(
        self, index: int, coordinates: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for a group's average: its only member's gradient, or a buffer."""
        if self.is_early:
            return self.buffer(f"result of group {index}", coordinates, dtype, device)
        own = self._place_of(index, coordinates, dtype)
        return self.buffer("result", coordinates, dtype, device) if own is None else own

    def deliver(self, index: int, average: torch.Tensor) -> None:
        """Accept the average of a group."""
        if self.is_early:
            self._early[index] = average
            return
        kept = self._write_back(index, average)
        if kept is not None:
            self._kept[index] = kept

    def kept_bytes(self, index: int) -> int:
        """Return the bytes of a group's average that could not be written back."""
        return self._kept[index].nbytes if index in self._kept else 0

    def write_early(self) -> None:
        """Write the averages that came early to the gradients, and later ones at once."""
        self.is_early = False
        for index, average in self._early.items():
            self.deliver(index, average)
        self._early.clear()

    def forget_early(self) -> None:
        """Drop the averages that came early."""
        self._early.clear()

    def of(self, slot: int, gradient: torch.Tensor, is_gradient: bool) -> torch.Tensor:
        """Return the average of a member whose groups have all been delivered.

        They were not written to its memory.

        Args:
            slot: The member.
            gradient: Its gradient.
            is_gradient: Whether it is a parameter's ``grad``.
        """
        parts = [self._kept[group][piece.in_group] for group, piece in self._layout.pieces_of[slot]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        result = whole.view(self._layout.members[slot].shape)
        return _strided_like(gradient, result) if is_gradient else result

    def _place_of(self, index: int, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory of a gradient for the average of its only member, or None."""
        group = self._layout.groups[index]
        if not self._arrivals.in_place[group.pieces[0].slot]:
            return None
        own = self._arrivals.own_memory(group)
        return own if own is not None and (own.numel(), own.dtype) == (size, dtype) else None

    @torch.no_grad()
    def _write_back(self, index: int, decoded: torch.Tensor) -> torch.Tensor | None:
        """Copy a decoded group to its gradients' memory.

        Returns:
            A copy of the group if some of it could not be written back, else None.
        """
        tensors, pieces = self._arrivals.tensors, self._layout.groups[index].pieces
        in_place = self._arrivals.in_place
        back = [piece for piece in pieces if in_place[piece.slot]]
        back = [piece for piece in back if tensors[piece.slot] is not None]
        if len(back) == len(pieces):
            targets = views_beside(pieces, tensors, decoded)
            if targets is not None:
                if len(targets) > 1 or targets[0].data_ptr() != decoded.data_ptr():
                    sizes = [piece.numel for piece in pieces]
                    torch.split_with_sizes_copy(decoded, sizes, out=targets)
                return None
        for piece in back:
            view_of(piece, cast(torch.Tensor, tensors[piece.slot])).copy_(decoded[piece.in_group])
        there = sum(tensors[piece.slot] is not None for piece in pieces)
        # The memory of ``decoded`` is reused.
        return None if len(back) == there else decoded.clone()


def _strided_like(gradient: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return ``result`` with the gradient's strides, unless its coordinates overlap.

    Optimizers may compare strides of gradients and weights.
    """
    if result.stride() == gradient.stride():
        return result
    like = torch.empty_like(gradient)
    return like.copy_(result) if like.stride() == gradient.stride() else result
