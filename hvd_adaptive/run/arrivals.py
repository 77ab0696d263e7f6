"""Define Arrivals: the gradients of one step that are there already, and their memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from hvd_adaptive.base.device import Streams
from hvd_adaptive.layout import Group, Layout, gather, view_of


class Arrivals:
    """Hold the gradients of one step by slot.

    ``post`` may be called by any thread. The other methods need a lock of the caller's, and see
    what was posted before the last ``read``.

    Args:
        layout: The layout.
        disjoint: Whether gradients of one storage are known not to overlap.

    Attributes:
        tensors: The gradients by slot; None before they arrive and after ``take``.
        in_place: For each slot, whether the average may be written to the gradient's memory.
        replaced: All gradients that averages replace.
        here: For each slot, whether its gradient has arrived.
        is_gradient: For each slot, whether the tensor is a parameter's gradient, which the average
            may replace.
        device: The device of the gradients; None before the first one.
        on_cpu: Whether the first one is on the CPU.
    """

    def __init__(self, layout: Layout, disjoint: bool = False) -> None:
        self._layout, self._disjoint = layout, disjoint
        self.tensors: list[torch.Tensor | None] = [None] * len(layout.members)
        self.in_place = [False] * len(layout.members)
        self.replaced: list[torch.Tensor] = []
        self.device: torch.device | None = None
        self.on_cpu = False
        # Gradients are many: nothing here adds an object per gradient to the garbage collector's.
        self._mail: deque[int] = deque()  # slots
        self.here = bytearray(len(layout.members))
        self.is_gradient = bytearray(len(layout.members))
        self._memory: dict[int, int] = {}  # the first slot with a gradient in each storage
        self._missing = [len(group.slots) for group in layout.groups]
        self._unposted = self._missing.copy()
        self._streams = Streams()

    def missing(self) -> Iterator[int]:
        """Return the members whose gradients have not arrived."""
        slot = self.here.find(0)
        while slot >= 0:
            yield slot
            slot = self.here.find(0, slot + 1)

    def post(self, slot: int, tensor: torch.Tensor, is_gradient: bool) -> bool:
        """Accept a member's gradient.

        Args:
            slot: The member.
            tensor: The gradient.
            is_gradient: Whether it is a parameter's gradient, which the average may replace.

        Returns:
            Whether it is the first one, or a group is complete now. If several threads post at the
            same time, a complete group may be missed.
        """
        first = self.device is None
        if first:
            self.device, self.on_cpu = tensor.device, tensor.is_cpu
        if not self.on_cpu:
            self._streams.arrived(slot, tensor)
        self.tensors[slot], self.is_gradient[slot], self.here[slot] = tensor, is_gradient, True
        self._mail.append(slot)
        for group, _ in self._layout.pieces_of[slot]:
            self._unposted[group] -= 1
            first = first or not self._unposted[group]
        return first

    def read(self) -> None:
        """Note the gradients that were posted."""
        while self._mail:
            slot = self._mail.popleft()
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
                self._missing[group] -= 1

    def take(self, slot: int) -> torch.Tensor:
        """Return the member's gradient, which leaves the step."""
        tensor, self.tensors[slot] = self.tensors[slot], None
        if tensor is None:
            raise RuntimeError(
                f"{self._layout.members[slot].name}: no gradient is in this step; it has not "
                "arrived, or its result was read before"
            )
        return tensor

    def all_of(self, group: int) -> bool:
        """Return whether all gradients of a group have arrived."""
        return not self._missing[group]

    def any_of(self, group: int) -> bool:
        """Return whether any gradient of a group has arrived."""
        return self._missing[group] < len(self._layout.groups[group].slots)

    def own_memory(self, group: Group) -> torch.Tensor | None:
        """Return the group in its only member's memory.

        The result is None if the group has several members or the gradient is not contiguous.
        """
        if len(group.pieces) != 1:
            return None
        (piece,) = group.pieces
        tensor = self.tensors[piece.slot]
        if tensor is None or not tensor.is_contiguous():
            return None
        return view_of(piece, tensor.detach())

    def join(self, group: Group) -> None:
        """Make the current stream wait for the gradients of a group."""
        self._streams.join(group.slots)

    def gather(self, group: Group, flat: torch.Tensor) -> torch.Tensor:
        """Copy a group's gradients to ``flat``, and return it."""
        gather(group, self.tensors, flat)
        return flat
