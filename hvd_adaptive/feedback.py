"""Add the loss of quantising to later gradients: weighted error feedback.

Source: Abdi and Fekri 2020, section 4.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive import states
from hvd_adaptive.base.tensors import HOST, Finite, HostCopy, all_finite
from hvd_adaptive.feedback_weight import Figures, Weights, check_weights

if TYPE_CHECKING:
    from hvd_adaptive.base.errors import ResidualError
    from hvd_adaptive.codec.codec import Codec
    from hvd_adaptive.coding.payload import Payload
    from hvd_adaptive.layout import Layout

logger = logging.getLogger("hvd_adaptive")

# Least loss scale of AMP; smaller ones have no reciprocal in float32.
LEAST_SCALE = 2.0**-126


class Residuals:
    """Residual r of each group of one rank, float32, on the gradients' device (Eqs 14a-d).

    z = g + β r is encoded instead of the gradient. Receivers decode ẑ. Then r becomes
    (1 - β) r + z - ẑ, which is r + g - ẑ. β has cancelled: whatever it is in each step, everything
    sent plus r equals the sum of all gradients. The loss by clipping is part of r.

    1. ``lay_out`` begins a step. If the layout has changed, residuals are kept by parameter name.
    2. ``added`` returns z, and ``after`` the group's next residual; r itself does not change yet.
    3. ``agreed`` returns the next step's β from all ranks' ``row`` (feedback_weight.py).
    4. ``commit`` ends the step. A step that is aborted, or whose reduced gradients are not all
       finite (AMP skips it), is not committed and has no effect.

    Residuals need 8 bytes per quantised coordinate: r and its successor, whose buffers alternate.
    Full-precision coordinates, including those of a warm-up, have no residual.

    Args:
        weight: β, or "auto".
        scaler: AMP's GradScaler, whose scale S multiplies the gradients. r is stored divided by S,
            so it survives a change of S: z = g + β S r, and r becomes (1 - β) r + (z - ẑ) / S. If
            None, S = 1: residuals are then in the gradients' unit, and are wrong by the factor by
            which S changes.

    Attributes:
        weights: β of each part in this step, the same on all ranks.
    """

    def __init__(self, weight: float | str, scaler: Any = None) -> None:
        self.weights, self.scaler = Weights(weight), scaler
        self._scale = 1.0
        self._layout: Layout | None = None
        self._rank_and_size: tuple[int, int] | None = None
        self._current: dict[int, torch.Tensor] = {}
        self._spare: dict[int, torch.Tensor] = {}
        # Residuals of the last step with the check of each one, the check of the step, and the
        # weights after it if they have not been adopted.
        self._ended: tuple[dict[int, tuple[torch.Tensor, Finite]], Finite, Weights | None]
        self._ended = {}, Finite(), None
        # Squared norms of each group's gradient, of gradient and next residual, and of the
        # residual.
        self._gradients: dict[int, torch.Tensor] = {}
        self._squares: dict[int, HostCopy] = {}
        self._held: dict[int, float] = {}
        self._squared_norm = 0.0  # of the last step's quantised coordinates
        # Loaded residuals by parameter, not laid out yet.
        self._loaded: dict[str, torch.Tensor] = {}
        self._warned = False
        self._named_lost: set[str] = set()  # parameters that were warned of

    def lay_out(self, layout: Layout, rank: int, size: int) -> None:
        """Prepare for a step of ``layout`` as rank ``rank`` of ``size``."""
        self._load_ended()
        if self._loaded and self._rank_and_size not in (None, (rank, size)):
            logger.warning(
                "error feedback starts from zero: its residuals were saved by rank %d of %d, and "
                "this is rank %d of %d",
                *self._rank_and_size,
                rank,
                size,
            )
            self._loaded = {}
        self._rank_and_size = rank, size
        self._scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        self._gradients, self._squares = {}, {}
        if self._layout is None or self._layout.fingerprint != layout.fingerprint:
            # Layouts change alike on all ranks, but each rank may have loaded a state of its own.
            is_heard = rank == 0 or self._layout is None
            self.load_from(self)
            self._rank_and_size, self._layout = (rank, size), layout
            self._assign(layout, is_heard)

    def added(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Return z (float32) of group ``index``.

        If ``flat``, its quantised coordinates, is float32, it is changed in place.
        """
        self._load_ended()
        z = flat.to(torch.float32)
        self._gradients[index] = z.dot(z)
        residual = self._current.get(index)
        if residual is not None and z.numel():
            residual = self._current[index] = residual.to(z.device)
            z.add_(residual, alpha=self._weight_of(index) * self._scale)
        return z

    def after(
        self, index: int, z: torch.Tensor, codec: Codec, payloads: Sequence[Payload]
    ) -> torch.Tensor:
        """Return the group's residual after ``payloads`` of consecutive parts of ``z``."""
        out = self._spare.pop(index, None)
        if out is None or out.device != z.device:
            out = torch.empty_like(z)
        torch.neg(z, out=out)
        residual, weight = self._current.get(index), self._weight_of(index)
        if residual is not None and weight != 1:
            out.add_(residual, alpha=(weight - 1) * self._scale)
        # At a scale of 0 gradients carry no information: ``commit`` drops NaN.
        factor = -1.0 / self._scale if self._scale >= LEAST_SCALE else float("nan")
        at = 0
        for payload in payloads:
            end = at + payload.header.coordinates - payload.header.full
            codec.payloads.add([payload], factor, out[at:end])  # -(ẑ - z - (1 - β) S r) / S
            at = end
        self._squares[index] = HostCopy(torch.stack([self._gradients.pop(index), out.dot(out)]))
        return out

    def held_bytes(self, index: int) -> int:
        """Return the bytes of memory of group ``index``."""
        held = self._current.get(index), self._spare.get(index)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def hold(self, index: int, where: slice, after: torch.Tensor) -> None:
        """Restore coordinates of the group's next residual: they were sent, but are not applied."""
        residual = self._current.get(index)
        after[where] = 0.0 if residual is None else residual[where]

    def row(self, errors: Mapping[int, tuple[float, float]]) -> list[float]:
        """Return what ranks exchange after all groups were encoded (``Weights.row``), given the
        squared error and squared norm of the measured coordinates z of each group.
        """
        gradient = residual = before = 0.0
        by_part = dict.fromkeys(self._parts, (0.0, 0.0))
        for index, squares in self._squares.items():
            own, after = squares.get().tolist()
            gradient, residual = gradient + own, residual + after
            # A loaded residual is not known to have grown.
            before += self._held.get(index, math.inf if index in self._current else 0.0)
            error, norm = errors.get(index, (0.0, 0.0))
            sums = by_part[self._part_of(index)]
            by_part[self._part_of(index)] = sums[0] + error, sums[1] + norm
        scale = self._scale if self._scale >= LEAST_SCALE else math.nan
        residual = residual if residual > before else 0.0
        self._squared_norm = gradient / scale / scale
        return self.weights.row(self._squared_norm, residual, by_part)

    def agreed(
        self, number: int, rows: Sequence[Sequence[float]]
    ) -> tuple[Weights, ResidualError | None]:
        """Return the weights after step ``number`` from all ranks' last ``row``, for ``commit``,
        and the error that every rank must raise instead, or None. The first rank warns, once, if
        residuals have grown without bound for PATIENCE steps.
        """
        figures = Figures.of(self._parts, rows)
        weights = self.weights.after(self._squared_norm, figures)
        first = self._rank_and_size is None or self._rank_and_size[0] == 0
        if first and not self._warned and (warning := weights.growth_warning(figures)):
            logger.warning("%s", warning)
            self._warned = True
        return weights, weights.growth_error(number, figures)

    def commit(
        self,
        after: Mapping[int, torch.Tensor],
        finite: Finite | None = None,
        weights: Weights | None = None,
    ) -> None:
        """End a step and adopt these groups' residuals, except those that overflowed. On a GPU the
        checks are read when the residuals are next needed.

        Nothing is adopted unless the step's reduced gradients are ``finite``. ``weights`` are those
        of the next step, None for the same.
        """
        self._load_ended()
        finite = Finite() if finite is None else finite
        own = {index: (residual, Finite([residual]).ask()) for index, residual in after.items()}
        self._ended = own, finite, weights
        if finite.is_there() and all(answer.is_there() for _, answer in own.values()):
            self._load_ended()

    def _load_ended(self) -> None:
        """Adopt the last step's weights, and its residuals if they are finite."""
        (after, finite, weights), self._ended = self._ended, ({}, Finite(), None)
        if finite:
            self.weights = weights or self.weights
            for index, (residual, own) in after.items():
                if own:
                    if index in self._current:
                        self._spare[index] = self._current[index]
                    self._current[index] = residual
                    squares = self._squares.get(index)
                    self._held[index] = math.inf if squares is None else float(squares.get()[1])

    @property
    def _parts(self) -> list[str]:
        """Return the labels of the layout's quantised parts, the same on all ranks."""
        groups = () if self._layout is None else self._layout.groups
        return sorted({group.part for group in groups if group.quantized})

    def _part_of(self, index: int) -> str:
        return "" if self._layout is None else self._layout.groups[index].part

    def _weight_of(self, index: int) -> float:
        return self.weights.of(self._part_of(index))

    def state_dict(self) -> dict[str, Any]:
        """Return {"residuals": {rank, size, parameters: {name: float32 tensor}}}, without this
        entry if there are none, and ``Weights.state_dict``.

        A checksum is added, because a checkpoint of several ranks may mix residuals up. The tensors
        are copies on the CPU, divided by the loss scale.
        """
        named = self._named()
        state = self.weights.state_dict() | {"residuals_checksum": 0}
        if not named:
            return state
        rank, size = self._rank_and_size or (0, 0)
        saved = {"rank": rank, "size": size, "parameters": named}
        return state | {"residuals": saved, "residuals_checksum": residuals_checksum(saved)}

    def loaded(self, state: Mapping[str, Any]) -> Residuals:
        """Return new residuals from a compressor's state that ``check_residuals`` has accepted."""
        new = Residuals(self.weights.given, self.scaler)
        new._warned = self._warned
        new.weights = new.weights.loaded(state)
        if "residuals" in state:
            saved = state["residuals"]
            own = int(saved["rank"]), int(saved["size"])
            new._rank_and_size = own if own[1] else None  # see ``load_from``
            new._loaded = {name: r.clone() for name, r in saved["parameters"].items()}
        return new

    def load_from(self, others: Residuals) -> None:
        """Continue with this process's own residuals, whatever its new rank is. Until the next
        step it is not known, and states have size 0.
        """
        self._layout, self._rank_and_size, self._loaded = None, None, others._named()
        self._current, self._spare, self._held = {}, {}, {}

    def _named(self) -> dict[str, torch.Tensor]:
        """Return the residuals by parameter: 1-D, zeros for coordinates in full precision."""
        self._load_ended()
        if self._layout is None:
            return {name: residual.clone() for name, residual in self._loaded.items()}
        named: dict[str, torch.Tensor] = {}
        for index, (member, of_tensor, of_group) in _quantized_slices(self._layout):
            if index in self._current:
                if member.name not in named:
                    named[member.name] = torch.zeros(member.numel, **HOST)
                named[member.name][of_tensor] = self._current[index][of_group].cpu()
        return named

    def _assign(self, layout: Layout, is_heard: bool) -> None:
        """Assign loaded residuals to groups; warn once for each parameter that loses its own.

        If not ``is_heard``, another rank warns about them.
        """
        named, self._loaded = self._loaded, {}
        lost = {name for name, residual in named.items() if bool(residual.any())}
        for index, (member, of_tensor, of_group) in _quantized_slices(layout):
            residual = named.get(member.name)
            if residual is not None and residual.numel() == member.numel:
                if index not in self._current:
                    self._current[index] = torch.zeros(layout.groups[index].quantized, **HOST)
                self._current[index][of_group] = residual[of_tensor]
                lost.discard(member.name)
        if lost:
            is_new = not lost <= self._named_lost
            self._named_lost |= lost
            logger.log(
                logging.WARNING if is_heard and is_new else logging.DEBUG,
                "error feedback starts from zero for %d parameters that were removed, reshaped or "
                "are no longer quantised: %s%s",
                len(lost),
                ", ".join(sorted(lost)[:3]),
                " ..." if len(lost) > 3 else "",
            )


def _quantized_slices(layout: Layout) -> Iterator[tuple[int, tuple[Any, slice, slice]]]:
    """Yield each group's members with the slices of their quantised coordinates in both."""
    for index, group in enumerate(layout.groups):
        for piece in group.pieces:
            count = min(piece.stop - piece.start, group.quantized - piece.at)
            if count > 0:
                member = layout.members[piece.slot]
                inside = slice(piece.start, piece.start + count)
                yield index, (member, inside, slice(piece.at, piece.at + count))


def check_residuals(state: Mapping[str, Any]) -> None:
    """Raise ValueError if the residuals of error feedback in a compressor's state are invalid or
    not the ones that were saved with it, or if their weights are invalid.
    """
    check_weights(state)
    saved, of = state.get("residuals"), "state: residuals"
    if "residuals" in state:
        size = states.whole(saved, "size", of=of)
        states.whole(saved, "rank", 0, max(0, size - 1), of=of)
        parameters = states.mapping(states.entry(saved, "parameters", of), f"{of}: parameters")
        for name, r in parameters.items():
            is_float32 = isinstance(r, torch.Tensor) and r.dtype == torch.float32 and r.dim() == 1
            if not isinstance(name, str) or not is_float32 or r.layout != torch.strided:
                raise ValueError(
                    f"{of}: {name!r} must be a parameter's name, with a dense, one-dimensional "
                    "float32 tensor"
                )
        if not all_finite(parameters.values()):
            raise ValueError(f"{of} must be finite")
    known = states.whole(state, "residuals_checksum") if "residuals_checksum" in state else None
    if known is not None and known != (0 if saved is None else residuals_checksum(saved)):
        raise ValueError(
            "state: residuals are missing, or of several ranks. torch.distributed.checkpoint keeps "
            "one rank's tensors of a name, and reads those that a new state has, but each rank has "
            "residuals of its own: save {'compression': state} with the CompressionState of "
            "hvd_adaptive.ddp, PerRank(compressor=compressor) of hvd_adaptive.checkpoint, or a "
            "file of each rank by torch.save. To go on without residuals, "
            "remove the entries 'residuals' and 'residuals_checksum'"
        )


def residuals_checksum(saved: Mapping[str, Any]) -> int:
    """Return 32 bits of one rank's residuals, which are never 0."""
    parameters = dict(sorted(saved["parameters"].items()))
    own = int(saved["rank"]), int(saved["size"]), [*parameters]
    return zlib.crc32(repr((own, states.checksums(parameters.values()))).encode()) or 1
