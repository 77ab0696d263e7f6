"""Serve the calls of average() with one compressor; ranks compare their lists before they send."""

from __future__ import annotations

import functools
import itertools
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.base.tensors import wide_of
from hvd_adaptive.changes import begin_step
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.hooks.rounds import Background, TensorSession, find_world
from hvd_adaptive.layout import Layout, Member, build_layout
from hvd_adaptive.run.agreement import Description, compare_settings, differences
from hvd_adaptive.run.driver import FIND_IT, gather_patiently
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.training import TensorKind, rank_and_size

Tensors = list["torch.Tensor | None"]
# (dtype, shape, whether the average is to have a gradient) of a tensor.
Kind = tuple[str, tuple[int, ...], bool]

logger = logging.getLogger("hvd_adaptive")

ADVICE = "Every rank must give average() tensors of the same kinds in the same order"
LATE = "rank %d still waits for other ranks to call average()\n%s"
_numbers = itertools.count()


class Averaging:
    """An ``average`` in progress.

    Examples:
        >>> from hvd_adaptive import ALQ, average
        >>> begun = average([torch.ones(2048)], ALQ(bits=3), async_op=True)
        >>> averages = begun.wait()
    """

    def __init__(self, background: Background[Tensors]) -> None:
        self._background = background

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return or raise at once."""
        return self._background.done()

    def wait(self) -> Tensors:
        """Return the averages, or raise the error; see ``average``."""
        return self._background.result()


class ListSession(TensorSession):
    """The calls of ``average`` with one compressor; a Connection."""

    serves = "list", "average()"

    def __init__(self, compressor: GradientCompressor, group: Any) -> None:
        super().__init__(compressor)
        self.group = group
        self._label = f"hvd_adaptive.average{next(_numbers)}"
        self._kinds: list[TensorKind | None] = []  # of the layout
        self._present: list[bool] = []  # by position, whether any rank has a tensor in this call
        self._last: Background[Tensors] | None = None
        self._find_ranks()

    def check(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Raise ValueError if the compressor's names are not those of the tensors."""
        settings = self.compressor.settings
        named: Any = settings.named_parameters
        if named is None:
            if settings.parameter_bits is not None:
                raise ValueError(
                    "parameter_bits: the tensors' names are unknown: give the compressor "
                    "named_parameters="
                )
        elif len(named) != len(tensors):
            raise ValueError(
                f"tensors: must be one for each of named_parameters, {len(named)}, not "
                f"{len(tensors)}"
            )

    def _join(self) -> None:
        if self._last is not None:
            self._last.exception()
            self._last = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, tensors: Sequence[torch.Tensor | None]) -> Averaging:
        """Average in a thread, after the averages in progress."""
        self._current_world()  # which is made in the order of the program
        copies = [None if tensor is None else _copy(tensor) for tensor in tensors]
        previous = self._last

        def work() -> Tensors:
            if previous is not None:
                previous.exception()
            return self.average(copies, (), are_copies=True)

        self._last = Background(work, _device_of(copies), "hvd_adaptive.average")
        return Averaging(self._last)

    @torch.inference_mode(False)  # averages and residuals may be changed later
    @torch.no_grad()
    def average(
        self,
        tensors: Sequence[torch.Tensor | None],
        needed: Sequence[bool],
        are_copies: bool = False,
    ) -> Tensors:
        """Return the averages, a step of the compressor.

        Args:
            needed: By position, whether the average is to have a gradient; () if none is.
            are_copies: The tensors are copies, which averages may replace.
        """
        world = self._current_world()
        if not are_copies:
            tensors = [None if tensor is None else _copy(tensor) for tensor in tensors]
        if world.size == 1:
            return list(tensors)
        self._compare(world, tensors, needed or [False] * len(tensors))
        present = self._present
        if not any(present):
            return list(tensors)
        device = _device_of(tensors)
        averages = [
            self._zeros(slot, device) if tensor is None else tensor
            for slot, tensor in enumerate(tensors)
        ]
        self._take_step(world, averages)
        return [a if there else None for a, there in zip(averages, present, strict=True)]

    def _compare(
        self, world: Any, tensors: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> None:
        """Compare the lists of all ranks, a collective; see ``average``.

        Raises:
            RankMismatchError: Lists differ, on all ranks. A tensor and None do not, unless the
                tensor requires a gradient.
        """
        own: list[Kind | None] = [
            None
            if tensor is None
            else (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), needs)
            for tensor, needs in zip(tensors, needed, strict=True)
        ]
        known = self.compressor._training.tensors
        number = zlib.crc32(repr((own, known)).encode())
        warn = functools.partial(logger.warning, LATE, world.rank, FIND_IT)
        everyone = gather_patiently(world, torch.tensor([number], device="cpu"), warn)
        kinds = own
        if bool((everyone != number).any()):
            lists, knowns = zip(*world.gather_objects((own, known)), strict=True)
            kinds, known = _agreed(lists), knowns[0]  # other ranks may be new
        if len(known) != len(kinds):
            known = [None] * len(kinds)
        self._present = [kind is not None for kind in kinds]
        self.compressor._training.tensors = [
            before if kind is None else (kind[0], tuple(kind[1]))
            for kind, before in zip(kinds, known, strict=True)
        ]

    @torch.no_grad()
    def average_exactly(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """Return the averages without compression, which are no step of the compressor."""
        self.wait()
        world = self._current_world()
        there = [tensor for tensor in tensors if tensor is not None]
        wide = [tensor.to(wide_of(tensor.dtype), copy=True) for tensor in there]
        if world.size > 1:
            world.average_all(wide, f"{self._label}.backward")
        averages = (w.to(tensor.dtype) for w, tensor in zip(wide, there, strict=True))
        return [None if tensor is None else next(averages) for tensor in tensors]

    def _zeros(self, slot: int, device: torch.device) -> torch.Tensor | None:
        """Return zeros if this rank lacks a tensor of the step, or a residual needs a place."""
        training = self.compressor._training
        kind = training.tensors[slot]
        if kind is None or not (self._present[slot] or training.residuals):
            return None
        return torch.zeros(kind[1], dtype=getattr(torch, kind[0]), device=device)

    def _take_step(self, world: Any, tensors: Sequence[torch.Tensor | None]) -> None:
        """Replace tensors by their averages."""
        begin_step(self.compressor)
        kinds = self.compressor._training.tensors
        if self._binding is None or self._binding.world is not world:
            self._binding = RankContext(self.compressor, world, self._label)
            self._kinds = []
        if self._kinds != kinds:
            self._binding.layout, self._kinds = self._laid_out(self._binding, kinds), kinds
            world.forget_lengths()
        there = (t for t, kind in zip(tensors, kinds, strict=True) if kind is not None)
        here = {slot: tensor for slot, tensor in enumerate(there) if tensor is not None}
        self.replace(self._binding, here)

    def _laid_out(self, binding: RankContext, kinds: Sequence[TensorKind | None]) -> Layout:
        named = self.compressor.settings.named_parameters
        names = [name for name, _ in named] if named else list(map(str, range(len(kinds))))
        part_of = self.compressor.parts.label_of
        members = [
            Member(name, kind[1], getattr(torch, kind[0]), part_of(name))
            for name, kind in zip(names, kinds, strict=True)
            if kind is not None
        ]
        cut = functools.partial(build_layout, members, as_given=True, before=None)
        return binding.build_layout(cut)

    def _current_world(self) -> Any:
        """Return the ranks, which have compared their settings."""
        if not self._world.is_current():
            self._find_ranks()
        return self._world

    @torch.inference_mode(False)
    @torch.no_grad()
    def _find_ranks(self) -> None:
        if self.group is None and not rank_and_size()[1]:
            raise RuntimeError(
                "average() was called before torch.distributed.init_process_group() or hvd.init()"
            )
        group, process_set = self.group, None
        if not isinstance(group, dist.ProcessGroup):
            group, process_set = None, group or self.compressor.settings.process_set
        world: Any = find_world(group, process_set, self._label)
        if world.size > 1:
            compare_settings(world, self.compressor)
        self._world = world


def _device_of(tensors: Sequence[torch.Tensor | None]) -> torch.device:
    return next((t.device for t in tensors if t is not None), torch.device("cpu"))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


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
        else {"tensors": _described(kinds, found if not strict else kinds)}
        for kinds in everyone
    ]
    if mismatch := differences(described, range(len(described)), ADVICE):
        raise RankMismatchError(mismatch)
    return [None if kind is None else (kind[0], tuple(kind[1]), kind[2]) for kind in found]


def _described(kinds: Sequence[Any], otherwise: Sequence[Any]) -> dict[str, str]:
    """Return sentences about kinds, by position, or about what they are ``otherwise`` if None."""
    sentences = {}
    for index, pair in enumerate(zip(kinds, otherwise, strict=True)):
        if (kind := pair[0] or pair[1]) is not None:
            gradient = ", which requires a gradient" if kind[2] else ""
            sentences[f"tensors[{index}]"] = f"{kind[0]} {list(kind[1])}{gradient}"
    return sentences
