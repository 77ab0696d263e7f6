"""Compare the lists of tensors that ranks average, before anything of them is sent."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_adaptive.base.device import check_supported
from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.coding.header import DTYPE_CODES
from hvd_adaptive.run.agreement import Description, differences
from hvd_adaptive.run.worker import gather_patiently

ADVICE = "Every rank must give average() tensors of the same kinds in the same order"
# (dtype, shape, whether the average is to have a gradient) of a tensor.
Kind = tuple[str, tuple[int, ...], bool]


def checked(tensors: Any) -> list[torch.Tensor | None]:
    """Return the tensors as a list; raise ValueError if one of them cannot be averaged."""
    if isinstance(tensors, torch.Tensor) or not hasattr(tensors, "__iter__"):
        kind = type(tensors).__name__
        raise ValueError(f"tensors: must be a list of tensors, not {kind}; for one give [tensor]")
    listed = list(tensors)
    for index, tensor in enumerate(listed):
        if tensor is not None and (wrong := _why_not(tensor)):
            raise ValueError(f"tensors[{index}]: {wrong}")
        if tensor is not None:
            check_supported(tensor.device)
    devices = {str(tensor.device) for tensor in listed if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"tensors: must be on one device, not on {', '.join(sorted(devices))}")
    return listed


def _why_not(tensor: Any) -> str:
    """Return why payloads cannot hold a tensor; "" if they can."""
    if not isinstance(tensor, torch.Tensor):
        return f"must be a tensor or None, not {type(tensor).__name__}"
    if isinstance(tensor, torch.nn.Parameter):
        return "is a parameter; give its gradient, p.grad (p.detach() to average parameters)"
    if type(tensor).__name__ == "DTensor":
        return "must not be a DTensor; give its local tensor, tensor.to_local()"
    if tensor.layout != torch.strided:
        return f"must be a dense tensor, not {tensor.layout}; give tensor.to_dense()"
    if tensor.is_complex():
        return "is complex; give torch.view_as_real(tensor)"
    if tensor.dtype not in DTYPE_CODES:
        return f"must be float16, bfloat16, float32 or float64, not {tensor.dtype}"
    return ""


@dataclass
class Lists:
    """Hold what ranks know of the lists that they average.

    Attributes:
        kinds: By position, the kind of the tensor in the last call in which a rank had one; None if
            there was none. It is the same on all ranks.
        present: By position, whether any rank has a tensor in this call.
    """

    kinds: list[Kind | None] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)

    def compare(
        self,
        world: Any,
        tensors: Sequence[torch.Tensor | None],
        needed: Sequence[bool],
        warn: Callable[[], None],
    ) -> None:
        """Compare the lists of all ranks, a collective.

        ``needed`` says by position whether the average is to have a gradient. ``warn`` is called
        while other ranks let this one wait.

        Raises:
            RankMismatchError: Lists differ, on all ranks. A tensor and None do not, unless the
                tensor requires a gradient.
        """
        pairs = zip(tensors, needed, strict=True)
        own = [None if tensor is None else _kind_of(tensor, needs) for tensor, needs in pairs]
        if len(own) != len(self.kinds):
            self.kinds = [None] * len(own)
        number = zlib.crc32(repr((own, self.kinds)).encode())
        everyone = gather_patiently(world, torch.tensor([number], device="cpu"), warn)
        kinds = own
        if bool((everyone != number).any()):
            kinds = _agreed(world.gather_objects(own))
        self.present = [kind is not None for kind in kinds]
        known = zip(kinds, self.kinds, strict=True)
        self.kinds = [before if kind is None else kind for kind, before in known]


def _kind_of(tensor: torch.Tensor, needed: bool) -> Kind:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), needed


def _agreed(everyone: Sequence[Sequence[Any]]) -> list[Kind | None]:
    """Return the kinds by position; None if no rank has a tensor there."""
    lengths = {len(kinds) for kinds in everyone}
    together = list(zip(*everyone, strict=False))
    found = [next((kind for kind in kinds if kind is not None), None) for kinds in together]
    # A rank without a tensor takes part in no backward pass through its average.
    strict = any(kind is not None and kind[2] for kind in found)
    described: list[Description] = [
        {"tensors": {"their number": str(len(kinds))}}
        if len(lengths) > 1
        else {"tensors": _described(kinds if strict else _filled(kinds, found))}
        for kinds in everyone
    ]
    if mismatch := differences(described, range(len(described)), ADVICE):
        raise RankMismatchError(mismatch)
    return [None if kind is None else (kind[0], tuple(kind[1]), kind[2]) for kind in found]


def _filled(kinds: Sequence[Any], found: Sequence[Any]) -> list[Any]:
    return [other if kind is None else kind for kind, other in zip(kinds, found, strict=True)]


def _described(kinds: Sequence[Any]) -> dict[str, str]:
    """Return sentences about kinds, by position."""
    sentences = {}
    for index, kind in enumerate(kinds):
        if kind is not None:
            gradient = ", which requires a gradient" if kind[2] else ""
            sentences[f"tensors[{index}]"] = f"{kind[0]} {list(kind[1])}{gradient}"
    return sentences
