"""Define Sending, what one rank quantises and sends of a step, and what remains as residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.exchange.exchange import Route, payloads_of
from hvd_adaptive.feedback import Residuals
from hvd_adaptive.finite import Finite

if TYPE_CHECKING:
    from hvd_adaptive.run.shipping import Shipping


class Sending:
    """Encode groups on one rank. Steps of Horovod, DDP and the simulation use it alike.

    1. ``encode`` adds the residual, encodes a group and begins its route.
    2. ``receive`` checks its average, and ``hold`` excludes members that no rank has a gradient of.
    3. ``commit`` ends the step: residuals become what was not sent.

    Args:
        shipping: Codecs, keys and names of the step's groups.
        residuals: Residuals of this rank, laid out for the step; None without error feedback.
    """

    def __init__(self, shipping: Shipping, residuals: Residuals | None = None) -> None:
        self._shipping, self._residuals = shipping, residuals
        self._after: dict[int, torch.Tensor] = {}  # the groups' residuals after this step
        self._absent: list[int] = []
        self._finite = Finite()

    @property
    def changes_values(self) -> bool:
        """Return whether residuals are added to coordinates in their memory."""
        return self._residuals is not None

    def values(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Return ``flat``, quantised coordinates of a group, with residuals added in place."""
        return flat if self._residuals is None else self._residuals.added(index, flat)

    def encode(
        self,
        index: int,
        flat: torch.Tensor,
        factor: Callable[[], float],
        memory: Callable[..., torch.Tensor],
    ) -> Route:
        """Encode a group, and return its route.

        Args:
            index: The group.
            flat: Its coordinates, in its dtype.
            factor: See ``Shipment.factor``.
            memory: See ``Shipping.shipment``.
        """
        shipping = self._shipping
        shipment = shipping.shipment(index, factor, memory)
        quantized = shipment.quantized
        values = self.values(index, flat[:quantized]) if quantized else flat[:quantized]
        payloads = shipping.exchange.encode(shipment, flat, values)
        if self._residuals is not None and quantized:
            own = payloads_of(payloads)
            self._after[index] = self._residuals.after(index, values, shipment.codec, own)
        return shipping.exchange.route(shipment, payloads)

    def held_bytes(self, index: int) -> int:
        """Return the bytes of a group's residuals, before and after this step."""
        if self._residuals is None or index not in self._after:
            return 0
        return self._residuals.held_bytes(index) + self._after[index].nbytes

    def receive(self, decoded: torch.Tensor) -> None:
        """Check the average of a group: a step with NaN or Inf changes no residual."""
        if self._residuals is not None:
            self._finite.look(decoded)

    def hold(self, slot: int) -> None:
        """Keep the residual of a member: its average is not applied, as no rank has a gradient."""
        self._absent.append(slot)

    def abandon(self) -> None:
        """Give the step up: residuals stay as they are."""
        self._after.clear()

    def commit(self) -> None:
        """End the step: residuals become what was not sent, unless AMP skips the step."""
        if self._residuals is None:
            return
        for slot in self._absent:
            for index, piece in self._shipping.layout.pieces_of[slot]:
                if index in self._after:
                    self._residuals.hold(index, piece.in_group, self._after[index])
        self._residuals.commit(self._after, self._finite.ask())
        self._after = {}

    def watch(self, relative_error: float) -> None:
        """See ``Residuals.watch``."""
        if self._residuals is not None:
            self._residuals.watch(relative_error)
