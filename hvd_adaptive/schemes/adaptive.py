"""Table schemes that refit their table to the gradients: statistics, schedule, state."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.levels import Distribution, FitError, expected_variance
from hvd_adaptive.parts import JointUpdate
from hvd_adaptive.schedule import UpdateSchedule
from hvd_adaptive.schemes.level_table import LevelTable
from hvd_adaptive.schemes.table_scheme import TableScheme
from hvd_adaptive.settings import Settings, check_choice, check_flag, check_integer
from hvd_adaptive.statistics import STATISTICS

logger = logging.getLogger("hvd_adaptive")


@dataclass(frozen=True)
class Adaptation:
    """How an adaptive scheme gathers statistics and when it refits.

    normalized: weigh buckets alike instead of by their squared norms.
    """

    normalized: bool = False
    update_steps: Iterable[int] | Callable[[int], bool] | None = None
    samples: int = 20
    statistics: str = "histogram"

    def __post_init__(self) -> None:
        check_flag("normalized", self.normalized)
        object.__setattr__(self, "samples", check_integer("samples", self.samples, 1))
        check_choice("statistics", self.statistics, STATISTICS)


class AdaptiveScheme(TableScheme):
    """A table scheme with ``fit`` and updates during training (ALQ paper, Algorithm 1)."""

    def __init__(
        self, settings: Settings, norm: str, table: LevelTable, adaptation: Adaptation
    ) -> None:
        super().__init__(settings, norm, table)
        self.adaptation = adaptation
        self.schedule = UpdateSchedule(adaptation.update_steps)
        self._statistic = STATISTICS[adaptation.statistics](adaptation.samples)

    @abstractmethod
    def fit_magnitudes(self, distribution: Distribution) -> np.ndarray:
        """Magnitudes (float64, ascending to 1) that fit the law of r = abs(v)/norm."""

    def scheme_settings(self) -> dict[str, Any]:
        own = ("normalized", "samples", "statistics")
        return super().scheme_settings() | {name: getattr(self.adaptation, name) for name in own}

    def fit(self, gradients: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Refit the table from gradients, this process alone: the default part's, if there are
        others (``part(label).fit`` refits theirs).

        gradients: a tensor or a list of them, any shapes; they are laid end to end, as in training,
        and all their full buckets are used (a shorter one only where there is no other). Non-finite
        and zero buckets are left out; where nothing is left, ValueError.
        """
        tensors = [gradients] if isinstance(gradients, torch.Tensor) else gradients
        if not isinstance(tensors, list | tuple) or not all(map(torch.is_tensor, tensors)):
            raise ValueError(
                f"gradients: must be a tensor or a list of tensors, not {type(gradients).__name__}"
            )
        flats = [g.detach().reshape(-1).to(torch.float32) for g in tensors]
        flat = torch.cat(flats) if flats else torch.empty(0)
        size = self.settings.bucket_size
        whole = flat.numel() // size * size
        buckets = flat[:whole].split(size) if whole else ([flat] if flat.numel() else [])
        statistic = STATISTICS[self.adaptation.statistics](len(buckets))
        usable, norms = self._usable(buckets)
        if not usable:
            raise ValueError("gradients: no bucket is finite and different from zero")
        distribution = statistic.pool(
            [statistic.collect(usable, norms)], self.adaptation.normalized
        )
        self.install(self.fit_magnitudes(distribution), self._table.version + 1)

    def update_due(self, step: int) -> bool:
        return self.schedule.is_due(step)

    def update(
        self,
        step: int,
        samples: Callable[[int, str], list[torch.Tensor]],
        sync: Callable,
        parts: Sequence[str] = ("",),
    ) -> None:
        joint = JointUpdate({label: self.part(label) for label in parts})
        update = sync(joint.collect(samples), joint.refit)
        self.schedule.done(step, joint.install(update, step))

    def collect(self, buckets: Sequence[torch.Tensor]) -> np.ndarray:
        """Statistics of sampled buckets as float64 [usable buckets, sampled buckets, ...]."""
        usable, norms = self._usable(buckets)
        counts = np.array([len(usable), len(buckets)], dtype=np.float64)
        return np.concatenate([counts, self._statistic.collect(usable, norms)])

    def refit(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        """The update that rank 0 broadcasts, from all ranks' statistics: float64
        [complete, fitted, expected variance before, after, magnitudes...].

        Hostile statistics keep the old table; nothing is raised in the middle of a step.
        """
        found, sampled = np.sum([part[:2] for part in collected], axis=0)
        update = np.concatenate(
            [[float(found == sampled and found > 0), 0.0, 0.0, 0.0], self._table.magnitudes]
        )
        if found == 0:
            return update
        try:
            distribution = self._statistic.pool(
                [part[2:] for part in collected], self.adaptation.normalized
            )
            magnitudes = self.fit_magnitudes(distribution)
            table = LevelTable(self._table.bits, self._table.symmetric, magnitudes)
            update[1:4] = (
                1.0,
                *(
                    expected_variance(t.magnitudes, distribution, t.symmetric)
                    for t in (self._table, table)
                ),
            )
            update[4:] = magnitudes
        except (FitError, ValueError) as error:
            logger.warning("the level table was kept: %s", error)
        return update

    def apply_update(self, update: np.ndarray, step: int, part: str = "") -> bool:
        """Take the broadcast update, the same on every rank; whether all samples were found.

        part: what the log calls this codec.
        """
        complete, fitted = bool(update[0]), bool(update[1])
        if fitted:
            self.install(update[4:], self._table.version + 1)
            logger.info(
                "step %d: level table %d%s, expected variance per coordinate %.3g -> %.3g, "
                "magnitudes %s",
                step, self._table.version, part and f" of {part}", update[2], update[3],
                " ".join(f"{m:.4g}" for m in self._table.magnitudes),
            )  # fmt: skip
        return complete

    def install(self, magnitudes: np.ndarray, version: int) -> None:
        """Make ``magnitudes`` the table in use."""
        self._table = LevelTable(self._table.bits, self._table.symmetric, magnitudes, version)

    def _usable(self, buckets: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[float]]:
        """Finite, non-zero buckets and their norms."""
        pairs = []
        for bucket in buckets:
            ops = kernels.for_device(bucket.device)
            bucket = self._clipped(bucket)
            norm = float(ops.bucket_norms(bucket, bucket.numel(), self.norm)[0])
            if norm > 0:  # false for NaN
                pairs.append((bucket, norm))
        return [bucket for bucket, _ in pairs], [norm for _, norm in pairs]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "table": self._table.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state, ("table", "schedule"))
        table = LevelTable.from_state_dict(state["table"])
        if (table.bits, table.symmetric) != (self._table.bits, self._table.symmetric):
            raise ValueError(
                f"state: table of bits={table.bits}, symmetric={table.symmetric} does not fit "
                f"bits={self._table.bits}, symmetric={self._table.symmetric}"
            )
        self.schedule.load_state_dict(state["schedule"])
        super().load_state_dict(state)
        self._table = table
