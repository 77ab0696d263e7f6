"""Define Trips, the ways of one rank's groups through the exchange.

Steps of Horovod and DDP (run/step.py) and the simulation of all ranks (simulate/ranks.py) run the
same trips.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from hvd_adaptive.adapt.statistics import Sample
from hvd_adaptive.base.errors import ResidualError
from hvd_adaptive.base.tensors import Finite
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.exchange.exchange import Exchange
from hvd_adaptive.exchange.parcel import Memory, Parcel, RandomStream
from hvd_adaptive.feedback import Residuals
from hvd_adaptive.feedback_weight import Weights
from hvd_adaptive.kernels.random import Use, group_number
from hvd_adaptive.layout import Group, Layout
from hvd_adaptive.monitor import StepMeter
from hvd_adaptive.run.draws import draw_buckets
from hvd_adaptive.run.rounded_zeros import RoundedZeros
from hvd_adaptive.transport.collectives import Collective

# Added to the attempt in random streams of incomplete groups.
INCOMPLETE = 2**30


class Plan(NamedTuple):
    """How a group is exchanged.

    Attributes:
        most: Most bytes that its exchange holds.
        working: Bytes for decoding, besides payloads and result; 0 before the exchange is set up.
        collectives: Number of its collectives; likewise.
    """

    most: int
    working: int
    collectives: int


# Yields collectives, and receives their results.
Trip = Generator[Collective, list[torch.Tensor], None]


@dataclass(eq=False)
class Flight:
    """A group in flight, and the collective that its trip waits for; None once it is received."""

    index: int
    trip: Trip
    request: Collective | None
    plan: Plan
    stage: int = 0  # the collective that it waits for
    is_over: bool = False  # its last collective has been received
    handle: Any = None
    begun: float = 0.0


class Gradients(Memory, Protocol):
    """The gradients of one rank, where trips begin and end."""

    def gather(self, index: int, changed: bool) -> torch.Tensor:
        """Return the coordinates of group ``index`` in its dtype, valid until the next call.

        They will be written to if ``changed``.
        """

    def deliver(self, index: int, average: torch.Tensor) -> None:
        """Accept the average of group ``index``, whose memory is borrowed (``Memory.result``)."""


class Trips:
    """The trips of one rank's groups, in one attempt at a step.

    1. ``trip`` takes a group from the gradients to their average.
    2. ``hold`` excludes members that no rank has a gradient of.
    3. After the last trip ranks agree on ``weights`` and ``error`` (``Residuals.agreed``).
    4. ``commit`` ends the step: residuals become what was not sent. ``abandon`` gives it up.

    Args:
        name: Beginning of the names of collectives.

    Attributes:
        number: The step, until ranks that differ in it have compared.
        residuals: Residuals of this rank, laid out for the step; None without error feedback.
        weights: Weights of residuals in the next step, the same on every rank.
        error: The error that every rank must raise, or None.
        incomplete: Groups that are sent with zeros for gradients that are missing, because the step
            is given up.
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        exchange: Exchange,
        layout: Layout,
        number: int,
        gradients: Gradients,
        *,
        meter: StepMeter,
        attempt: int = 0,
        name: str = "",
        residuals: Residuals | None = None,
    ) -> None:
        self.number = number
        self._compressor, self._exchange, self._layout = compressor, exchange, layout
        self._gradients, self._meter = gradients, meter
        self._attempt, self._name, self.residuals = attempt, name, residuals
        self._of_attempt = f".attempt{attempt}" if attempt else ""
        self._after: dict[int, torch.Tensor] = {}  # the groups' residuals after this step
        self._absent: list[int] = []
        self._finite = None if residuals is None else Finite()
        self.weights: Weights | None = None
        self.error: ResidualError | None = None
        self.incomplete: set[int] = set()
        looks = compressor.parts.looks_for_zeros and exchange.rank == 0
        self._zeros = RoundedZeros() if looks else None

    def trip(self, index: int, factor: float) -> Trip:
        """Yield a group's collectives, receive their results, and deliver its average.

        1. Gather the group's coordinates.
        2. Add the residual to those that are quantised.
        3. Average them with the other ranks'; PayloadError is raised as ``Exchange.average`` says.
        4. Check the average, and deliver it.
        """
        group, begin = self._layout.groups[index], time.perf_counter()
        quantized, codec = self.quantized(index), self._compressor.parts[group.part]
        flat, values = self._gathered(index, quantized)
        if self._zeros is not None:
            self._zeros.look(group, values, codec)
        parcel = self._parcel(index, factor, codec, quantized, flat.device)
        self._meter.add(
            index,
            coordinates=group.coordinates,
            uncompressed_bytes=group.coordinates * group.dtype.itemsize,
            encode_s=time.perf_counter() - begin,
        )

        averaging = self._exchange.average(parcel, flat, values)
        del flat, values  # valid until the first collective
        average = yield from averaging

        self.check(index, average, quantized)
        self._gradients.deliver(index, average)

    def check(self, index: int, average: torch.Tensor, quantized: int) -> None:
        """Check whether a group's average is finite: a step with NaN or Inf changes no residual."""
        if self._finite is not None:
            self._finite.look(average)
        codec = self._compressor.parts[self._layout.groups[index].part]
        size, without_zeros = codec.settings.bucket_size, codec.leaves_zeros_out
        self._meter.look(average[:quantized], size, index, without_zeros)

    def hold(self, slot: int) -> None:
        """Keep the residual of a member: its average is not applied, as no rank has a gradient."""
        self._absent.append(slot)

    def abandon(self) -> None:
        """Give the step up: residuals stay as they are."""
        self._after.clear()

    def commit(self) -> None:
        """End the step: residuals become what was not sent, unless AMP skips the step."""
        if self._zeros is not None and self.number >= self._compressor.settings.warmup_steps:
            again = self._zeros.tell(self._layout.members, self._absent)
            self._compressor.parts.looked_for_zeros(again)
        if self.residuals is None or self._finite is None:
            return
        for slot in self._absent:
            for index, piece in self._layout.pieces_of[slot]:
                if index in self._after:
                    self.residuals.hold(index, piece.in_group, self._after[index])
        self.residuals.commit(self._after, self._finite.ask(), self.weights)
        self._after = {}

    def quantized(self, index: int) -> int:
        """Return how many of a group's coordinates this step quantises: none in a warm-up."""
        if self.number < self._compressor.settings.warmup_steps:
            return 0
        return self._exchange.quantized(self._layout.groups[index])

    def name(self, label: str, stage: int = 0) -> str:
        """Return a collective's name on all ranks, in this attempt: several may be in flight."""
        of_stage = f".stage{stage}" if stage else ""
        return f"{self._name}.{label}{of_stage}{self._of_attempt}"

    def samples(self, groups: Sequence[Group], count: int, part: str) -> Sample:
        """Draw up to ``count`` buckets of ``part`` that are quantised (run/draws.py)."""
        settings, instance = self._compressor.settings, self._compressor._training.instance
        return draw_buckets(
            groups,
            self.values,
            bucket_size=settings.bucket_size,
            count=count,
            key=instance.key(settings.seed, self._exchange.rank, self.number, Use.SAMPLE),
            part=part,
            quantized_of=self._exchange.quantized,
        )

    def values(self, group: Group) -> torch.Tensor:
        """Return what tables are fitted to: a group's quantised coordinates, with the residual.

        They are valid until the next call. A warm-up quantises them later.
        """
        index = self._layout.groups.index(group)
        return self._gathered(index, self._exchange.quantized(group))[1]

    def _gathered(self, index: int, quantized: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a group's coordinates, and those that are quantised, with the residual."""
        residuals = self.residuals
        flat = self._gradients.gather(index, changed=residuals is not None)
        values = flat[:quantized]  # to which the residual is added in place
        if residuals is not None and quantized:
            values = residuals.added(index, values)
        return flat, values

    def _parcel(
        self, index: int, factor: float, codec: Codec, quantized: int, device: torch.device
    ) -> Parcel:
        group, settings = self._layout.groups[index], self._compressor.settings
        # Other ranks refuse the payload of an incomplete group.
        attempt = self._attempt + INCOMPLETE * (index in self.incomplete)
        compressor = self._compressor._training.instance.number or 0  # none in a simulation
        number = group_number(index, attempt)
        return Parcel(
            codec=codec,
            dtype=group.dtype,
            quantized=quantized,
            full=group.coordinates - quantized,
            device=device,
            stream=RandomStream(compressor, settings.seed, self.number, number),
            factor=factor,
            layout=self._layout.fingerprint,
            index=index,
            memory=self._gradients,
            meter=self._meter,
            residuals=self.residuals,
            after=self._after,
        )
