"""Define EarlyGroups: groups of gradients that are handed over before their bucket is full.

DDP calls its hook when a bucket is full. The last buckets are full only at the end of the backward
pass, so their exchange would begin there. But DDP copies each gradient to its bucket when autograd
has accumulated it, and the buckets' memory stays the same. A hook on autograd's accumulators
therefore knows which gradients are in their buckets: those that were accumulated before.

A hook around ours may change a bucket first. Nothing is handed over early then.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_adaptive.base.tensors import HostCopy, stacked
from hvd_adaptive.layout import Layout

# Receives gradients by slot, views of the buckets' memory.
HandOver = Callable[[Mapping[int, torch.Tensor]], None]
NO_PASS = -1
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class EarlyGroups:
    """Hand a group over when the last of its gradients is in its bucket.

    Only gradients of the backward pass whose first bucket has reached DDP's hook are handed over: a
    pass within ``no_sync`` reaches no hook.

    After two steps with buckets in the same memory, one step compares it with ``parameter.grad``.
    In later steps, groups are handed over whose gradients all were in their place and not zero, and
    were not accumulated in another pass during a step, as in reentrant checkpoints. Nor is a group
    whose bucket was full only in a later step. If the memory changes, all this is repeated.

    1. ``lay_out`` adds hooks to the parameters of buckets that have several groups.
    2. The caller hands over ``rest_of`` each bucket that DDP's hook receives.
    3. ``begin`` a step after its first bucket.
    4. ``end`` a step, or ``stop`` it.

    Attributes:
        sent: Slots that were handed over in this step.
    """

    def __init__(self, hand_over: HandOver) -> None:
        self._hand_over = hand_over
        self._members = 0  # of the layout
        self._parameters: dict[int, torch.nn.Parameter] = {}  # by slot
        self._slots_of: list[Sequence[int]] = []  # of each group
        self._groups_of: dict[int, set[int]] = {}  # of each slot
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # accumulators, which live as long as somebody holds them
        self._forget()

    def _forget(self) -> None:
        self._addresses: dict[int, int] = {}  # by slot, of the last step
        self._memory: dict[int, torch.Tensor] = {}  # by slot, if two steps had the same
        self._equal: dict[int, torch.Tensor] = {}  # whether a gradient was in its place, by slot
        self._flags: HostCopy | None = None  # the same, on their way to the host
        self._fit: set[int] | None = None  # slots that were; None before the comparison
        self._twice: set[int] = set()  # slots
        self._pass_of: dict[int, int] = {}  # by slot, the pass that accumulated it last
        self.stop()

    def lay_out(self, layout: Layout, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        """Watch parameters, by slot, whose groups may be complete before their bucket."""
        self.remove()
        self._members = len(layout.members)
        self._slots_of = [sorted(group.slots) for group in layout.groups]
        self._parameters = {slot: p for slot, p in parameters.items() if p.requires_grad}
        self._groups_of = {
            slot: {group for group, _ in layout.pieces_of[slot]} for slot in self._parameters
        }
        own = weakref.ref(self)  # autograd's objects are not seen by the garbage collector
        for slot, parameter in self._parameters.items():
            node = _accumulator(parameter)
            self._nodes.append(node)
            self._hooks.append(node.register_hook(functools.partial(_accumulated, own, slot)))

    def remove(self) -> None:
        """Watch no parameters any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes, self._parameters = [], [], {}
        self._forget()

    def stop(self) -> None:
        """Hand over nothing before the next step."""
        self._pass = NO_PASS
        self._last: int | None = None  # slot that this pass has accumulated last
        self.sent: set[int] = set()
        self._received: set[int] = set()  # slots of this step's buckets
        self._missing: dict[int, int] = {}  # gradients of groups that may be handed over

    def begin(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Begin a step in the hook of its first bucket, which has these gradients, by slot."""
        self.stop()
        if not self._memory or not self._is_known(gradients):
            return
        if self._flags is not None:
            flags = zip(self._equal, self._flags.get().tolist(), strict=True)
            self._fit = {slot for slot, is_equal in flags if is_equal}
            self._flags, self._equal = None, {}
        self._received.update(gradients)
        if self._fit is not None:
            fit = self._fit - self._twice - self._received
            groups = {group for slot in fit for group in self._groups_of[slot]}
            self._missing = {
                group: len(self._slots_of[group])
                for group in groups
                if fit.issuperset(self._slots_of[group])
            }
        self._pass = torch._C._current_graph_task_id()
        for slot in [slot for slot, of in self._pass_of.items() if of == self._pass != NO_PASS]:
            self._note(slot)

    def rest_of(self, gradients: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Return the gradients of a bucket that were not handed over, and hand over none of them.

        RuntimeError is raised if the bucket has moved since its gradients were handed over.
        """
        sent = self.sent.intersection(gradients)
        if sent and not self._is_known(gradients):
            raise RuntimeError(
                "DistributedDataParallel has moved a bucket's memory during a backward pass; wrap "
                "the model anew, with a new CompressionState"
            )
        self._received.update(gradients)
        for slot in gradients:
            for group in self._groups_of.get(slot, ()):
                self._missing.pop(group, None)
        if not sent:
            return gradients
        return {slot: of for slot, of in gradients.items() if slot not in sent}

    def end(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """End a step whose buckets had these gradients, by slot."""
        # A later backward pass fills the buckets of the others, whose averages are averaged again.
        self._twice |= self.sent - gradients.keys()
        self.stop()
        if not self._parameters or len(gradients) < self._members:
            return
        if not self._is_known(gradients):
            self._forget()
            self._addresses = {slot: of.data_ptr() for slot, of in gradients.items()}
        elif not self._memory:
            self._memory = dict(gradients)
        elif self._fit is None and self._equal:
            first = next(iter(self._equal.values())).device
            self._flags = stacked([flag.to(first) for flag in self._equal.values()])

    def accumulated(self, slot: int) -> None:
        """Note that autograd has accumulated a gradient, which DDP copies before the next one.

        Its hook runs before ours or after it.
        """
        now = self._pass_of[slot] = torch._C._current_graph_task_id()
        if self._pass == NO_PASS:
            return
        if now == self._pass:
            last, self._last = self._last, slot
            if last is not None:
                self._note(last)
            return
        self._twice.add(slot)
        if slot in self.sent:
            raise RuntimeError(
                "a parameter's gradient was accumulated again in a nested backward pass, after its "
                "average was sent; call backward passes in the same order in every step"
            )

    def _note(self, slot: int) -> None:
        """Note that a gradient is in its bucket."""
        if slot in self._received:
            return
        if self._fit is None:
            if self._flags is None:
                self._equal[slot] = _is_at(self._memory[slot], self._parameters[slot].grad)
            return
        for group in self._groups_of[slot]:
            if group not in self._missing:
                continue
            self._missing[group] -= 1
            if not self._missing[group]:
                self._send(group)

    def _send(self, group: int) -> None:
        slots = [slot for slot in self._slots_of[group] if slot not in self.sent]
        self.sent.update(slots)
        if slots:
            self._hand_over({slot: self._memory[slot] for slot in slots})

    def _is_known(self, gradients: Mapping[int, torch.Tensor]) -> bool:
        """Return whether gradients are in the memory of the last step."""
        known = self._addresses
        return all(known.get(slot) == of.data_ptr() for slot, of in gradients.items())


def _accumulated(early: weakref.ref[EarlyGroups], slot: int, *_: Any) -> None:
    if (own := early()) is not None:
        own.accumulated(slot)


def _accumulator(parameter: torch.nn.Parameter) -> Any:
    """Return the node of autograd that accumulates a parameter's gradient."""
    with torch.enable_grad():
        function: Any = parameter.view_as(parameter).grad_fn
    return function.next_functions[0][0]


def _is_at(memory: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return whether memory holds a gradient in any order, by sums of bits. Zeros prove nothing."""
    if gradient is None or gradient.layout != torch.strided or gradient.dtype != memory.dtype:
        return torch.zeros((), dtype=torch.bool, device=memory.device)
    integers = _INTEGERS[memory.dtype.itemsize]
    here, there = memory.view(integers).sum(), gradient.detach().view(integers).sum()
    return (here == there) & (here != 0)
