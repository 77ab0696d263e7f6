"""Define average(), for loops that reduce gradients by hand, over torch.distributed or Horovod."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist

from hvd_adaptive.base.errors import WarnOnce
from hvd_adaptive.base.tensors import check_supported
from hvd_adaptive.coding.payload import DTYPE_CODES
from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.hooks.list_session import Averaging, ListSession
from hvd_adaptive.training import is_first_rank

MANY = 10
REMEDY = (
    "average() was called with a new compressor each time, %d times in a row: construct one before "
    "the loop, and give it to every call; a new one has no fitted table and no residuals"
)
logger = logging.getLogger("hvd_adaptive")

Given = TypeVar("Given", torch.Tensor, torch.Tensor | None)


class ThrownAway:
    """Compressors in a row that did one call each, and of which some do not exist any more.

    A program with a compressor for each of many lists keeps all of them, and calls them again.
    """

    def __init__(self) -> None:
        self._row = 0
        self._alive: weakref.WeakSet[object] = weakref.WeakSet()
        self._warn: WarnOnce | None = None

    def begins(self, session: object) -> None:
        """Note the first call with a compressor, whose connection is ``session``."""
        self._row += 1
        self._alive.add(session)
        if self._row == MANY:
            gc.collect()  # once: compressors and their connections refer to each other
            if len(self._alive) <= MANY // 2:
                self._warn = self._warn or WarnOnce(logger, is_first_rank())
                self._warn(REMEDY, self._row)

    def goes_on(self) -> None:
        """Note a later call with a compressor."""
        if self._row:
            self._row = 0
            self._alive.clear()


_thrown_away = ThrownAway()


@overload
def average(
    tensors: Iterable[Given],
    compressor: GradientCompressor,
    *,
    group: Any = None,
    async_op: Literal[False] = False,
) -> list[Given]: ...
@overload
def average(
    tensors: Iterable[torch.Tensor | None],
    compressor: GradientCompressor,
    *,
    group: Any = None,
    async_op: Literal[True],
) -> Averaging: ...
def average(
    tensors: Iterable[torch.Tensor | None],
    compressor: GradientCompressor,
    *,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Average a list of tensors over ranks, compressed; a collective.

    Each call is one step of the compressor: its warm-up, schedule, fits of tables and error
    feedback count calls. Every rank must call it with the same compressor in the same order, with
    tensors of the same shapes and dtypes. A tensor that is None on some ranks counts as zeros
    there. Tensors are numbered unless the compressor has ``named_parameters=``, one for each
    tensor. A compressor serves one list; construct one for each list (actor and critic).

    The average of a tensor that requires a gradient has one: its backward pass averages the
    gradient over ranks, uncompressed. So every rank must run it.

    Args:
        tensors: Tensors of one device, dense and floating-point, or None. They do not change.
        compressor: A compressor that serves no optimizer or model.
        group: A process group of torch.distributed or a process set of Horovod, the same in all
            calls with this compressor. If None, all ranks of Horovod take part if it is
            initialised, else those of torch.distributed's default group.
        async_op: Return at once; the averages are computed by a thread.

    Returns:
        A new list of averages, bitwise equal on all ranks; None where no rank has a tensor. With
        ``async_op`` a ``Averaging``, whose ``wait`` returns the list.

    Raises:
        ValueError: An argument is not allowed; nothing was sent.
        RuntimeError: Neither torch.distributed nor Horovod is initialised.
        RankMismatchError: Ranks differ in lists, settings or steps.
        PayloadError: A payload arrived corrupt, on any rank.

    Examples:
        >>> from hvd_adaptive import ALQ, average
        >>> compressor = ALQ(bits=3)
        >>> net(inputs).sum().backward()
        >>> averages = average([p.grad for p in net.parameters()], compressor)
    """
    given = _checked(tensors)
    session = _session_of(compressor, group)
    session.check(given)
    differentiable = torch.is_grad_enabled() and any(map(_needs_gradient, given))
    if not async_op:
        session.wait()
        if differentiable:
            return list(_Average.apply(session, *given))
        return session.average(given, ())
    if differentiable:
        raise ValueError("async_op=True: a tensor requires a gradient; detach it, or give False")
    return session.begin(given)


class _Average(torch.autograd.Function):
    """The average of tensors, of which some require a gradient."""

    @staticmethod
    def forward(ctx: Any, session: ListSession, *tensors: torch.Tensor | None) -> Any:
        needed = list(map(_needs_gradient, tensors))
        averages = session.average(tensors, needed)
        ctx.session, ctx.needed = session, needed
        pairs = zip(averages, needed, strict=True)
        ctx.mark_non_differentiable(*(a for a, needs in pairs if a is not None and not needs))
        return tuple(averages)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given = [g if n else None for g, n in zip(gradients, ctx.needed, strict=True)]
        return None, *ctx.session.average_exactly(given)


def _session_of(compressor: Any, group: Any) -> ListSession:
    """Return the session of a compressor; the first call for a compressor is a collective."""
    connection = check_compressor("compressor", compressor)._training.connection
    if isinstance(connection, ListSession):
        if connection.group is not group:
            raise ValueError(
                f"group={group!r}: the compressor serves another group; construct one for each"
            )
        _thrown_away.goes_on()
        return connection
    check_compressor("compressor", compressor, is_free=True)
    is_group = group is None or isinstance(group, dist.ProcessGroup)
    if not is_group and not hasattr(group, "included"):
        kind = type(group).__name__
        raise ValueError(f"group: must be a process group or a process set, not {kind}")
    compressor._training.connection = session = ListSession(compressor, group)
    _thrown_away.begins(session)
    return session


def _needs_gradient(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _checked(tensors: Any) -> list[torch.Tensor | None]:
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
