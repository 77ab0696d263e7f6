"""Define RankContext, the state that all steps of a compressor with the same ranks share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from hvd_adaptive.base.checks import living
from hvd_adaptive.base.errors import WarnOnce
from hvd_adaptive.base.tensors import stream_of
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.exchange.auto import EXCHANGES, name_of_exchange
from hvd_adaptive.exchange.exchange import Exchange, RankInfo
from hvd_adaptive.feedback import Residuals
from hvd_adaptive.layout import Group, Layout
from hvd_adaptive.run.agreement import agreed_settings, settings_row, warn_of_differences
from hvd_adaptive.run.monitored import Monitored
from hvd_adaptive.run.trip import Plan
from hvd_adaptive.transport.collectives import LARGEST_COLLECTIVE
from hvd_adaptive.transport.world import LevelSync, nodes_of

logger = logging.getLogger("hvd_adaptive")


class RankContext:
    """Ranks, exchange, layout and memory that persist between steps.

    Attributes:
        world: A transport.world.World, or an object with its methods.
        layout: The layout; None until the gradients are known.
        name: Beginning of the names of collectives.
        agreed: The settings that ranks must have alike; ``settings_row`` describes them.
        has_agreed: Ranks have agreed in a step with these settings.
        named: (name, parameter) pairs that ranks compare; none if they cannot be compared.
        compared_at: How many states the compressor had loaded when ranks compared parameters.
    """

    def __init__(self, compressor: GradientCompressor, world: Any, name: str = "") -> None:
        self.compressor, self.settings, self.world = compressor, compressor.settings, world
        self.agreed = agreed_settings(compressor)
        self.settings_row, self.has_agreed = settings_row(self.agreed), False
        self.exchange_name = name_of_exchange(self.settings, world.size)
        if self.settings.exchange is None and world.size > 1:
            logger.info("exchange=None: %s, for %d ranks", self.exchange_name, world.size)
        nodes = nodes_of(self.settings.ranks_per_node, world.size)
        make = EXCHANGES[self.exchange_name]
        self.exchange: Exchange = make(RankInfo(world.size, world.rank, nodes))
        self.layout: Layout | None = None
        self.parts: list[str] = []
        self._prepared: tuple[Any, ...] = ()
        self.name = name
        self.named: Sequence[tuple[str, torch.Tensor]] = ()
        self.compared_at = -1
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._plans: tuple[Layout | None, bool, list[Plan]] = None, False, []
        compressor._training.meter.clear()
        compressor._training.instance.bind()
        self.monitored = Monitored(compressor, world.rank)
        training = compressor._training
        if training.residuals is not None and training.meter.last is None and world.rank == 0:
            _warn_of_scaler(training.residuals)

    @property
    def wants_comparison(self) -> bool:
        """Return whether ranks should compare parameters: in their first step, and in the first one
        after a state was loaded. They do if any rank wants to.
        """
        return bool(self.named) and self.compared_at != self.compressor._training.loads

    def compare_parameters(self, attempt: int = 0) -> None:
        """Warn if ranks have different parameters, a collective."""
        self.compared_at = self.compressor._training.loads
        warn_of_differences(self.world, self.named, self.name_at(attempt))

    def stock_sizes(self, layout: Layout) -> list[int]:
        """Return the lengths of the tensors that training without compression averages."""
        return [member.numel for member in layout.members]

    def build_layout(self, cut: Callable[..., Layout]) -> Layout:
        """Return a layout, built by ``cut``, whose groups fit Horovod's and the user's bounds.
        ``cut`` is ``layout.build_layout`` of some members, or like it.

        Raises:
            ValueError: Even the smallest groups exceed ``in_flight_bytes``.
        """
        bound = min(LARGEST_COLLECTIVE, self.settings.tuning.in_flight_bytes // 2)
        most = self.settings.fusion_bytes // 4
        while True:
            layout = cut(
                min_numel=self.settings.min_numel,
                bucket_size=self.settings.bucket_size,
                tail=self.settings.tail,
                most_coordinates=most,
            )
            largest = max((plan.most for plan in self.plans(layout)), default=0)
            if largest <= bound:
                if self.exchange.is_set_up:
                    self._exchange_is_known(layout)
                return layout
            if most < self.settings.bucket_size:
                others = "or lower bucket_size"
                scattered = EXCHANGES["scatter_reduce"](RankInfo(self.world.size, self.world.rank))
                if all(self._plan(scattered, group).most <= bound for group in layout.groups):
                    others = "lower bucket_size, or use exchange='scatter_reduce'"
                raise ValueError(
                    f"tuning=Tuning(in_flight_bytes={self.settings.tuning.in_flight_bytes}): "
                    f"exchange={self.exchange_name!r} of the smallest group over "
                    f"{self.world.size} ranks takes {largest} bytes, and two must fit; raise it, "
                    f"{others}"
                )
            most //= 2

    def set_up(self, layout: Layout, step: int, device: torch.device, attempt: int = 0) -> None:
        """Set the exchange up, after ranks have compared settings and before the first group."""
        self.exchange.set_up(
            self.world, self.compressor.parts.default, self.name_at(attempt), device
        )
        self._exchange_is_known(layout)
        self.prepare(step)

    def _exchange_is_known(self, layout: Layout) -> None:
        self.exchange.log_choices(layout.groups, self.compressor.parts)
        self.parts = self.exchange.parts_among(layout.groups)

    def prepare(self, step: int) -> None:
        """Make the parts' second stages, before tables are updated in a step: in the first one, and
        in the first one after a state was loaded.
        """
        wanted = self.compressor._training.loads, *self.parts
        if not self.exchange.is_set_up or self._prepared == wanted:
            return
        self._prepared = wanted
        updates = self.compressor._training.updates
        updates.prepare_second_stages(self.exchange.averages_of, self.parts, step)

    def buffer(
        self, use: str, coordinates: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return uninitialised memory that all groups share; read or copy its contents at once."""
        key = (use, dtype, device if device.type == "cpu" else stream_of(device))
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < coordinates:
            buffer = torch.empty(coordinates, dtype=dtype, device=device)
            self._buffers[key] = buffer
            held = sum(b.nbytes for b in self._buffers.values())
            self.compressor._training.meter.hold({"buffers": held})
        return buffer[:coordinates]

    def plans(self, layout: Layout) -> list[Plan]:
        """Return how each group is exchanged; with a warm-up, to which a loaded state may return,
        in full precision.
        """
        known = self.exchange.is_set_up
        if self._plans[0] is not layout or self._plans[1] is not known:
            plans = [self._plan(self.exchange, group) for group in layout.groups]
            self._plans = layout, known, plans
        return self._plans[2]

    def _plan(self, exchange: Exchange, group: Group) -> Plan:
        """Return how an exchange averages a group."""
        known = exchange.is_set_up
        quantized = exchange.quantized(group) if known else group.quantized
        quantized = 0 if self.settings.warmup_steps else quantized
        codec, full = self.compressor.parts[group.part], group.coordinates - quantized
        most = exchange.in_flight_bytes(codec, quantized, full, group.dtype)
        working = exchange.working_bytes(codec, quantized, full) if known else 0
        collectives = exchange.collectives(group.coordinates) if known else 0
        return Plan(most, working, collectives)

    def name_at(self, attempt: int) -> str:
        """Return the beginning of names of an attempt's collectives, which differ by attempt."""
        return self.name + (f".attempt{attempt}" if attempt else "")

    def sync(self, attempt: int = 0) -> LevelSync:
        """Return the level sync of these ranks; every rank must use it at the same step."""
        return LevelSync(self.world, self.name_at(attempt))


def _warn_of_scaler(residuals: Residuals) -> None:
    """Warn if residuals may have to follow a loss scale: some GradScaler is in this process."""
    scalers = living(torch.amp.GradScaler)
    if residuals.scaler is None and any(scaler.is_enabled() for scaler in scalers):
        _scaler_forgotten(
            "error_feedback: a GradScaler is in use; if it scales this compressor's gradients, "
            "give it as grad_scaler=, or residuals keep the unit of an earlier loss scale"
        )


_scaler_forgotten = WarnOnce(logger)
