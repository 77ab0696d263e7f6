"""Define Fragments, the parts of a model that LocalSGD averages in turn, and their Anchors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvd_adaptive import states
from hvd_adaptive.base.checks import check_integer
from hvd_adaptive.base.tensors import HOST, wide_of

Parameter = torch.nn.Parameter


class Fragments:
    """The number and the fragment of each parameter, which it keeps.

    The first parameters are divided in their order, into parts of about as many coordinates that
    require a gradient. Later ones join the smallest fragment.

    Attributes:
        averaged: The parameters of each fragment's last round, which share groups until its next.

    Raises:
        ValueError: A fragment would have no parameter that requires a gradient.
    """

    def __init__(
        self, parameters: Sequence[Parameter], number: int, names: Mapping[Parameter, str] = {}
    ) -> None:
        self.number, self._names = number, names
        self._of: dict[Parameter, int] = {}
        self._numbers: dict[Parameter, int] = {}
        self._next = 0  # number of the next parameter
        sizes = [p.numel() * p.requires_grad for p in parameters]
        if number > (most := max(1, sum(map(bool, sizes)))):
            raise ValueError(
                f"fragments={number}: must be at most the number of parameters that require a "
                f"gradient, {most}: construct LocalSGD before layers are frozen, or give fewer"
            )
        for parameter, fragment in zip(parameters, _divide(sizes, number), strict=True):
            self._place(parameter, self._next, fragment)
        self.averaged = self._divided(p for p in parameters if p.requires_grad)

    def __getitem__(self, parameter: Parameter) -> int:
        return self._of[parameter]

    def name_of(self, parameter: Parameter) -> str:
        """Return a parameter's name, or its number, which no other one has had."""
        number = self._numbers[parameter]
        return self._names.get(parameter, f"parameter {number}" if self._names else str(number))

    def _divided(self, parameters: Iterable[Parameter]) -> list[list[Parameter]]:
        parts: list[list[Parameter]] = [[] for _ in range(self.number)]
        for parameter in parameters:
            parts[self._of[parameter]].append(parameter)
        return parts

    def keep(self, parameters: Sequence[Parameter]) -> None:
        """Forget all parameters but these, and place new ones."""
        new = [p for p in parameters if p not in self._of]
        for parameter in set(self._of).difference(parameters):
            del self._of[parameter], self._numbers[parameter]
        self.averaged = [[p for p in part if p in self._of] for part in self.averaged]
        for parameter in new:
            sizes = [0] * self.number
            for other, fragment in self._of.items():
                sizes[fragment] += other.numel()
            self._place(parameter, self._next, sizes.index(min(sizes)))

    def state_dict(self, parameters: Sequence[Parameter]) -> dict[str, Any]:
        """Return the number and the fragment of each of these parameters, and whether it was
        averaged in the last round of its fragment.
        """
        averaged = {p for part in self.averaged for p in part}
        return {
            "numbers": [self._numbers[p] for p in parameters],
            "fragments": [self._of[p] for p in parameters],
            "averaged": [p in averaged for p in parameters],
        }

    def loaded(self, parameters: Sequence[Parameter], state: Mapping[str, Any]) -> Fragments:
        """Return what ``state_dict`` returned; raise ValueError if it is of other parameters."""
        numbers, of = states.entry(state, "numbers"), states.entry(state, "fragments")
        averaged = states.entry(state, "averaged")
        if not len(numbers) == len(of) == len(averaged) == len(parameters):
            raise ValueError("state: fragments: are not those of this optimizer's parameters")
        new = Fragments((), 1, self._names)
        new.number = self.number
        for parameter, number, fragment in zip(parameters, numbers, of, strict=True):
            check_integer("state: fragments", fragment, 0, self.number - 1)
            new._place(parameter, check_integer("state: numbers", number, 0), fragment)
        new.averaged = new._divided(itertools.compress(parameters, averaged))
        return new

    def _place(self, parameter: Parameter, number: int, fragment: int) -> None:
        self._of[parameter], self._numbers[parameter] = fragment, number
        self._next = max(self._next, number + 1)


def is_due(step: int, every: int, fragments: int) -> bool:
    """Return whether a fragment's round begins after step number ``step``, from 1 to ``every``, of
    a period of ``every`` steps, over which the rounds are spread.
    """
    return step * fragments // every > (step - 1) * fragments // every


def _divide(sizes: Sequence[int], number: int) -> list[int]:
    """Return the part of each size: consecutive parts of about equal sums, none of which is 0."""
    rest, parts, part, filled = sum(sizes), [], 0, 0
    for index, size in enumerate(sizes):
        share = (rest + filled) / (number - part)  # of the parts from this one on
        later = sum(map(bool, sizes[index:]))
        full = filled + size / 2 > share or later <= number - part - 1
        if size and filled and full and part < number - 1:
            part, filled = part + 1, 0
        parts.append(part)
        filled, rest = filled + size, rest - size
    return parts


class Anchors:
    """Copies of the parameters that require a gradient, which a Nesterov SGD moves by averages."""

    @torch.inference_mode(False)
    def __init__(self, parameters: Iterable[Parameter], momentum: float, lr: float) -> None:
        self._momentum, self._lr = momentum, lr
        self._copies: dict[Parameter, torch.Tensor] = {}
        self._outer = self._sgd([])
        self._replace({p: p.detach().clone() for p in parameters if p.requires_grad})

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._copies

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._copies)

    def start_at(self, values: Mapping[Parameter, torch.Tensor], mixing: float) -> None:
        """Let parameters that had no anchor have these values as anchors; see ``move``."""
        self._replace(self._copies | {p: value.to(p, copy=True) for p, value in values.items()})
        self._mix(values, mixing)

    def keep(self, parameters: Iterable[Parameter]) -> None:
        """Forget all parameters but these."""
        kept = {p: self._copies[p] for p in parameters if p in self._copies}
        if len(kept) < len(self._copies):
            self._replace(kept)

    def has_moved(self, parameter: Parameter) -> bool:
        """Return whether a parameter has an anchor and differs from it."""
        anchor = self._copies.get(parameter)
        return anchor is not None and not torch.equal(anchor, parameter)

    def way(self, parameter: Parameter) -> torch.Tensor:
        return self._copies[parameter] - parameter

    def move(self, averages: Mapping[Parameter, torch.Tensor], mixing: float) -> None:
        """Take a step of the SGD by averages of all ranks' ``way``, and set the parameters to their
        anchors.

        A parameter keeps a share ``mixing`` of itself; a frozen one keeps none, so that it does not
        differ from its anchor for ever.
        """
        for parameter, average in averages.items():
            self._copies[parameter].grad = average
        self._outer.step()
        self._outer.zero_grad()
        self._mix(averages, mixing)

    def _mix(self, parameters: Iterable[Parameter], mixing: float) -> None:
        for parameter in parameters:
            anchor = self._copies[parameter]
            if mixing and parameter.requires_grad:
                parameter.mul_(mixing).add_(anchor, alpha=1.0 - mixing)
            else:
                parameter.copy_(anchor)  # also over NaN

    @property
    def full_bytes(self) -> int:
        """Return the bytes of all anchors in the precision of an uncompressed average."""
        return sum(a.numel() * wide_of(a.dtype).itemsize for a in self._copies.values())

    def checksums(self, parameters: Sequence[Parameter]) -> list[int]:
        """Return 32 bits of the anchor of each of these parameters."""
        return states.checksums(self._copies[parameter] for parameter in parameters)

    def state_dict(self, parameters: Sequence[Parameter]) -> dict[str, Any]:
        """Return the anchors of these parameters, None for those without one, and the SGD."""
        own = [self._copies[p] for p in parameters if p in self._copies]
        outer = self._sgd(own, self._outer.state)  # in the order in which ``load`` has them
        return {"anchors": clones(self._copies, parameters), "outer": outer.state_dict()}

    def load(
        self, parameters: Sequence[Parameter], anchors: Sequence[torch.Tensor | None], outer: Any
    ) -> None:
        """Load what ``state_dict`` returned."""
        pairs = zip(parameters, anchors, strict=True)
        self._replace({p: anchor.to(p, copy=True) for p, anchor in pairs if anchor is not None})
        self._outer.load_state_dict(outer)

    def _replace(self, copies: dict[Parameter, torch.Tensor]) -> None:
        self._copies, self._outer = copies, self._sgd(copies.values(), self._outer.state)

    def _sgd(
        self, anchors: Iterable[torch.Tensor], state: Mapping[torch.Tensor, Any] = {}
    ) -> torch.optim.SGD:
        """Return an SGD of these anchors, with their ``state``."""
        moved = list(anchors) or [torch.zeros(0, **HOST)]  # SGD refuses none at all
        new = torch.optim.SGD(moved, self._lr, self._momentum, nesterov=self._momentum > 0)
        new.state.update({a: state[a] for a in moved if a in state})
        return new


def clones(
    tensors: Mapping[Parameter, torch.Tensor], parameters: Sequence[Parameter]
) -> list[torch.Tensor | None]:
    """Return a copy of the tensor of each parameter, None for those without one."""
    return [tensors[p].clone() if p in tensors else None for p in parameters]
