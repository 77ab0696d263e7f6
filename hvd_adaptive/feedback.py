"""Weighted error feedback (Abdi and Fekri 2020, section 4): what quantising lost is sent later."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive import states
from hvd_adaptive.finite import Finite, all_finite

if TYPE_CHECKING:
    from hvd_adaptive.codec import Codec
    from hvd_adaptive.coding.payload import Payload
    from hvd_adaptive.layout import Layout

logger = logging.getLogger("hvd_adaptive")

# Steps in a row with too large an error before the user is told.
PATIENCE = 3
# Of AMP: smaller ones have no reciprocal in float32.
LEAST_SCALE = 2.0**-126


class Residuals:
    """One rank's residual r of each group, float32, on the gradients' device (Eqs 14a-d).

    z = g + β r is encoded in the gradient's place, receivers see ẑ, and r becomes
    (1 - β) r + z - ẑ, which is r + g - ẑ: whatever β, all that was sent and r add up to all
    gradients. Clipping's loss is part of it.

    1. ``lay_out`` when a step begins. Another layout keeps what parameters' names allow.
    2. ``added`` gives z, ``after`` the group's next residual; r itself does not change yet.
    3. ``commit`` when the step has ended. A step that is given up, or whose reduced gradients are
       not all finite (AMP skips it), is never committed and leaves no trace.

    Memory: 8 bytes per quantised coordinate, r and what it is to become; the two change places.
    Full-precision coordinates, a warm-up's included, have no residual.

    scaler: AMP's GradScaler, whose scale S multiplies the gradients. r is held divided by S, so it
    survives a change of S: z = g + β S r, and r becomes (1 - β) r + (z - ẑ) / S. Where None, S = 1:
    then residuals are in the gradients' unit, and count wrongly by the factor that S changes by.
    """

    def __init__(self, weight: float, scaler: Any = None) -> None:
        self.weight, self.scaler = weight, scaler
        self._scale = 1.0
        self._layout: Layout | None = None
        self._place: tuple[int, int] | None = None
        self._current: dict[int, torch.Tensor] = {}
        self._spare: dict[int, torch.Tensor] = {}
        # Of the last step, and whether each holds, and any.
        self._ended: tuple[dict[int, tuple[torch.Tensor, Finite]], Finite] = {}, Finite()
        # Loaded, and not laid out yet: by parameter.
        self._loaded: dict[str, torch.Tensor] = {}
        self._above, self._warned = 0, False

    def lay_out(self, layout: Layout, rank: int, size: int) -> None:
        """Prepare for a step of ``layout`` as rank ``rank`` of ``size``."""
        self._settle()
        if self._loaded and self._place not in (None, (rank, size)):
            logger.warning(
                "error feedback starts from zero: its residuals were saved by rank %d of %d, and "
                "this is rank %d of %d",
                *self._place,
                rank,
                size,
            )
            self._loaded = {}
        self._place = rank, size
        self._scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        if self._layout is None or self._layout.fingerprint != layout.fingerprint:
            named = self._named()
            self._current, self._spare, self._loaded = {}, {}, {}
            self._layout = layout
            self._take(named)

    def added(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """z (float32) of group ``index``; ``flat``, its quantised coordinates, where float32
        changes in place."""
        self._settle()
        z = flat.to(torch.float32)
        residual = self._current.get(index)
        if residual is not None and z.numel():
            residual = self._current[index] = residual.to(z.device)
            z.add_(residual, alpha=self.weight * self._scale)
        return z

    def after(
        self, index: int, z: torch.Tensor, codec: Codec, payloads: Sequence[Payload]
    ) -> torch.Tensor:
        """The group's residual once ``payloads``, which encode ``z`` one part after the other, have
        been applied."""
        out = self._spare.pop(index, None)
        if out is None or out.device != z.device:
            out = torch.empty_like(z)
        torch.neg(z, out=out)
        residual = self._current.get(index)
        if residual is not None and self.weight != 1:
            out.add_(residual, alpha=(self.weight - 1) * self._scale)
        # At a scale of 0 gradients tell nothing: ``commit`` leaves NaN out.
        factor = -1.0 / self._scale if self._scale >= LEAST_SCALE else float("nan")
        at = 0
        for payload in payloads:
            end = at + payload.header.coordinates - payload.header.full
            codec.decode_opened([payload], factor, out[at:end])  # -(ẑ - z - (1 - β) S r) / S
            at = end
        return out

    def held_bytes(self, index: int) -> int:
        """Memory of group ``index``."""
        held = self._current.get(index), self._spare.get(index)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def hold(self, index: int, where: slice, after: torch.Tensor) -> None:
        """Of the group's next residual these coordinates stay as they were: they were sent, but
        nobody applies them."""
        residual = self._current.get(index)
        after[where] = 0.0 if residual is None else residual[where]

    def commit(self, after: Mapping[int, torch.Tensor], finite: Finite | None = None) -> None:
        """The step has ended: these groups' residuals hold. Ones that overflowed are left out.

        finite: whether the step's reduced gradients are; where they are not, nothing holds. On a
        GPU the answers are waited for when the residuals are next needed.
        """
        self._settle()
        finite = Finite() if finite is None else finite
        own = {index: (residual, Finite([residual]).ask()) for index, residual in after.items()}
        self._ended = own, finite
        if finite.is_there() and all(answer.is_there() for _, answer in own.values()):
            self._settle()

    def _settle(self) -> None:
        """The last step's residuals hold, or not."""
        (after, finite), self._ended = self._ended, ({}, Finite())
        if after and finite:
            for index, (residual, own) in after.items():
                if own:
                    if index in self._current:
                        self._spare[index] = self._current[index]
                    self._current[index] = residual

    def watch(self, relative_error: float) -> None:
        """Warn, once, where a step's measured ||z - ẑ||² / ||z||² is too large for β.

        An unbiased quantiser of relative error γ multiplies E||r||² by (1 - β)² + β² γ a step
        (Lemma 4): the residual grows without bound from γ = 2/β - 1 on.
        """
        limit = 2 / self.weight - 1
        self._above = self._above + 1 if relative_error >= limit else 0
        if self._above >= PATIENCE and not self._warned:
            best = 1 / (1 + relative_error)
            logger.warning(
                "error_feedback=%g: the measured relative error was %.3g, and not below %.3g for "
                "%d steps: unless the quantiser is biased, residuals grow without bound; "
                "error_feedback=%.2g, 1/(1 + error), keeps them smallest",
                self.weight,
                relative_error,
                limit,
                PATIENCE,
                best,
            )
            self._warned = True

    def state_dict(self) -> dict[str, Any]:
        """{"residuals": {rank, size, parameters: {name: float32 tensor}}}, copies on the CPU,
        divided by the loss scale; nothing where there are no residuals yet."""
        named = self._named()
        if not named:
            return {}
        rank, size = self._place or (0, 0)
        return {"residuals": {"rank": rank, "size": size, "parameters": named}}

    def loaded(self, state: Mapping[str, Any]) -> Residuals:
        """New residuals from a compressor's state, which ``check_residuals`` has passed."""
        new = Residuals(self.weight, self.scaler)
        new._warned = self._warned
        if "residuals" in state:
            saved = state["residuals"]
            new._place = int(saved["rank"]), int(saved["size"])
            new._loaded = {name: r.clone() for name, r in saved["parameters"].items()}
        return new

    def take_over(self, others: Residuals) -> None:
        """Go on with this process's own, whatever its rank has become."""
        self._layout, self._place, self._loaded = None, None, others._named()
        self._current, self._spare = {}, {}

    def _named(self) -> dict[str, torch.Tensor]:
        """Residuals by parameter: 1-D, zeros where it travels in full precision."""
        self._settle()
        if self._layout is None:
            return {name: residual.clone() for name, residual in self._loaded.items()}
        named: dict[str, torch.Tensor] = {}
        for index, (member, of_tensor, of_group) in _places(self._layout):
            if index in self._current:
                if member.name not in named:
                    named[member.name] = _zeros(member.numel)
                named[member.name][of_tensor] = self._current[index][of_group].cpu()
        return named

    def _take(self, named: Mapping[str, torch.Tensor]) -> None:
        """Lay out residuals by parameter; tell which parameters lose theirs."""
        lost = {name for name, residual in named.items() if bool(residual.any())}
        for index, (member, of_tensor, of_group) in _places(self._layout):
            residual = named.get(member.name)
            if residual is not None and residual.numel() == member.numel:
                if index not in self._current:
                    self._current[index] = _zeros(self._layout.groups[index].quantized)
                self._current[index][of_group] = residual[of_tensor]
                lost.discard(member.name)
        if lost:
            logger.warning(
                "error feedback starts from zero for %d parameters that are gone, of another shape "
                "or no longer quantised: %s%s",
                len(lost),
                ", ".join(sorted(lost)[:3]),
                " ..." if len(lost) > 3 else "",
            )


def check_residuals(state: Mapping[str, Any]) -> None:
    """ValueError where a compressor's state holds residuals that cannot be any."""
    if "residuals" not in state:
        return
    saved = state["residuals"]
    try:
        size = states.whole(saved, "size", of="residuals")
        states.whole(saved, "rank", 0, max(0, size - 1), of="residuals")
        parameters = states.mapping(states.entry(saved, "parameters", "residuals"), "parameters")
    except ValueError as error:
        raise ValueError(f"state: residuals cannot be read: {error}") from None
    for name, r in parameters.items():
        if not isinstance(name, str):
            raise ValueError(f"state: residuals must be of parameters' names, not {name!r}")
        if not isinstance(r, torch.Tensor) or r.dtype != torch.float32 or r.dim() != 1:
            raise ValueError(f"state: residual of {name!r} must be a float32 tensor and 1-D")
        if r.layout != torch.strided:
            raise ValueError(f"state: residual of {name!r} must be dense, not {r.layout}")
    if not all_finite(parameters.values()):
        raise ValueError("state: residuals must be finite")


def _zeros(count: int) -> torch.Tensor:
    """A residual of zero, whatever torch's defaults."""
    return torch.zeros(count, dtype=torch.float32, device="cpu")


def _places(layout: Layout) -> Iterator[tuple[int, tuple[Any, slice, slice]]]:
    """Group, member, and where its quantised coordinates lie in the member and in the group."""
    for index, group in enumerate(layout.groups):
        for piece in group.pieces:
            count = min(piece.stop - piece.start, group.quantized - piece.at)
            if count > 0:
                member = layout.members[piece.slot]
                inside = slice(piece.start, piece.start + count)
                yield index, (member, inside, slice(piece.at, piece.at + count))
