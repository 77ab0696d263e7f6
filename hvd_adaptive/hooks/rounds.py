"""Average outside of a backward pass: the ranks, a thread, and the parts of a model (LocalSGD)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hvd_adaptive.base.finite import wide_of
from hvd_adaptive.hooks.ddp.bucket_session import BucketSession
from hvd_adaptive.hooks.ddp.buckets import Bucket, BucketFuture, Names
from hvd_adaptive.training import running_horovod
from hvd_adaptive.transport.horovod_world import HorovodRounds
from hvd_adaptive.transport.torch_world import TorchWorld

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor

Parameter = torch.nn.Parameter
Result = TypeVar("Result")


class RoundExchange:
    """Averages of tensors of one fragment's parameters, through a compressor; None averages in full
    precision.

    The tensors of one fragment and dtype are a bucket, as if DDP had filled it (bucket_session.py).
    So layout, keys, residuals, fits and checks are those of a step. All fragments are laid out
    together, and a step sends those of its own. ``wait`` returns when no average is in progress in
    another thread.
    """

    def __init__(
        self,
        world: TorchWorld | HorovodRounds,
        fragments: Sequence[Sequence[Parameter]],
        name_of: Callable[[Parameter], str],
        compressor: GradientCompressor | None,
        wait: Callable[[], None],
    ) -> None:
        self.world, self._name_of = world, name_of
        self._label = getattr(world, "label", "local")
        self._fragments = [list(parameters) for parameters in fragments]
        self._is_laid_out = False
        self._session: _RoundSession | None = None
        if compressor is not None:
            self._session = _RoundSession(compressor, world, self._label, wait)
            compressor._training.connection = self._session

    def lay_out(self, fragment: int, parameters: Sequence[Parameter]) -> None:
        """Prepare for averages of these parameters of a fragment."""
        if self._session is None:
            return
        known = self._fragments[fragment]
        same = list(map(id, known)) == list(map(id, parameters))
        if same and self._is_laid_out:
            return
        self._fragments[fragment], self._is_laid_out = list(parameters), True
        every = [p for of_one in self._fragments for p in of_one]
        self._session.names = Names([(self._name_of(p), p) for p in every])
        buckets = []
        for of_one in self._fragments:
            for kind in _kinds(of_one):
                chosen = [of_one[i] for i in kind]
                flats = [p.detach().reshape(-1) for p in chosen]
                buckets.append(Bucket(flats[0], chosen, flats, BucketFuture()))
        self._session.plan(buckets)

    def average(
        self, parameters: Sequence[Parameter], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the averages of tensors over all ranks, compressed; a collective.

        There is a tensor for each parameter of a fragment that ``lay_out`` was given.
        """
        if self._session is None:
            return self.average_plainly(tensors)
        kinds = _kinds(tensors)
        flats = _flat(tensors, kinds)
        averages = _split(flats, tensors, kinds)
        for flat, kind in zip(flats, kinds, strict=True):
            devices: list[Any] = [flat.device] if flat.is_cuda else []
            views = [averages[i].reshape(-1) for i in kind]
            future = BucketFuture(devices=devices)
            self._session.take(Bucket(flat, [parameters[i] for i in kind], views, future))
        self._session.finish()
        return averages

    def average_plainly(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the averages of tensors over all ranks in full precision, a collective."""
        kinds = _kinds(tensors)
        flats = _flat(tensors, kinds)
        wide = [flat.to(wide_of(flat.dtype)) for flat in flats]
        self.world.average_all(wide, f"{self._label}.average")
        for flat, average in zip(flats, wide, strict=True):
            if average is not flat:
                flat.copy_(average)
        return _split(flats, tensors, kinds)


class _RoundSession(BucketSession):
    """A session whose steps may be in progress in another thread of this rank."""

    def __init__(
        self,
        compressor: GradientCompressor,
        world: TorchWorld | HorovodRounds,
        label: str,
        wait: Callable[[], None],
    ) -> None:
        super().__init__(compressor, Names([]), None, lambda: world, label)
        self._wait = wait

    @property
    def is_idle(self) -> bool:
        """Return True once no average is in progress: changes begin with the next one."""
        self._wait()
        return super().is_idle


def _kinds(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the positions of the tensors of each dtype and device."""
    kinds: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(kinds.values())


def _flat(tensors: Sequence[torch.Tensor], kinds: list[list[int]]) -> list[torch.Tensor]:
    return [torch.cat([tensors[i].reshape(-1) for i in kind]) for kind in kinds]


def _split(
    flats: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], kinds: list[list[int]]
) -> list[torch.Tensor]:
    """Return views of ``flats`` in the shapes of the tensors."""
    views = list(tensors)
    for flat, kind in zip(flats, kinds, strict=True):
        parts = flat.split([tensors[i].numel() for i in kind])
        for index, part in zip(kind, parts, strict=True):
            views[index] = part.view(tensors[index].shape)
    return views


def find_world(
    group: dist.ProcessGroup | None, process_set: Any, label: str
) -> TorchWorld | HorovodRounds | None:
    """Return the ranks; None for one rank alone.

    If group and process_set are None, they are Horovod's if it is initialised, else
    torch.distributed's. ``label`` begins collectives' names, the same on all ranks, and unlike
    other callers'.

    Raises:
        ValueError: Both a group and a process set are given.
    """
    if group is not None and process_set is not None:
        raise ValueError("process_group, process_set: give one of them")
    world: TorchWorld | HorovodRounds
    if process_set is not None or (group is None and running_horovod() is not None):
        world = HorovodRounds(process_set, label)
    elif group is not None or (dist.is_available() and dist.is_initialized()):
        world = TorchWorld(group)
    else:
        return None
    return world if world.size > 1 else None


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
        threading.Thread(target=self._run, name=name, daemon=True).start()

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
