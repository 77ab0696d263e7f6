"""The buckets of one step, and the backward pass that brings them; ranks compare them."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import FrameType

import torch

from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.hooks.ddp.buckets import Bucket, BucketBinding, Names
from hvd_adaptive.run.agreement import differences
from hvd_adaptive.run.worker import gather_patiently
from hvd_adaptive.transport.torch_world import TorchWorld

ADVICE = (
    "Every rank must use the same parameters under the same names; DistributedDataParallel skips "
    "buckets of unused ones with skip_all_reduce_unused_params=True"
)
ENGINE = "_engine_run_backward"  # torch's function that calls autograd


@dataclass(eq=False)
class Pending:
    """The buckets of one step, which is known by its parameters: none arrives twice in a step.

    Attributes:
        collects: The driver receives them all at the end, because they have no layout yet.
        plain: They are averaged in full precision, because their averages are needed before the
            last bucket is known.
        parameters: The ``id`` of each parameter.
        gradients: Those that the driver has received with their bucket, by slot.
        ended: The backward pass has ended without some of the parameters.
    """

    binding: BucketBinding
    collects: bool
    plain: bool = False
    buckets: list[Bucket] = field(default_factory=list)
    parameters: set[int] = field(default_factory=set)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    ended: bool = False

    @property
    def is_complete(self) -> bool:
        """Return whether all parameters of the layout have arrived."""
        layout = self.binding.layout
        return layout is not None and len(self.parameters) == len(layout.members)

    def is_before(self, bucket: Bucket) -> bool:
        """Return whether a bucket belongs to a later step: one of its parameters has arrived
        already, or it has no place in the layout.
        """
        if not self.parameters.isdisjoint(bucket.identities):
            return True
        return not (self.collects or self.plain or self.binding.knows(bucket))

    def names(self, known: Names, early: Collection[int] = ()) -> list[str]:
        """Return the parameters' names, in the layout's order; numbers if they have none yet.
        Gradients in the slots ``early`` arrived before their bucket.
        """
        layout = self.binding.layout
        if self.collects or layout is None:
            parameters = [p for bucket in self.buckets for p in bucket.parameters]
            return [known.name_of(p, number) for number, p in enumerate(parameters)]
        return [layout.members[slot].name for slot in sorted({*self.gradients, *early})]


def compare_names(
    world: TorchWorld, step: int, names: Sequence[str], warn: Callable[[], None]
) -> None:
    """Compare the names of the gradients that a backward pass has brought, a collective.

    Ranks that skip different buckets pair other collectives wrongly, and never receive some. No
    other collective uses the process group of ``world``. ``warn`` is called while other ranks let
    this one wait.

    Raises:
        RankMismatchError: They differ, on all ranks.
    """
    row = torch.tensor([zlib.crc32(repr(names).encode())], device="cpu")
    rows = gather_patiently(world, row, warn)
    if (rows == rows[0]).all():
        return
    own = {"the gradients of this step": dict.fromkeys(names, "there")}
    everyone = world.gather_objects(own)
    mismatch = differences(everyone, range(len(everyone)), ADVICE)
    raise RankMismatchError(f"step {step}: {mismatch}")


def at_end_of_backward(call: Callable[[], None]) -> bool:
    """Have autograd call a function when the backward pass in progress ends; False if none is."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(call)
    except RuntimeError:
        return False
    return True


def called_by_autograd() -> bool:
    """Return whether autograd itself has called the caller, and no other function of Python."""
    caller = sys._getframe(1).f_back  # None on a thread of autograd's
    return caller is None or caller.f_code.co_name == ENGINE


def is_nested() -> bool:
    """Return whether a backward pass runs within another one, as for reentrant checkpoints."""
    frame: FrameType | None = sys._getframe()
    passes = 0
    while frame is not None:
        passes += frame.f_code.co_name == ENGINE
        frame = frame.f_back
    return passes > 1
