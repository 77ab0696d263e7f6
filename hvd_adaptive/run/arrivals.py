"""Define Arrivals, the gradients of one step and the averages that replace them, and copy between
gradients and groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from hvd_adaptive.layout import Group, Layout, Piece
from hvd_adaptive.run.rank_context import RankContext


class Arrivals:
    """The gradients of one step by slot: they are gathered in groups, and averages are written
    back.

    ``arrive`` may be called by any thread. The other methods need a lock of the caller's, and see
    what arrived before the last ``read``. ``trip.Gradients`` describes those that trips call.

    While ``is_early`` averages stay in memory of their own, because autograd may still add to
    gradients, and the program may read them. Later ones replace the gradients at once.

    Args:
        context: Owns the memory that groups share.
        on_news: Function that is called after an arrival, in its thread.
        every: Whether to call it after each arrival, not only after those that are news: the first
            one, or a group is complete. If several threads call ``arrive`` at the same time, a
            complete group may be missed.
        disjoint: Whether gradients of one storage are known not to overlap.

    Attributes:
        tensors: The gradients by slot; None before they arrive and after their average is returned.
        in_place: For each slot, whether the average may be written to the gradient's memory.
        replaced: All gradients that averages replace.
        here: For each slot, whether its gradient has arrived.
        device: The device of the gradients; the CPU before the first one.
        on_cpu: Whether the first one has arrived, on the CPU.
        mail: Slots of gradients that arrived after the last ``read``.
        early: The averages that came early and have not replaced gradients, by group.
        kept: The averages that could not be written back, by group.
        lacking: For each group, how many gradients had not arrived at the last ``read``.
    """

    def __init__(
        self,
        context: RankContext,
        layout: Layout,
        on_news: Callable[[], None],
        every: bool,
        disjoint: bool = False,
    ) -> None:
        count = len(layout.members)
        self._context, self._layout, self._disjoint = context, layout, disjoint
        self._on_news, self._every = on_news, every
        self.tensors: list[torch.Tensor | None] = [None] * count
        self.in_place = [False] * count
        self.replaced: list[torch.Tensor] = []
        self.device, self.on_cpu, self._any = torch.device("cpu"), False, False
        # Gradients are many: nothing here adds an object per gradient to the garbage collector's.
        self.mail: deque[int] = deque()
        self.here, self.is_gradient = bytearray(count), bytearray(count)
        self._memory: dict[int, int] = {}  # the first slot with a gradient in each storage
        self.lacking = list(layout.counts)
        self._unposted = list(layout.counts)
        # The streams on which gradients became ready: autograd runs each operation's backward pass
        # on the stream of its forward pass.
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.is_early = True
        self.early: dict[int, torch.Tensor] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self.buffer = context.buffer

    def missing(self) -> Iterator[int]:
        """Return the members whose gradients have not arrived."""
        slot = self.here.find(0)
        while slot >= 0:
            yield slot
            slot = self.here.find(0, slot + 1)

    def describe(self) -> str:
        """Return in words how many gradients have arrived, and some that have not."""
        members = self._layout.members
        missing = [members[slot].name for slot in self.missing()]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        without = f", without {', '.join(missing[:3])}{more}" if missing else ""
        there = len(members) - len(missing)
        return f"{there} of {len(members)} gradients have arrived{without}"

    def arrive(self, slot: int, tensor: torch.Tensor, is_gradient: bool = True) -> None:
        """Accept a gradient; its average may replace it if it is a parameter's, ``is_gradient``."""
        news = not self._any
        if not (self.on_cpu and tensor.is_cpu):
            if news or tensor.device != self.device:
                self._context.compressor.parts.default.payloads.check_device(tensor.device)
            if tensor.is_cuda:
                self._streams[slot] = torch.cuda.current_stream(tensor.device)
        if news:
            self._any, self.device, self.on_cpu = True, tensor.device, tensor.is_cpu
        self.tensors[slot], self.is_gradient[slot], self.here[slot] = tensor, is_gradient, True
        self.mail.append(slot)
        for group, _ in self._layout.pieces_of[slot]:
            self._unposted[group] -= 1
            news = news or not self._unposted[group]
        if news or self._every:
            self._on_news()

    def read(self) -> None:
        """Note the gradients that arrived."""
        while self.mail:
            slot = self.mail.popleft()
            tensor = self.tensors[slot]
            assert tensor is not None
            # Results are written to the gradients' own memory, so that no step allocates memory.
            # Autograd may give two parameters one gradient; such gradients are not written to.
            if self.is_gradient[slot] and not tensor.is_inference():
                self.replaced.append(tensor)
                self.in_place[slot] = tensor.is_contiguous()
            other = self._memory.setdefault(tensor.untyped_storage().data_ptr(), slot)
            if other != slot and not self._disjoint:
                self.in_place[slot] = self.in_place[other] = False
            for group, _ in self._layout.pieces_of[slot]:
                self.lacking[group] -= 1

    def gather(self, index: int, changed: bool) -> torch.Tensor:
        """Return a group's coordinates, valid until the next call; see ``trip.Gradients``."""
        group = self._layout.groups[index]
        if self._streams:
            self._join(group)
        if not changed and (own := self._own_memory(group)) is not None:
            return own
        flat = self.buffer("gradients", group.coordinates, group.dtype, self.device)
        gather(group, self.tensors, flat)
        return flat

    def _join(self, group: Group) -> None:
        """Make the current stream wait for the gradients of a group."""
        for stream in {self._streams[slot] for slot in group.slots if slot in self._streams}:
            current = torch.cuda.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)

    def _own_memory(self, group: Group) -> torch.Tensor | None:
        """Return the group in its only member's memory, or None if that is impossible."""
        if len(group.pieces) != 1:
            return None
        tensor = self.tensors[group.pieces[0].slot]
        if tensor is None or not tensor.is_contiguous():
            return None
        return view_of(group.pieces[0], tensor.detach())

    def result(
        self, index: int, coordinates: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for a group's average: its only member's gradient, or a buffer."""
        if self.is_early:
            return self.buffer(f"result of group {index}", coordinates, dtype, device)
        group = self._layout.groups[index]
        own = self._own_memory(group) if self.in_place[group.pieces[0].slot] else None
        if own is None or (own.numel(), own.dtype) != (coordinates, dtype):
            return self.buffer("result", coordinates, dtype, device)
        return own

    @torch.no_grad()
    def deliver(self, index: int, average: torch.Tensor) -> None:
        if self.is_early:
            self.early[index] = average
            return
        group = self._layout.groups[index]
        if all(map(self.in_place.__getitem__, group.slots)):
            targets = views_beside(group.pieces, self.tensors, average)
            if targets is not None:
                if len(targets) > 1 or targets[0].data_ptr() != average.data_ptr():
                    torch.split_with_sizes_copy(average, group.sizes, out=targets)
                return
        for piece in group.pieces:
            tensor = self.tensors[piece.slot]
            if tensor is not None and self.in_place[piece.slot]:
                view_of(piece, tensor).copy_(average[piece.in_group])
            elif tensor is not None and index not in self.kept:
                self.kept[index] = average.clone()  # its memory is reused

    def of(self, slot: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the average of a delivered member that was not written to its memory."""
        parts = [self.kept[group][piece.in_group] for group, piece in self._layout.pieces_of[slot]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        result = whole.view(self._layout.members[slot].shape)
        if not self.is_gradient[slot] or result.stride() == gradient.stride():
            return result
        # Optimizers may compare strides of gradients and weights. Coordinates may overlap.
        like = torch.empty_like(gradient)
        return like.copy_(result) if like.stride() == gradient.stride() else result


@torch.no_grad()  # create_graph=True: payloads carry no graph
def gather(group: Group, tensors: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
    """Copy the members' tensors, by slot, to ``flat``; None stands for zeros."""
    views = views_beside(group.pieces, tensors, flat)
    if views is not None:
        torch.cat(views, out=flat)
        return
    for piece in group.pieces:
        tensor, target = tensors[piece.slot], flat[piece.in_group]
        if tensor is None:
            target.zero_()
        elif piece.numel == tensor.numel():
            target.view(tensor.shape).copy_(tensor)
        else:
            target.copy_(tensor.reshape(-1)[piece.start : piece.stop])


def views_beside(
    pieces: Sequence[Piece], tensors: Sequence[torch.Tensor | None], other: torch.Tensor
) -> list[torch.Tensor] | None:
    """Return ``view_of`` each piece, in one loop, because a group may have thousands.

    The result is None unless all tensors are contiguous and on the device of ``other``.
    """
    views, on_cpu = [], other.is_cpu
    for piece in pieces:
        tensor = tensors[piece.slot]
        if tensor is None or not tensor.is_contiguous():
            return None
        if not (on_cpu and tensor.is_cpu) and tensor.device != other.device:
            return None
        flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        numel = piece.stop - piece.start
        views.append(flat if numel == flat.numel() else flat[piece.start : piece.stop])
    return views


def view_of(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    """Return a piece of a contiguous tensor, 1-D, without a copy."""
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    return flat if piece.numel == flat.numel() else flat[piece.start : piece.stop]
