"""Average outside of a backward pass: the ranks, a thread, and the parts of a model (LocalSGD)."""

from __future__ import annotations

import functools
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hvd_adaptive.base.tensors import wide_of
from hvd_adaptive.changes import begin_step
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.connection import ApartFromHorovod
from hvd_adaptive.hooks.ddp.buckets import by_bucket
from hvd_adaptive.hooks.fragments import Fragments
from hvd_adaptive.layout import Member
from hvd_adaptive.run.agreement import compare_settings
from hvd_adaptive.run.ordered_drive import OrderedDriver
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.training import running_horovod
from hvd_adaptive.transport.horovod_world import HorovodRounds
from hvd_adaptive.transport.torch_world import TorchWorld

Parameter = torch.nn.Parameter
Result = TypeVar("Result")


class RoundExchange:
    """Averages of tensors of one fragment's parameters, through a compressor; None averages in full
    precision.

    Layout, keys, residuals, fits and checks are those of a step. All fragments are laid out
    together, each dtype of each in groups of its own, and a step sends those of one fragment.
    ``wait`` returns when no average is in progress in another thread.
    """

    def __init__(
        self,
        world: TorchWorld | HorovodRounds,
        compressor: GradientCompressor | None,
        wait: Callable[[], None],
    ) -> None:
        self.world = world
        self._label = getattr(world, "label", "local")
        self._laid_out: Any = None  # the fragments, which names come from, and parameters' ``id``
        self.session: RoundSession | None = None  # without a compressor
        if compressor is not None:
            self.session = RoundSession(compressor, world, self._label, wait)
            self.session.reconnect()

    def lay_out(self, fragments: Fragments) -> None:
        """Prepare for averages of the parameters that were ``averaged`` last."""
        parts = fragments.averaged
        laid_out = fragments, [list(map(id, part)) for part in parts]
        if self.session is None or laid_out == self._laid_out:
            return
        self._laid_out = laid_out
        self.session.rebind()
        self.session.kinds = [
            [(fragments.name_of(part[i]), part[i]) for i in kind]
            for part in parts
            for kind in _kinds(part)
        ]

    def average(
        self, parameters: Sequence[Parameter], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the averages of tensors over all ranks, compressed; a collective. They may replace
        the tensors, one for each averaged parameter of a fragment that was laid out.
        """
        if self.session is None:
            return self.average_plainly(tensors)
        averages = [tensor.contiguous() for tensor in tensors]
        pairs = zip(parameters, averages, strict=True)
        self.session.average({parameter: average.view(-1) for parameter, average in pairs})
        return averages

    def average_plainly(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the averages of tensors over all ranks in full precision, a collective."""
        kinds = _kinds(tensors)
        flats = (torch.cat([tensors[i].reshape(-1) for i in kind]) for kind in kinds)
        wide = [flat.to(wide_of(flat.dtype)) for flat in flats]
        self.world.average_all(wide, f"{self._label}.average")
        averages = list(tensors)
        for average, kind in zip(wide, kinds, strict=True):
            parts = average.split([tensors[i].numel() for i in kind])
            for index, part in zip(kind, parts, strict=True):
                averages[index] = part.view(tensors[index].shape).to(tensors[index].dtype)
        return averages


class TensorSession(ApartFromHorovod):
    """Connect a compressor to tensors that are averaged outside of a backward pass."""

    compressor: GradientCompressor

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self._binding: RankContext | None = None
        self._driver = OrderedDriver(compressor)

    def wait(self) -> None:
        # A schedule or a sink of Monitor, which an average calls, would wait for itself.
        if not isinstance(threading.current_thread(), _Thread):
            self._join()

    @abstractmethod
    def _join(self) -> None:
        """Wait until all averages in the background have ended, in whatever way."""

    def abandon(self) -> None:
        self._driver.give_up()

    def rebind(self) -> None:
        self.abandon()
        self._binding = None

    def replace(self, binding: RankContext, tensors: Mapping[int, torch.Tensor]) -> None:
        """Replace tensors, by slot, by their averages."""
        self._driver.begin(binding, next(iter(tensors.values())).is_cpu)
        self._driver.arrive(tensors, lambda error: None)
        self._driver.finish()


class RoundSession(TensorSession):
    """Connect a compressor to LocalSGD. A step may be in progress in another thread of this rank.

    ``kinds`` are the named parameters that share groups.
    """

    serves = "model", "a model of LocalSGD"

    def __init__(
        self,
        compressor: GradientCompressor,
        world: TorchWorld | HorovodRounds,
        label: str,
        wait: Callable[[], None],
    ) -> None:
        super().__init__(compressor)
        self._world, self._label, self._wait = world, label, wait
        self.kinds: list[list[tuple[str, Parameter]]] = []
        self._slots: dict[Parameter, int] = {}
        self._has_compared = False

    def _join(self) -> None:
        self._wait()

    def average(self, tensors: Mapping[Parameter, torch.Tensor]) -> None:
        """Replace the parameters' tensors (1-D) by their averages, a step of the compressor."""
        if not self._has_compared:
            compare_settings(self._world, self.compressor)
            self._has_compared = True
        begin_step(self.compressor)
        if self._binding is None:
            self._binding = self._laid_out()
        self.replace(self._binding, {self._slots[p]: tensor for p, tensor in tensors.items()})

    def _laid_out(self) -> RankContext:
        part_of = self.compressor.parts.label_of
        pairs = [pair for kind in reversed(self.kinds) for pair in kind]
        self._slots = {parameter: slot for slot, (_, parameter) in enumerate(pairs)}
        members = [
            [Member(name, (p.numel(),), p.dtype, part_of(name)) for name, p in kind]
            for kind in reversed(self.kinds)
        ]
        binding = RankContext(self.compressor, self._world, self._label)
        binding.layout = binding.build_layout(functools.partial(by_bucket, members, in_turn=False))
        self._world.forget_lengths()
        return binding


def _kinds(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the positions of the tensors of each dtype and device."""
    kinds: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(kinds.values())


def find_world(
    group: dist.ProcessGroup | None, process_set: Any, label: str
) -> TorchWorld | HorovodRounds | None:
    """Return the ranks; None if neither torch.distributed nor Horovod is initialised.

    If group and process_set are None, they are Horovod's if it is initialised, else
    torch.distributed's. ``label`` begins collectives' names, the same on all ranks, and unlike
    other callers'.

    Raises:
        ValueError: Both a group and a process set are given.
    """
    if group is not None and process_set is not None:
        raise ValueError("process_group, process_set: give one of them")
    if process_set is not None or (group is None and running_horovod() is not None):
        return HorovodRounds(process_set, label)
    if group is not None or (dist.is_available() and dist.is_initialized()):
        return TorchWorld(group)
    return None


class _Thread(threading.Thread):
    """A thread that averages in the background."""


class Background(Future[Result]):
    """Result of work in a thread, which begins at once, on the CUDA stream of whoever constructs
    this, if ``device`` is one.
    """

    def __init__(self, work: Callable[[], Result], device: torch.device, name: str) -> None:
        super().__init__()
        self._work: Callable[[], Result] | None = work
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._begin(name)

    def _begin(self, name: str) -> None:
        _Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                result = work()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)
