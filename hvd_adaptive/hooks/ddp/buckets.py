"""The buckets of a DistributedDataParallel model: their groups, names, and those of one step."""

from __future__ import annotations

import functools
import itertools
import operator
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.base.tensors import check_supported
from hvd_adaptive.coding.payload import DTYPE_CODES
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.hooks.ddp.names import Names
from hvd_adaptive.layout import Group, Layout, Member, build_layout, digest
from hvd_adaptive.run.agreement import differences
from hvd_adaptive.run.driver import gather_patiently
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.transport.torch_world import TorchWorld

ADVICE = (
    "Every rank must use the same parameters under the same names; DistributedDataParallel skips "
    "buckets of unused ones with skip_all_reduce_unused_params=True"
)


class BucketFuture(torch.futures.Future[torch.Tensor]):
    """A bucket's average.

    Attributes:
        needed: Function that is called if Python waits for the average: a hook around ours, before
            DDP calls it with further buckets.
    """

    needed: Callable[[], None] | None = None

    def wait(self) -> torch.Tensor:
        """Return the average; see torch.futures.Future."""
        if self.needed is not None and not self.done():
            self.needed()
        return super().wait()


@dataclass(frozen=True)
class Bucket:
    """The content of a torch.distributed.GradBucket, which does not outlive the hook.

    Attributes:
        buffer: The gradients end to end; their average replaces them.
        parameters: The parameters, in the order of the gradients.
        gradients: A 1-D view for each parameter; none if the bucket cannot be compressed.
        future: What DDP waits for.
    """

    buffer: torch.Tensor
    parameters: Sequence[torch.nn.Parameter]
    gradients: Sequence[torch.Tensor]
    future: BucketFuture

    @functools.cached_property
    def identities(self) -> tuple[int, ...]:
        return tuple(map(id, self.parameters))

    @property
    def kinds(self) -> Iterator[tuple[int, torch.dtype]]:
        """Iterate over the gradients' sizes and dtypes."""
        return zip(map(torch.Tensor.numel, self.gradients), itertools.repeat(self.buffer.dtype))

    def set_future(self, error: BaseException | None = None) -> None:
        """Let the future return the buffer, in which the average has replaced the gradients, or
        raise ``error``. Once it is set, do nothing.
        """
        if error is not None and not isinstance(error, Exception):  # as KeyboardInterrupt
            error = RuntimeError(f"the step was ended: {error!r}")
        if self.future.done():
            return
        if error is None:
            self.future.set_result(self.buffer)
        else:
            self.future.set_exception(error)  # type: ignore[arg-type]

    def set_after(self, ended: torch.futures.Future[Any]) -> None:
        """Set the future after a collective that has averaged the gradients."""
        try:
            ended.value()
        except RuntimeError as error:
            self.set_future(error)
        else:
            self.set_future()

    @classmethod
    def of(cls, bucket: Any) -> Bucket:
        """Read the argument of a hook."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        check_supported(buffer.device)
        gradients: Sequence[torch.Tensor] = ()
        if buffer.layout == torch.strided and buffer.dtype in DTYPE_CODES:
            # In the order of memory, for all strides; complex numbers are pairs of real ones.
            gradients = buffer.split([p.numel() * (1 + p.is_complex()) for p in parameters])
        else:
            parameters = ()
        devices = [buffer.device] if buffer.is_cuda else []
        return cls(buffer, parameters, gradients, BucketFuture(devices=devices))


class BucketBinding(RankContext):
    """A compressor's groups for the buckets of one model, laid out when all have been seen."""

    def __init__(self, compressor: GradientCompressor, world: TorchWorld) -> None:
        super().__init__(compressor, world, "ddp")
        self._buckets: list[tuple[int, ...]] = []
        self._slots: dict[int, int] = {}
        self._kinds: dict[int, tuple[int, torch.dtype]] = {}

    def knows(self, bucket: Bucket) -> bool:
        """Return whether all parameters of a bucket are laid out, in their size and dtype."""
        laid_out = map(self._kinds.get, bucket.identities)
        return self.layout is not None and all(map(operator.eq, laid_out, bucket.kinds))

    def is_laid_out_for(self, buckets: Sequence[Bucket]) -> bool:
        """Return whether buckets were laid out in this order; some may be missing."""
        now = [bucket.identities for bucket in buckets if bucket.parameters]
        return now == self._buckets or now == [b for b in self._buckets if b in now]

    def by_slot(self, bucket: Bucket) -> dict[int, torch.Tensor]:
        """Return a bucket's gradients by slot."""
        slots = map(self._slots.__getitem__, bucket.identities)
        return dict(zip(slots, bucket.gradients, strict=True))

    def divided(self, buckets: Sequence[Bucket]) -> dict[int, torch.nn.Parameter]:
        """Return the parameters, by slot, of buckets that were laid out in several groups."""
        assert self.layout is not None
        found: dict[int, torch.nn.Parameter] = {}
        for bucket in buckets:
            slots = [self._slots[identity] for identity in bucket.identities]
            if len({group for slot in slots for group, _ in self.layout.pieces_of[slot]}) > 1:
                found |= zip(slots, bucket.parameters, strict=True)
        return found

    def lay_out(
        self, buckets: Sequence[Bucket], names: dict[int, str], rebuilt: bool = False
    ) -> Layout:
        """Cut buckets, in the order of their arrival, into groups; the first bucket's are launched
        first.

        Args:
            names: The parameters' names by ``id``.
            rebuilt: Whether the parameters of each bucket are in the order of arrival, as DDP
                builds buckets after the first step, and not in the model's.
        """
        part_of = self.compressor.parts.label_of
        members: list[list[Member]] = []
        self._buckets, self._slots = [bucket.identities for bucket in buckets], {}
        self._kinds = {}
        for bucket in reversed(buckets):
            self._kinds.update(zip(bucket.identities, bucket.kinds, strict=False))
            pairs = list(zip(bucket.parameters, bucket.gradients, strict=True))
            members.append([])
            for p, g in reversed(pairs) if rebuilt else pairs:
                name = names[id(p)]
                members[-1].append(Member(name, (g.numel(),), g.dtype, part_of(name)))
                self._slots[id(p)] = len(self._slots)
        self.layout = self.build_layout(functools.partial(by_bucket, members, in_turn=True))
        return self.layout

    def stock_sizes(self, layout: Layout) -> list[int]:
        """Return the lengths of DDP's buckets."""
        members = iter(layout.members)
        return [sum(next(members).numel for _ in bucket) for bucket in reversed(self._buckets)]


def by_bucket(buckets: Sequence[Sequence[Member]], in_turn: bool, **bounds: Any) -> Layout:
    """Return a layout in which no group has members of two buckets; the last to come are first.
    They come one after the other if ``in_turn``, else all at the same time.
    """
    members: list[Member] = []
    groups: list[Group] = []
    fingerprints = []
    total = sum(member.numel for bucket in buckets for member in bucket)
    for bucket in buckets:
        before = sum(member.numel for member in members) if in_turn else None
        layout = build_layout(bucket, as_given=True, before=before, total=total, **bounds)
        groups += [group.moved(len(members)) for group in layout.groups]
        members += layout.members
        fingerprints.append(layout.fingerprint)
    return Layout(members, groups, digest(fingerprints))


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
    """Compare the names of the gradients that a backward pass has brought, a collective. Positions
    show whether ranks lay them out in another order.

    Ranks that skip different buckets pair other collectives wrongly, and never receive some. No
    other collective uses the process group of ``world``. ``warn`` is called while other ranks let
    this one wait.

    Raises:
        RankMismatchError: They differ, on all ranks.
    """
    row = torch.tensor([zlib.crc32(repr(sorted(names)).encode())], device="cpu")
    rows = gather_patiently(world, row, warn)
    if (rows == rows[0]).all():
        return
    own = {"the gradients of this step": dict.fromkeys(names, "there")}
    everyone = world.gather_objects(own)
    mismatch = differences(everyone, range(len(everyone)), ADVICE)
    raise RankMismatchError(f"step {step}: {mismatch}")
