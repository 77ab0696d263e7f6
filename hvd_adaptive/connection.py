"""Connection: the object that a compressor is attached to while it serves an optimizer or a model.

A compressor imports nothing of Horovod's side. ``use_host`` (called by hooks/horovod/host.py) sets
the ``Host``, which connects compressors when Horovod first calls ``compress``. ``load_host_by``
(called by the package's __init__.py) names the function that sets it when it is first needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch

    from hvd_adaptive.layout import Layout


class Connection(Protocol):
    """Represent one compressor at work for one optimizer or model."""

    @property
    def layout(self) -> Layout | None:
        """Return which coordinate travels in which group; None until gradients are known."""

    @property
    def exchange(self) -> str | None:
        """Return the name of the exchange; None until the ranks are known."""

    @property
    def is_idle(self) -> bool:
        """Return whether no step is in progress."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See GradientCompressor.compress."""

    def decompress(self, output: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See GradientCompressor.decompress."""

    def forget(self) -> None:
        """Give up the step in progress, if there is one."""

    def rebind(self) -> None:
        """Lay out the next step anew because settings have changed."""


class Host(Protocol):
    """Represent the distributed framework that calls ``compress``."""

    def constructed(self, compressor: Any) -> None:
        """Note that a compressor exists."""

    def connect(self, compressor: Any) -> Connection:
        """Return a new connection of ``compressor`` to the optimizer that calls it."""


class OfInstance:
    """Method of a compressor that refuses a call on the class, which is what Horovod does with
    ``compression=ALQ``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        functools.update_wrapper(cast(Any, self), function)

    def __get__(self, compressor: Any, scheme: type) -> Callable[..., Any]:
        if compressor is not None:
            return MethodType(self._function, compressor)

        @functools.wraps(self._function)
        def refuse(*arguments: Any) -> Any:
            if arguments and isinstance(arguments[0], scheme):
                return self._function(*arguments)
            name = scheme.__name__
            raise ValueError(f"compression={name}: pass an instance, {name}()")

        return refuse


_hosts: list[Host] = []
_loaders: list[Callable[[], None]] = []


def load_host_by(loader: Callable[[], None]) -> None:
    """Call ``loader``, which calls ``use_host``, if a host is needed and there is none."""
    _loaders[:] = [loader]


def use_host(new: Host) -> None:
    """Connect compressors by ``new`` from now on."""
    _hosts[:] = [new]


def host() -> Host:
    """Return the host in use."""
    if not _hosts:
        _loaders[0]()
    return _hosts[0]
