"""Define Anchors, the parameters that a round of LocalSGD begins with, and their outer SGD."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hvd_adaptive.base.device import HOST
from hvd_adaptive.base.finite import wide_of
from hvd_adaptive.states import checksums

Parameter = torch.nn.Parameter


class Anchors:
    """Copies of the parameters that require a gradient, which a Nesterov SGD moves by averages."""

    def __init__(self, parameters: Iterable[Parameter], momentum: float, lr: float) -> None:
        self._momentum, self._lr = momentum, lr
        self._copies: dict[Parameter, torch.Tensor] = {}
        self._outer = self._sgd()
        self._replace({p: p.detach().clone() for p in parameters if p.requires_grad})

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._copies

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._copies)

    def start_at(
        self, parameters: Sequence[Parameter], values: Sequence[torch.Tensor], mixing: float
    ) -> None:
        """Let parameters that had no anchor have these values as anchors; see ``move``."""
        pairs = zip(parameters, values, strict=True)
        self._replace(self._copies | {p: value.to(p, copy=True) for p, value in pairs})
        self._mix(parameters, mixing)

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
        """Return the anchor minus the parameter."""
        return self._copies[parameter] - parameter

    def move(
        self, parameters: Sequence[Parameter], averages: Sequence[torch.Tensor], mixing: float
    ) -> None:
        """Take a step of the SGD by averages of all ranks' ``way``, and set the parameters to their
        anchors.

        A parameter keeps a share ``mixing`` of itself; a frozen one keeps none, so that it does not
        differ from its anchor for ever.
        """
        for parameter, average in zip(parameters, averages, strict=True):
            self._copies[parameter].grad = average
        self._outer.step()
        self._outer.zero_grad()
        self._mix(parameters, mixing)

    def _mix(self, parameters: Sequence[Parameter], mixing: float) -> None:
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
        return checksums(self._copies[parameter] for parameter in parameters)

    def state_dict(self, parameters: Sequence[Parameter]) -> dict[str, Any]:
        """Return the anchors of these parameters, None for those without one, and the SGD."""
        anchors = [self._copies.get(parameter) for parameter in parameters]
        copies = [None if anchor is None else anchor.clone() for anchor in anchors]
        return {"anchors": copies, "outer": self._outer.state_dict()}

    def load(
        self, parameters: Sequence[Parameter], anchors: Sequence[torch.Tensor | None], outer: Any
    ) -> None:
        """Load what ``state_dict`` returned."""
        pairs = zip(parameters, anchors, strict=True)
        self._replace({p: anchor.to(p, copy=True) for p, anchor in pairs if anchor is not None})
        self._outer.load_state_dict(outer)

    def _replace(self, copies: dict[Parameter, torch.Tensor]) -> None:
        self._copies, last = copies, self._outer
        self._outer = self._sgd()
        kept = {a: last.state[a] for a in copies.values() if a in last.state}
        self._outer.state.update(kept)

    def _sgd(self) -> torch.optim.SGD:
        anchors = list(self._copies.values()) or [torch.zeros(0, **HOST)]  # SGD refuses none at all
        return torch.optim.SGD(anchors, self._lr, self._momentum, nesterov=self._momentum > 0)
