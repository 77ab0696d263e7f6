"""M ranks in one process: their gradients laid out, encoded, decoded and averaged as in training.

Layout, random keys, sampling, codec and order of summation are those of a Horovod run, so the
averaged gradients are the same bits that ranks with these gradients would get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.exchange.exchange import Place, Route, Shipment, payloads_of
from hvd_adaptive.exchange.exchanges import EXCHANGES
from hvd_adaptive.feedback import Residuals, all_finite
from hvd_adaptive.layout import Group, Member, build_layout, gather, parts_among
from hvd_adaptive.run.shares import Shares
from hvd_adaptive.settings import Settings, check_integer
from hvd_adaptive.simulate.variance import Scatter, quantization_error, scatter
from hvd_adaptive.streams import Use, group_number
from hvd_adaptive.transport.nodes import nodes_of


@dataclass(frozen=True)
class Variance:
    """Of the gradients that ranks hold at one point, per coordinate.

    minibatch: of one rank's gradient, SGD's own (NaN for one rank).
    normalized_minibatch: the same of buckets divided by their L2 norms.
    excess: what quantising adds to one rank's gradient (ALQ Eq. 1); normalized_excess: divided by
    the buckets' squared norms (Eq. 3). squared_bias: of the average, from clipping.
    estimator: mean squared error of the ranks' average, (minibatch + excess) / M + squared_bias.
    """

    minibatch: float
    normalized_minibatch: float
    excess: float
    normalized_excess: float
    squared_bias: float
    estimator: float


class _Collected(Exception):
    """A rank's statistics, on their way out of an update."""


class Ranks:
    """The gradients of ``workers`` ranks of one model, and what becomes of them.

    1. ``take(rank)`` after each rank's backward pass.
    2. ``refit(step)`` where ``due(step)``: an adaptive scheme's table is refitted.
    3. ``average(step)`` puts the averaged decoded gradients into the parameters' ``grad``. One rank
       without a compressor has its own, as it was.

    named_parameters: as ``model.named_parameters()`` gives them; those without requires_grad are
    left out. compressor: None for float32. Groups are never cut smaller for ``in_flight_bytes``:
    nothing is in flight here.

    flats: for each group of the layout the ranks' gradients, (workers, coordinates).
    residuals: each rank's where the compressor has error feedback, from zero; else empty.
    payload_bytes, relative_error: of the last average; bytes are rank 0's, the error is
    ||average - exact||**2 / ||exact||**2.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        compressor: GradientCompressor | None,
        workers: int,
    ) -> None:
        self.compressor = compressor
        if compressor is not None:
            check_compressor("compressor", compressor)
        self.workers = check_integer("workers", workers, 1)
        self.settings = Settings() if compressor is None else compressor.settings
        by_name = {name: p for name, p in named_parameters if p.requires_grad}
        if not by_name:
            raise ValueError("named_parameters: no parameter requires a gradient")
        if compressor is not None:
            compressor.know_parameters(list(by_name))
        part_of = compressor.part_of if compressor is not None else lambda name: ""
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
        make = EXCHANGES[self.settings.exchange]
        nodes = nodes_of(self.settings.ranks_per_node, self.workers)
        self._exchanges = [make(Place(workers, rank, nodes)) for rank in range(workers)]
        if not self._exchanges[0].settled:
            raise ValueError(
                f"exchange={self.settings.exchange!r}: simulated ranks run on no nodes and have no "
                "network to measure; give ranks_per_node with 'hierarchical'"
            )
        self._exchanges[0].arrange(self.layout.groups)
        weight = self.settings.error_feedback
        count = 0 if weight is None else self.workers
        self.residuals = [Residuals(weight, self.settings.grad_scaler) for _ in range(count)]
        for rank, residuals in enumerate(self.residuals):
            residuals.lay_out(self.layout, rank, self.workers)
        self.coordinates = sum(group.coordinates for group in self.layout.groups)
        self._lent = [Lent() for _ in range(self.workers)]
        self._missing: list[set[int]] = [set() for _ in range(self.workers)]
        self.payload_bytes, self.relative_error = 0, 0.0

    def renewed(self) -> Ranks:
        """The same ranks once the compressor's settings have changed; residuals are kept by name,
        gradients are to be taken again."""
        names = [member.name for member in self.layout.members]
        new = Ranks(zip(names, self.parameters, strict=True), self.compressor, self.workers)
        if self.residuals and new.residuals:
            kept = [residuals.state_dict() for residuals in self.residuals]
            new.residuals = [r.loaded(k) for r, k in zip(new.residuals, kept, strict=True)]
            for rank, residuals in enumerate(new.residuals):
                residuals.lay_out(new.layout, rank, self.workers)
        return new

    def take(self, rank: int) -> None:
        """Copy the parameters' gradients, as one rank's; a missing one counts as zeros, and where
        all ranks miss it the average is zero, too."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._missing[rank] = {slot for slot, g in enumerate(gradients) if g is None}
        for member, gradient in zip(self.layout.members, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(f"{member.name}: sparse gradients cannot be simulated")
        for group, flat in zip(self.layout.groups, self.flats, strict=True):
            gather(group, gradients, flat[rank])
        if self.residuals:  # AMP's loss scale may be another
            self.residuals[rank].lay_out(self.layout, rank, self.workers)

    def due(self, step: int) -> bool:
        """Whether the compressor's schedule wants a table refitted at ``step``; ask once a step."""
        if self.compressor is None:
            return False
        self._exchanges[0].prepare(self.compressor, parts_among(self.layout.groups), step)
        return self.compressor.update_due(step)

    def refit(self, step: int) -> None:
        """Update the tables from all ranks' samples."""
        others = [self._statistics(rank, step) for rank in range(1, self.workers)]
        self._update(0, step, lambda own, fit: fit([own, *others]))

    def average(self, step: int) -> None:
        """Encode every rank's groups, decode and average them into the parameters' gradients.
        With error feedback residuals change: once a step."""
        if self.compressor is None:
            self.payload_bytes = sum(f[0].numel() * f.element_size() for f in self.flats)
            if self.workers == 1:
                return
        else:
            self.payload_bytes = 0
        error = norm = 0.0
        results = []
        after: list[dict[int, torch.Tensor]] = [{} for _ in self.residuals]
        for index, flat in enumerate(self.flats):
            exact = _mean(flat)
            result = exact if self.compressor is None else self._exchanged(index, step, after)
            results.append(result)
            error += float((result - exact).square().sum())
            norm += float(exact.square().sum())
        self.relative_error = error / norm if norm else 0.0
        absent = set.intersection(*self._missing)
        for index, piece in (place for slot in absent for place in self.layout.pieces_of[slot]):
            where = slice(piece.at, piece.at + piece.stop - piece.start)
            results[index][where] = 0.0
            for residuals, of_rank in zip(self.residuals, after, strict=True):
                if index in of_rank:
                    residuals.hold(index, where, of_rank[index])
        if self.residuals and all_finite(results):
            for residuals, of_rank in zip(self.residuals, after, strict=True):
                residuals.commit(of_rank)
        self._give(results)

    def restore(self, rank: int) -> None:
        """Give the parameters one rank's own gradients back."""
        self._give([flat[rank] for flat in self.flats])

    def variance(self, step: int) -> Variance:
        """Of the gradients as they are now, with the tables as they are now; exact (Eq. 1)."""
        sgd = self.scatter()
        excess = normalized = bias = 0.0
        for index, flat in enumerate(self.flats if self.compressor is not None else ()):
            codec, quantized = self._codec(index), self._quantized(index, step)
            errors = [quantization_error(codec, row[:quantized]) for row in flat]
            excess += sum(error.variance for error in errors) / self.workers
            normalized += sum(error.normalized for error in errors) / self.workers
            biases = [error.bias for error in errors if error.bias is not None]
            if biases:
                bias += float((torch.stack(biases).sum(0) / self.workers).square().sum())
        excess, normalized, bias = (x / self.coordinates for x in (excess, normalized, bias))
        estimator = (sgd.variance + excess) / self.workers + bias
        return Variance(sgd.variance, sgd.normalized, excess, normalized, bias, estimator)

    def scatter(self) -> Scatter:
        """Of the ranks' gradients themselves."""
        return scatter(self.flats, self.settings.bucket_size)

    def _give(self, results: Sequence[torch.Tensor]) -> None:
        """Cut groups into the parameters' gradients."""
        for slot, parameter in enumerate(self.parameters):
            parts = [
                results[group][piece.at : piece.at + piece.stop - piece.start]
                for group, piece in self.layout.pieces_of[slot]
            ]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            parameter.grad = whole.view(parameter.shape)

    def _statistics(self, rank: int, step: int) -> np.ndarray:
        """What a rank would send at an update: it is stopped where ranks meet."""

        def meet(own: np.ndarray, fit: object) -> np.ndarray:
            raise _Collected(own)

        try:
            self._update(rank, step, meet)
        except _Collected as collected:
            return collected.args[0]
        raise RuntimeError(f"{self.compressor.name}: an update ended without its ranks meeting")

    def _update(self, rank: int, step: int, sync: Callable) -> None:
        """One rank's part in an update."""
        parts = parts_among(self.layout.groups)
        finite = all_finite(flat[rank] for flat in self.flats)
        self.compressor.update(step, self._samples(rank, step), sync, parts, finite)

    def _samples(self, rank: int, step: int) -> Callable[[int, str], list[torch.Tensor]]:
        seed, instance = self.settings.seed, self.compressor.instance

        def flat_of(member: int, group: Group) -> torch.Tensor:
            index = next(i for i, other in enumerate(self.layout.groups) if other is group)
            return self._quantized_values(index, member, group.quantized)

        def samples(count: int, part: str) -> list[torch.Tensor]:
            shares = Shares(
                self._exchanges[rank],
                self.layout.groups,
                bucket_size=self.settings.bucket_size,
                count=count,
                key_of=lambda rank: instance.key(seed, rank, step, Use.SAMPLE),
                part=part,
            )
            drawn = {m: shares.draw(rank, partial(flat_of, m)) for m in shares.members}
            if len(drawn) == 1:
                return drawn[rank]
            received = [shares.shared(of_member) for of_member in drawn.values()]
            return shares.averaged(drawn[rank], received)

        return samples

    def _quantized_values(self, index: int, rank: int, quantized: int) -> torch.Tensor:
        """What a rank's quantiser sees of a group: its residual added, where there is one."""
        values = self.flats[index][rank][:quantized]
        if not self.residuals:
            return values
        return self.residuals[rank].added(index, values.to(torch.float32, copy=True))

    def _exchanged(
        self, index: int, step: int, after: Sequence[dict[int, torch.Tensor]]
    ) -> torch.Tensor:
        """A group's average, by the exchange. ``after`` gets the ranks' next residuals."""
        routes = []
        for rank, row in enumerate(self.flats[index]):
            exchange, shipment = self._exchanges[rank], self._shipment(index, step, rank)
            flat = self._lent[rank].memory("gradients", row.numel(), row.dtype, row.device)
            flat.copy_(row)
            values = flat[: shipment.quantized]
            if self.residuals:
                values = self._quantized_values(index, rank, shipment.quantized)
            payloads = exchange.encode(shipment, flat, values)
            if self.residuals and shipment.quantized:
                codec, residuals = shipment.codec, self.residuals[rank]
                own = payloads_of(payloads)
                after[rank][index] = residuals.after(index, values, codec, own)
            routes.append(exchange.route(shipment, payloads))
        return together(routes, self._take_back).clone()

    def _take_back(self) -> None:
        for lent in self._lent:
            lent.take_back()

    def _shipment(self, index: int, step: int, of_rank: int) -> Shipment:
        group, quantized = self.layout.groups[index], self._quantized(index, step)
        seed, instance = self.settings.seed, self.compressor.instance
        return Shipment(
            codec=self._codec(index),
            dtype=group.dtype,
            quantized=quantized,
            full=group.coordinates - quantized,
            layout=self.layout.fingerprint,
            key=lambda rank: instance.key(seed, rank, step, group_number(index)),
            factor=lambda: 1.0 / self.workers,
            time=lambda field: nullcontext(),
            count=self._count if of_rank == 0 else lambda size: None,
            memory=self._lent[of_rank].memory,
        )

    def _count(self, size: int) -> None:
        self.payload_bytes += size

    def _codec(self, index: int) -> GradientCompressor:
        """Of the group's part."""
        return self.compressor.part(self.layout.groups[index].part)

    def _quantized(self, index: int, step: int) -> int:
        """Coordinates of a group that are quantised: none while warming up."""
        return 0 if step < self.settings.warmup_steps else self.layout.groups[index].quantized


class Lent:
    """Memory of one rank that every group uses again, as ``Shipment.memory`` says.

    In training another group may be encoded or decoded there while a collective is under way. So
    ``take_back`` overwrites it each time: what is still read there becomes NaN.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def memory(
        self, use: str, coordinates: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """For so many coordinates, holding anything."""
        key = use, dtype, device
        if key not in self._buffers or self._buffers[key].numel() < coordinates:
            self._buffers[key] = torch.empty(coordinates, dtype=dtype, device=device)
        return self._buffers[key][:coordinates]

    def take_back(self) -> None:
        """Overwrite all of it."""
        for buffer in self._buffers.values():
            buffer.fill_(float("nan"))


def together(routes: Sequence[Route], under_way: Callable[[], None] = lambda: None) -> torch.Tensor:
    """The first rank's result of an exchange: all ranks go its stages side by side.

    under_way: is called when all ranks have submitted a collective, and none has been read.
    """
    requests = [next(route) for route in routes]
    while True:
        under_way()
        received = type(requests[0]).hand_over(requests)
        try:
            first = routes[0].send(received[0])
        except StopIteration as end:
            return end.value
        others = zip(routes[1:], received[1:], strict=True)
        requests = [first, *(route.send(own) for route, own in others)]


def _mean(flat: torch.Tensor) -> torch.Tensor:
    """Of the rows, added in order; one row itself, bit for bit."""
    total = flat[0].clone()
    for row in flat[1:]:
        total += row
    return total.mul_(1.0 / len(flat))
