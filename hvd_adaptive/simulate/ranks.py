"""Lay out, encode, decode and average the gradients of M ranks in one process.

Layout, random keys, sampling, codec and order of summation are those of a Horovod run, so the
averaged gradients equal, bit for bit, those of real ranks with these gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvd_adaptive.base.checks import check_integer
from hvd_adaptive.base.tensors import wide_of
from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.exchange.auto import EXCHANGES, name_of_exchange
from hvd_adaptive.exchange.exchange import RankInfo
from hvd_adaptive.feedback import Residuals
from hvd_adaptive.layout import Member, build_layout
from hvd_adaptive.monitor import StepMeter
from hvd_adaptive.run.arrivals import gather
from hvd_adaptive.run.trip import Trips
from hvd_adaptive.settings import Settings
from hvd_adaptive.simulate.stages import RankGradients, together
from hvd_adaptive.simulate.variance import quantization_error, scatter
from hvd_adaptive.transport.world import nodes_of


@dataclass(frozen=True)
class Variance:
    """Variances of the gradients of all ranks at one point, per coordinate.

    Attributes:
        minibatch: Variance of one rank's gradient, which is SGD's own (NaN for one rank).
        normalized_minibatch: The same after each bucket is divided by its L2 norm.
        excess: Variance that quantising adds to one rank's gradient (ALQ Eq. 1).
        normalized_excess: The same divided by the buckets' squared norms (Eq. 3).
        squared_bias: Squared bias of the average, from clipping.
        estimator: Mean squared error of the ranks' average, (minibatch + excess) / M +
            squared_bias.
    """

    minibatch: float
    normalized_minibatch: float
    excess: float
    normalized_excess: float
    squared_bias: float
    estimator: float


class _Collected(Exception):
    """Raised when an update has collected a rank's statistics, which end it."""


class Ranks:
    """Gradients of ``workers`` ranks of one model, and their exchange.

    1. Call ``take(rank)`` after each rank's backward pass.
    2. Call ``refit(step)`` if ``due(step)``, for the table of an adaptive scheme.
    3. Call ``average(step)`` to write the averaged decoded gradients into the parameters' ``grad``.
       One rank without a compressor keeps its own gradient unchanged.

    Args:
        named_parameters: As from ``model.named_parameters()``; parameters without requires_grad are
            ignored. Real ranks group parameters in the order of the optimizer's.
        compressor: A scheme, or None for float32. ``in_flight_bytes`` has no effect on the size of
            groups, since nothing is in flight.
        workers: Number of ranks, >= 1.

    Attributes:
        flats: The ranks' gradients, (workers, coordinates) for each group of the layout.
        residuals: One for each rank if the compressor has error feedback, starting from zero; else
            empty.
        payload_bytes: Bytes that rank 0 encoded in the last ``average``.
        relative_error: ||average - exact||**2 / ||exact||**2 of the last ``average``.

    Raises:
        ValueError: No parameter requires a gradient, an argument is out of range, or the exchange
            needs a network to measure.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        compressor: GradientCompressor | None,
        workers: int,
    ) -> None:
        self.compressor = compressor
        self.workers = check_integer("workers", workers, 1)
        self._by_name = by_name = {name: p for name, p in named_parameters if p.requires_grad}
        if not by_name:
            raise ValueError("named_parameters: no parameter requires a gradient")
        self.settings = Settings()
        part_of: Callable[[str], str | None] = lambda name: ""  # noqa: E731
        if compressor is not None:
            self.settings = check_compressor("compressor", compressor).settings
            compressor.parts.warn_of_idle_patterns(by_name)
            part_of = compressor.parts.label_of
        self.layout = build_layout(
            [Member(n, tuple(p.shape), p.dtype, part_of(n)) for n, p in by_name.items()],
            min_numel=self.settings.min_numel,
            bucket_size=self.settings.bucket_size,
            tail=self.settings.tail,
            most_coordinates=self.settings.fusion_bytes // 4,
        )
        self.parameters = [by_name[member.name] for member in self.layout.members]
        device = self.parameters[0].device
        self.flats = [
            torch.zeros(self.workers, group.coordinates, dtype=group.dtype, device=device)
            for group in self.layout.groups
        ]
        make = EXCHANGES[name_of_exchange(self.settings, self.workers)]
        nodes = nodes_of(self.settings.ranks_per_node, self.workers)
        self._exchanges = [make(RankInfo(workers, rank, nodes)) for rank in range(workers)]
        if not self._exchanges[0].is_set_up:
            raise ValueError(
                f"exchange={self.settings.exchange_name!r}: simulated ranks have no nodes and no "
                "network to measure; use exchange=Hierarchical(ranks_per_node=...)"
            )
        if compressor is not None:
            self._exchanges[0].log_choices(self.layout.groups, compressor.parts)
        weight, scaler = self.settings.error_feedback, self.settings.grad_scaler
        self.residuals: list[Residuals] = []
        if weight is not None:
            self.residuals = [Residuals(weight, scaler) for _ in range(self.workers)]
        for rank, residuals in enumerate(self.residuals):
            residuals.lay_out(self.layout, rank, self.workers)
        self.coordinates = sum(group.coordinates for group in self.layout.groups)
        self._gradients = [RankGradients(self.flats, rank) for rank in range(self.workers)]
        self._missing: list[set[int]] = [set() for _ in range(self.workers)]
        self.payload_bytes, self.relative_error = 0, 0.0

    def renewed(self) -> Ranks:
        """Return the same ranks, with residuals by name, after the compressor's settings have
        changed; call ``take`` again for all gradients.
        """
        new = Ranks(self._by_name.items(), self.compressor, self.workers)
        if self.residuals and new.residuals:
            pairs = zip(new.residuals, self.residuals, strict=True)
            new.residuals = [own.loaded(old.state_dict()) for own, old in pairs]
        return new

    def take(self, rank: int) -> None:
        """Copy the parameters' gradients as those of one rank.

        A missing gradient counts as zeros. If all ranks miss it, the average is zero too.

        Raises:
            ValueError: A gradient is sparse.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        self._missing[rank] = {slot for slot, g in enumerate(gradients) if g is None}
        for member, gradient in zip(self.layout.members, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(f"{member.name}: sparse gradients cannot be simulated")
        for group, flat in zip(self.layout.groups, self.flats, strict=True):
            gather(group, gradients, flat[rank])
        if self.residuals:  # AMP's loss scale may have changed
            self.residuals[rank].lay_out(self.layout, rank, self.workers)

    def due(self, step: int) -> bool:
        """Return whether ``refit`` must be called at ``step``, whose gradients are sampled for a
        fit then or soon after; call this once per step.
        """
        if self.compressor is None:
            return False
        exchange, updates = self._exchanges[0], self.compressor._training.updates
        parts = exchange.parts_among(self.layout.groups)
        updates.prepare_second_stages(exchange.averages_of, parts, step)
        return updates.at(step).samples

    def refit(self, step: int) -> None:
        """Sample all ranks' gradients, and update the tables if the schedule says so."""
        others: list[np.ndarray] = []

        def collect(own: np.ndarray, fit: object) -> np.ndarray:
            others.append(own)
            raise _Collected

        for rank in range(1, self.workers):
            with contextlib.suppress(_Collected):
                self._update(rank, step, collect)
        self._update(0, step, lambda own, fit: fit([own, *others]))

    def average(self, step: int) -> None:
        """Encode and decode every rank's groups, and average them into the parameters' gradients.

        With error feedback this changes the residuals, so call it once per step.

        Raises:
            ResidualError: Residuals have outgrown the gradients; nothing has changed.
        """
        if self.compressor is None:
            self.payload_bytes = sum(f[0].numel() * f.element_size() for f in self.flats)
            if self.workers == 1:
                return
        meters, everyone = [StepMeter() for _ in range(self.workers)], list[Trips]()
        if self.compressor is not None:
            everyone = [self._trips(rank, step, meter) for rank, meter in enumerate(meters)]
        error, norm, results = 0.0, 0.0, list[torch.Tensor]()
        for index, flat in enumerate(self.flats):
            exact = _mean(flat)
            result = self._exchanged(index, everyone) if everyone else exact
            results.append(result)
            error += float((result.double() - exact.double()).square().sum())
            norm += float(exact.double().square().sum())
        self.relative_error = error / norm if norm else 0.0
        if self.residuals:
            _agree(everyone, self.residuals, meters)
        for slot in set.intersection(*self._missing):
            for index, piece in self.layout.pieces_of[slot]:
                results[index][piece.in_group] = 0.0
            for trips in everyone:
                trips.hold(slot)
        for trips in everyone:
            trips.commit()
        if everyone:
            self.payload_bytes = meters[0].current.payload_bytes
        self._give(results)

    def restore(self, rank: int) -> None:
        """Set the parameters' gradients to one rank's own gradients."""
        self._give([flat[rank] for flat in self.flats])

    def variance(self, step: int) -> Variance:
        """Return the exact variance (Eq. 1) of the current gradients with the current tables."""
        sgd = scatter(self.flats, self.settings.bucket_size)
        excess = normalized = bias = 0.0
        for index, flat in enumerate(self.flats if self.compressor is not None else ()):
            trips = self._trips(0, step)
            codec = self._scheme.parts[self.layout.groups[index].part]
            quantized = trips.quantized(index)
            errors = [quantization_error(codec, row[:quantized]) for row in flat]
            excess += sum(error.variance for error in errors) / self.workers
            normalized += sum(error.normalized for error in errors) / self.workers
            biases = [error.bias for error in errors if error.bias is not None]
            if biases:
                bias += float((torch.stack(biases).sum(0) / self.workers).square().sum())
        excess, normalized, bias = (x / self.coordinates for x in (excess, normalized, bias))
        estimator = (sgd.variance + excess) / self.workers + bias
        return Variance(sgd.variance, sgd.normalized, excess, normalized, bias, estimator)

    @property
    def _scheme(self) -> GradientCompressor:
        """Return the compressor; raise ValueError if there is none."""
        if self.compressor is None:
            raise ValueError("compressor: must not be None for tables and payloads")
        return self.compressor

    def _give(self, results: Sequence[torch.Tensor]) -> None:
        """Cut groups into the parameters' gradients."""
        for slot, parameter in enumerate(self.parameters):
            pieces = self.layout.pieces_of[slot]
            parts = [results[group][piece.in_group] for group, piece in pieces]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            parameter.grad = whole.view(parameter.shape)

    def _update(self, rank: int, step: int, sync: Callable) -> None:
        parts = self._exchanges[rank].parts_among(self.layout.groups)
        samples = functools.partial(self._trips(rank, step).samples, self.layout.groups)
        self._scheme._training.updates.run(step, samples, sync, parts, rank)

    def _trips(self, rank: int, step: int, meter: StepMeter | None = None) -> Trips:
        return Trips(
            self._scheme,
            self._exchanges[rank],
            self.layout,
            step,
            self._gradients[rank],
            meter=meter or StepMeter(),
            residuals=self.residuals[rank] if self.residuals else None,
        )

    def _exchanged(self, index: int, everyone: Sequence[Trips]) -> torch.Tensor:
        """Return a group's average by the exchange."""

        def take_back() -> None:
            for gradients in self._gradients:
                gradients.take_back()

        together([trips.trip(index, 1.0 / self.workers) for trips in everyone], take_back)
        average = self._gradients[0].averages.pop(index)
        for trips in everyone[1:]:  # the same bits on every rank
            trips.check(index, average, trips.quantized(index))
        return average


def _agree(
    everyone: Sequence[Trips], residuals: Sequence[Residuals], meters: Sequence[StepMeter]
) -> None:
    """Exchange what ranks must know of each other's residuals; raise the error of all of them."""
    rows = [own.row(meter.errors()) for own, meter in zip(residuals, meters, strict=True)]
    for trips, own in zip(everyone, residuals, strict=True):
        trips.weights, trips.error = own.agreed(trips.number, rows)
    if error := next((trips.error for trips in everyone if trips.error is not None), None):
        for trips in everyone:
            trips.abandon()
        raise error


def _mean(flat: torch.Tensor) -> torch.Tensor:
    """Return the mean of the rows, added in order; a single row is returned bit for bit."""
    total = flat[0].to(wide_of(flat.dtype), copy=True)
    for row in flat[1:]:
        total += row
    return total.mul_(1.0 / len(flat)).to(flat.dtype)
