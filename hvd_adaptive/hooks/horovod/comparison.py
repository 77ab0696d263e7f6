"""Define Comparison, what ranks must have in common before an optimizer's first step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hvd_adaptive.hooks.horovod.agreement import FirstComparison
from hvd_adaptive.hooks.horovod.placeholder import placeholder
from hvd_adaptive.run.description import Description, checksum, describe

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.hooks.horovod.owner import Owner
    from hvd_adaptive.transport.horovod_world import HorovodWorld


class Comparison:
    """Settings and parameters of this rank, and their comparison with other ranks'.

    Attributes:
        checksum: Checksum of the description when this object was made.
    """

    def __init__(
        self, compressor: GradientCompressor, owner: Owner | None, world: HorovodWorld
    ) -> None:
        self._compressor, self._owner, self._world = compressor, owner, world
        self._first: FirstComparison | None = None
        self.checksum = checksum(self.description())

    def description(self) -> Description:
        """Return what must be the same on all ranks."""
        named = () if self._owner is None else self._owner.named_parameters
        return describe(self._compressor, named)

    def start(self) -> None:
        """Start to compare settings and parameters between ranks: see FirstComparison.

        Without parameters there is nothing to compare before a step's first decompress.
        """
        owner, world = self._owner, self._world
        if owner is None or world.size == 1:
            return
        # Parameters' names differ between optimizers, as stock Horovod requires.
        names = [name for name, _ in [*owner.named_parameters, *owner.frozen]]
        label = min(names, default="")
        submit = None
        if owner.optimizer is not None:
            submit = functools.partial(_submit, world, owner.optimizer, owner.op)
        self._first = FirstComparison(world, self.description(), label, submit)

    @property
    def is_started(self) -> bool:
        """Return whether ranks have compared or are comparing.

        It is False if some ranks had called hvd.join() when the others compared.
        """
        return self._first is None or not self._first.joined

    @property
    def has_failed(self) -> bool:
        """Return whether ranks are known to disagree."""
        return self._first is not None and bool(self._first.mismatch)

    def mismatch(self) -> str:
        """Return what ranks disagreed on in their first comparison, "" if on nothing. Waits for a
        comparison in progress."""
        return "" if self._first is None else self._first.wait()


def _submit(world: HorovodWorld, find_optimizer: Any, op: Any, name: str) -> Any:
    """Submit a placeholder, as Horovod's optimizer would, for a parameter that only other ranks
    have."""
    hvd = world.hvd
    divisor = getattr(find_optimizer(), "gradient_predivide_factor", 1.0)
    factors = (1.0 / divisor, divisor) if op == hvd.Average else (1.0, 1.0)
    return world.allreduce(
        placeholder(world.rank, 0, 0, 0),
        name,
        op,
        prescale_factor=factors[0],
        postscale_factor=factors[1],
    )
