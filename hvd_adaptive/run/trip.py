"""Define Trips, the ways of one rank's groups through the exchange.

Steps of Horovod and DDP (run/step.py) and the simulation of all ranks (simulate/ranks.py) run the
same trips.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from hvd_adaptive.base.finite import Finite
from hvd_adaptive.base.streams import Use, group_number
from hvd_adaptive.exchange.exchange import Exchange
from hvd_adaptive.exchange.parcel import Memory, Parcel, RandomStream
from hvd_adaptive.feedback import Residuals
from hvd_adaptive.layout import Group, Layout
from hvd_adaptive.run.draws import Draws
from hvd_adaptive.run.rounded_zeros import RoundedZeros
from hvd_adaptive.transport.collectives import Collective

if TYPE_CHECKING:
    from hvd_adaptive.base.errors import ResidualError
    from hvd_adaptive.codec.codec import Codec
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.feedback_weight import Weights
    from hvd_adaptive.monitor import StepMeter

# Added to the attempt in random streams of incomplete groups.
INCOMPLETE = 2**30

# Yields collectives, and receives their results.
Trip = Generator[Collective, list[torch.Tensor], None]


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
    3. After the last trip ranks exchange ``row``, and ``agree`` on the next weights of residuals.
    4. ``commit`` ends the step: residuals become what was not sent. ``abandon`` gives it up.

    Args:
        compressor: The compressor.
        exchange: This rank's exchange.
        layout: The layout.
        number: The step, until ranks that differ in it have compared.
        gradients: The gradients of this rank.
        meter: Measures what is sent.
        attempt: The attempt at the step.
        name: Beginning of the names of collectives.
        residuals: Residuals of this rank, laid out for the step; None without error feedback.

    Attributes:
        number: The step.
        error: The error that every rank must raise after ``agree``, or None.
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
        self._attempt, self._name, self._residuals = attempt, name, residuals
        self._after: dict[int, torch.Tensor] = {}  # the groups' residuals after this step
        self._absent: list[int] = []
        self._finite = Finite()
        self._weights: Weights | None = None  # of the next step
        self.error: ResidualError | None = None
        self.incomplete: set[int] = set()
        looks = compressor.parts.looks_for_zeros and exchange.rank == 0
        self._zeros = RoundedZeros() if looks else None

    def trip(self, index: int, factor: float) -> Trip:
        """Yield a group's collectives, receive their results, and deliver its average.

        1. Gather the group's coordinates.
        2. Add the residual to those that are quantised.
        3. Average them with the other ranks'.
        4. Check the average, and deliver it.

        Args:
            index: The group.
            factor: Scale of sums over ranks.

        Raises:
            PayloadError: A payload arrived corrupt; see ``Exchange.average``.
        """
        group, begin = self._layout.groups[index], time.perf_counter()
        flat = self._gathered(index)
        parcel = self._parcel(index, factor, flat.device)
        values = self._with_residual(index, flat[: parcel.quantized])
        if self._zeros is not None:
            self._zeros.look(group, values, parcel.codec)
        self._meter.add(
            index,
            coordinates=group.coordinates,
            uncompressed_bytes=group.coordinates * group.dtype.itemsize,
            encode_s=time.perf_counter() - begin,
        )

        averaging = self._exchange.average(parcel, flat, values)
        del flat, values  # valid until the first collective
        average = yield from averaging

        self.check(index, average)
        self._gradients.deliver(index, average)

    def check(self, index: int, average: torch.Tensor) -> None:
        """Check whether a group's average is finite: a step with NaN or Inf changes no residual."""
        if self._residuals is not None:
            self._finite.look(average)
        size = self._compressor.settings.bucket_size
        self._meter.look(average[: self.quantized(index)], size, index)

    def hold(self, slot: int) -> None:
        """Keep the residual of a member: its average is not applied, as no rank has a gradient."""
        self._absent.append(slot)

    def row(self) -> list[float]:
        """Return what the other ranks must know of this rank's residuals; see ``Residuals.row``."""
        return [] if self._residuals is None else self._residuals.row(self._meter.errors())

    def agree(self, rows: Sequence[Sequence[float]]) -> None:
        """Take the next weights of residuals from all ranks' ``row``, the same on every rank."""
        if self._residuals is not None:
            self._weights, self.error = self._residuals.agreed(self.number, rows)

    def abandon(self) -> None:
        """Give the step up: residuals stay as they are."""
        self._after.clear()

    def commit(self) -> None:
        """End the step: residuals become what was not sent, unless AMP skips the step."""
        if self._zeros is not None and self.number >= self._compressor.settings.warmup_steps:
            self._compressor.parts.looks_for_zeros = False
            self._zeros.tell(self._layout.members, self._absent)
        if self._residuals is None:
            return
        for slot in self._absent:
            for index, piece in self._layout.pieces_of[slot]:
                if index in self._after:
                    self._residuals.hold(index, piece.in_group, self._after[index])
        self._residuals.commit(self._after, self._finite.ask(), self._weights)
        self._after = {}

    def codec(self, index: int) -> Codec:
        """Return the codec of the group's part."""
        return self._compressor.parts[self._layout.groups[index].part]

    def quantized(self, index: int) -> int:
        """Return how many of a group's coordinates this step quantises: none in a warm-up."""
        if self.number < self._compressor.settings.warmup_steps:
            return 0
        return self._exchange.quantized(self._layout.groups[index])

    def working_bytes(self, index: int) -> int:
        """Return the most bytes that decoding a group holds."""
        quantized = self.quantized(index)
        full = self._layout.groups[index].coordinates - quantized
        return self._exchange.working_bytes(self.codec(index), quantized, full)

    def name(self, index: int, stage: int) -> str:
        """Return the name of a group's collective, the same on all ranks."""
        return self.name_of(self._layout.labels[index] + (f".stage{stage}" if stage else ""))

    def name_of(self, label: str) -> str:
        """Return a collective's name; attempts differ, as they may be in flight together."""
        name = f"{self._name}.{label}"
        return name + (f".attempt{self._attempt}" if self._attempt else "")

    def draws(self, groups: Sequence[Group], count: int, part: str) -> Draws:
        """Return what draws up to ``count`` buckets of ``part``."""
        settings, instance = self._compressor.settings, self._compressor._training.instance
        return Draws(
            self._exchange,
            groups,
            bucket_size=settings.bucket_size,
            count=count,
            key_of=lambda rank: instance.key(settings.seed, rank, self.number, Use.SAMPLE),
            part=part,
        )

    def values(self, group: Group) -> torch.Tensor:
        """Return what tables are fitted to: a group's quantised coordinates, with the residual.

        They are valid until the next call. A warm-up quantises them later.
        """
        index = self._layout.index_of(group)
        return self._with_residual(index, self._gathered(index)[: self._exchange.quantized(group)])

    def _gathered(self, index: int) -> torch.Tensor:
        """Return a group's coordinates; the residual is added in place."""
        return self._gradients.gather(index, changed=self._residuals is not None)

    def _with_residual(self, index: int, values: torch.Tensor) -> torch.Tensor:
        if self._residuals is None or not values.numel():
            return values
        return self._residuals.added(index, values)

    def _number_of(self, index: int) -> int:
        """Return a group's number in random streams: another one if it is incomplete.

        Other ranks then refuse its payload.
        """
        return group_number(index, self._attempt + INCOMPLETE * (index in self.incomplete))

    def _parcel(self, index: int, factor: float, device: torch.device) -> Parcel:
        group, quantized = self._layout.groups[index], self.quantized(index)
        number, settings = self._number_of(index), self._compressor.settings
        return Parcel(
            codec=self.codec(index),
            dtype=group.dtype,
            quantized=quantized,
            full=group.coordinates - quantized,
            device=device,
            stream=RandomStream(
                self._compressor._training.instance, settings.seed, self.number, number
            ),
            factor=factor,
            layout=self._layout.fingerprint,
            index=index,
            memory=self._gradients,
            meter=self._meter,
            residuals=self._residuals,
            after=self._after,
        )
