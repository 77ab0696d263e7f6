"""Define Connection, which attaches a compressor to the optimizer or model that it serves.

A compressor imports nothing of Horovod's side: ``load_framework_by``, called by the package's
__init__.py, names the function that does so when it is first needed.
"""

from __future__ import annotations

import functools
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from hvd_adaptive.layout import Layout


class Connection(ABC):
    """One compressor at work for one optimizer or model.

    Attributes:
        serves: For errors, the kind of what the compressor serves, and what that is.
    """

    serves: ClassVar[tuple[str, str]] = "optimizer", "an optimizer of Horovod"
    compressor: Any
    _binding: Any  # a RankContext; None until the ranks are known
    _driver: Any = None  # a Driver, if it takes gradients through the steps

    @property
    def layout(self) -> Layout | None:
        """Return which coordinate travels in which group; None until gradients are known."""
        return None if self._binding is None else self._binding.layout

    @property
    def exchange(self) -> str | None:
        """Return the name of the exchange; None until the ranks are known."""
        return None if self._binding is None else self._binding.exchange_name

    @property
    def is_idle(self) -> bool:
        """Return whether no step is in progress."""
        return self._driver is None or self._driver.drive is None

    def wait(self) -> None:  # noqa: B027
        """Wait until no average is in progress in another thread, apart from a backward pass."""

    @abstractmethod
    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See GradientCompressor.compress."""

    @abstractmethod
    def decompress(self, output: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See GradientCompressor.decompress."""

    @abstractmethod
    def abandon(self) -> None:
        """Give up the step in progress, if there is one."""

    @abstractmethod
    def rebind(self) -> None:
        """Lay out the next step anew because settings have changed."""

    def describe(self) -> str:
        """Return what the step in progress waits for; see ``Driver.describe``."""
        return "" if self._driver is None else self._driver.describe()


class ApartFromHorovod(Connection):
    """Base of connections whose gradients do not come from Horovod's optimizer."""

    def compress(self, tensor: torch.Tensor) -> Any:
        """Refuse a gradient of Horovod's."""
        kind, own = self.serves
        raise RuntimeError(
            f"one compressor serves one optimizer or {kind} at a time, and this one serves {own}: "
            "construct another (or close() this one)"
        )

    def decompress(self, output: torch.Tensor, ctx: Any) -> Any:
        """Refuse a gradient of Horovod's."""
        return self.compress(output)

    def reconnect(self) -> None:
        """Connect the compressor again after ``close``; raise RuntimeError if it serves another."""
        if self.compressor._training.connection is None:
            self.compressor._training.connection = self
            self.rebind()  # settings may have changed meanwhile
        other = self.compressor._training.connection
        if other is not self:
            kind, own = self.serves
            raise RuntimeError(
                f"one compressor serves one optimizer or {kind} at a time, and that of {own} "
                f"serves {other.serves[1]} now: construct another (or close() it)"
            )

    def release(self) -> None:
        """Close the compressor, unless it serves something else now."""
        if self.compressor._training.connection is self:
            self.compressor.close()


def describe(compressor: Any) -> str:
    """Return what the step in progress waits for, in lines; "" if there is none.

    Call it at any time, for example in a thread or in a handler of a signal.

    Args:
        compressor: A compressor of this package.

    Raises:
        ValueError: It is none.

    Examples:
        >>> from hvd_adaptive import ALQ, describe
        >>> describe(ALQ(bits=3))  # nothing is in progress
        ''
    """
    if not hasattr(compressor, "_training"):
        raise ValueError(f"compressor={compressor!r}: must be a compressor of hvd_adaptive")
    connection: Connection | None = compressor._training.connection
    return "" if connection is None else connection.describe()


class RefusesClasses(ABCMeta):
    """Type of compressors, which refuses calls of Horovod's methods on a class, as Horovod makes
    them with ``compression=ALQ``.
    """

    compress = property(lambda cls: _for_instances(cls, "compress"))
    decompress = property(lambda cls: _for_instances(cls, "decompress"))


def _for_instances(scheme: type, method: str) -> Callable[..., Any]:
    """Return a method of a class, which raises ValueError unless an instance comes first."""
    function = next(vars(base)[method] for base in scheme.__mro__ if method in vars(base))

    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        if arguments and isinstance(arguments[0], scheme):
            return function(*arguments)
        name = scheme.__name__
        raise ValueError(f"compression={name}: pass an instance, {name}()")

    return checked


_loaders: list[Callable[[], Any]] = []


def load_framework_by(loader: Callable[[], Any]) -> None:
    """Call ``loader``, which returns the framework, when it is first needed."""
    _loaders[:] = [loader]


@functools.cache
def framework() -> Any:
    """Return the distributed framework that calls ``compress``.

    It has the functions ``constructed``, which notes that a compressor exists, and ``connect``,
    which returns a new Connection of a compressor to the optimizer that calls it.
    """
    return _loaders[0]()
