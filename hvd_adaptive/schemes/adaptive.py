"""Define table schemes whose levels or code book are fitted to the gradients."""

from __future__ import annotations

import dataclasses
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from hvd_adaptive import states
from hvd_adaptive.adapt.coverage import HEAD, Coverage, Usable, share_in
from hvd_adaptive.adapt.joint_update import JointUpdate
from hvd_adaptive.adapt.schedule import UpdateSchedule
from hvd_adaptive.adapt.statistics import STATISTICS, weights_of
from hvd_adaptive.checks import check_choice, check_flag, check_integer
from hvd_adaptive.coding.coders import CODERS
from hvd_adaptive.exchange.staged_codec import StagedCodec
from hvd_adaptive.levels import (
    Distribution,
    FitError,
    averaged_law,
    expected_variance,
    symbol_probabilities,
)
from hvd_adaptive.once import WarnOnce
from hvd_adaptive.schemes.buckets import buckets_of
from hvd_adaptive.schemes.level_table import LevelTable
from hvd_adaptive.schemes.table_scheme import TableScheme
from hvd_adaptive.settings import Settings, keyword_of

logger = logging.getLogger("hvd_adaptive")

# Numbers of an update before the table.
OUTCOME = 5


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Parameters of a scheme's statistics and refits.

    Attributes:
        normalized: Weigh all buckets equally instead of by their squared norms.
        update_steps: See ``adapt.schedule.UpdateSchedule``.
        samples: Number of buckets to sample.
        statistics: Kind of statistics, a key of ``adapt.statistics.STATISTICS``.
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
    """A table scheme with ``fit`` and updates during training (ALQ paper, Algorithm 1).

    If ``coding`` needs a code book, the symbols' probabilities (Props 6, 8) are fitted with the
    levels, from the same statistics, and are part of the table.
    """

    def __init__(
        self, settings: Settings, norm: str, table: LevelTable, adaptation: Adaptation
    ) -> None:
        super().__init__(settings, norm, table)
        self.adaptation = adaptation
        self.schedule = UpdateSchedule(adaptation.update_steps)
        self._statistic = STATISTICS[adaptation.statistics](adaptation.samples)
        # New second stages are fitted regardless of the schedule.
        self._second_schedule = UpdateSchedule(())
        self._warn_kept = WarnOnce(logger)
        self._requested = False  # whether the first fit of this second stage was requested
        self._share = 0.0  # Coverage.share of the last fit; 0 if it failed

    @abstractmethod
    def fit_magnitudes(self, distribution: Distribution) -> np.ndarray:
        """Return magnitudes (float64, ascending to 1) that fit the law of r = abs(v)/norm."""

    @property
    def has_book(self) -> bool:
        """Return whether the coding uses the probabilities of symbols."""
        coding = self.settings.coding
        return coding in CODERS and CODERS[coding].fitted

    @property
    def is_fitted(self) -> bool:
        """Return whether a fit changes anything."""
        return True

    def scheme_settings(self) -> dict[str, Any]:
        own = ("normalized", "samples", "statistics")
        return super().scheme_settings() | {name: getattr(self.adaptation, name) for name in own}

    def fit(self, gradients: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Refit table and code book from gradients, in this process alone.

        If there are other parts, this refits the default part's; ``part(label).fit`` refits theirs.

        Args:
            gradients: A tensor or a list of tensors of any shapes, concatenated as in training. All
                buckets that would be quantised are used (schemes/buckets.py), except for non-finite
                and zero buckets.

        Raises:
            ValueError: No bucket is finite and nonzero.
        """
        buckets = buckets_of(gradients, self.settings)
        statistic = STATISTICS[self.adaptation.statistics](len(buckets))
        usable = self._usable(buckets)
        if not usable.buckets:
            raise ValueError("gradients: no bucket is finite and different from zero")
        collected = [statistic.collect(usable.buckets, usable.norms, usable.weights)]
        distribution = statistic.pool(collected, self.adaptation.normalized)
        if self.is_fitted:
            fitted = self._fitted(distribution, statistic.of_coordinates(collected))
            self.install(fitted.magnitudes, self._table.version + 1, fitted.probabilities)

    def second_codec(self, bits: int) -> StagedCodec:
        return self._again("clip", bits=bits)

    def prepare_second_stages(self, ranks: int, labels: Sequence[str], step: int) -> None:
        super().prepare_second_stages(ranks, labels, step)
        for second in self._seconds(labels).values():
            if second.table_version == 0 and not second._requested:
                second._requested = True
                self._second_schedule.request(step)

    def second_due(self, step: int) -> bool:
        return self._second_schedule.is_due(step)

    def fitted_to(self, flat: torch.Tensor) -> StagedCodec:
        copy = self._again()
        copy.fit(flat)
        return copy

    def _again(self, *dropped: str, **changes: Any) -> AdaptiveScheme:
        """Return a new codec with the same keywords, except for ``dropped`` and ``changes``."""
        kept = {
            name: value
            for name, value in self._keywords.items()
            if keyword_of(name).for_averages and name not in dropped
        }
        return type(self)(**kept | changes)

    def _seconds(self, labels: Sequence[str]) -> dict[str, AdaptiveScheme]:
        """Return the second stages of parts, if they are fitted."""
        firsts = {label: self.part(label) for label in labels}
        codecs = {label: (f, f._second.codec) for label, f in firsts.items() if f._second}
        return {
            label: second
            for label, (first, second) in codecs.items()
            if second is not first and isinstance(second, AdaptiveScheme) and second.is_fitted
        }

    def update_due(self, step: int) -> bool:
        return self._first_due(step) or self.second_due(step)

    def _first_due(self, step: int) -> bool:
        """Return whether the tables of gradients, not only those of averages, are refitted."""
        return self.is_fitted and self.schedule.is_due(step)

    def update(
        self,
        step: int,
        samples: Callable[[int, str], list[torch.Tensor]],
        sync: Callable,
        parts: Sequence[str] = ("",),
        finite: bool = True,
    ) -> None:
        firsts, seconds = {label: self.part(label) for label in parts}, self._seconds(parts)
        seconds_alone = not self._first_due(step)
        schedule = self._second_schedule if seconds_alone else self.schedule
        joint = JointUpdate(
            firsts, seconds, seconds_alone, finite, self._warn_kept, schedule.retries(step)
        )
        update = sync(joint.collect(samples), joint.refit)
        complete = joint.install(update, step)
        if seconds:
            self._second_schedule.done(step, complete)
        if not seconds_alone:
            self.schedule.done(step, complete)

    def collect(self, buckets: Sequence[torch.Tensor]) -> np.ndarray:
        """Return statistics of sampled buckets, float64 [coverage.Usable's head, ...]."""
        usable = self._usable(buckets)
        statistics = self._statistic.collect(usable.buckets, usable.norms, usable.weights)
        return np.concatenate([usable.head, statistics])

    def has_more(self, collected: Sequence[np.ndarray]) -> bool:
        """Return whether these statistics contain notably more than those of the last fit."""
        return Coverage.of(collected).has_grown(self._share)

    def refit(
        self,
        collected: Sequence[np.ndarray],
        seen: Callable[[Distribution], Distribution] = lambda law: law,
    ) -> np.ndarray:
        """Return the update that rank 0 broadcasts, computed from all ranks' statistics.

        Hostile statistics keep the old table; no exception is raised in the middle of a step.

        Args:
            collected: Results of ``collect``, one per rank.
            seen: Function that converts the ranks' law of coordinates to the law that this codec
                quantises.

        Returns:
            float64 [complete, fitted, expected variance before, after, share of coordinates fitted
            to, magnitudes..., probabilities...]; probabilities if there is a code book.
        """
        coverage, table = Coverage.of(collected), self._table
        outcome = [float(coverage.complete), *[0.0] * (OUTCOME - 1)]
        if coverage.found > 0:
            try:
                statistics = [part[HEAD:] for part in collected]
                law = seen(self._statistic.pool(statistics, self.adaptation.normalized))
                table = self._fitted(law, seen(self._statistic.of_coordinates(statistics)))
                variances = [
                    float(expected_variance(t.magnitudes, law, t.symmetric))
                    for t in (self._table, table)
                ]
                outcome[1:] = [1.0, *variances, coverage.share]
            except (FitError, ValueError) as error:
                table = self._table
                logger.info("the level table was kept: %s", error)
        return np.concatenate([outcome, *_numbers(table, self.has_book)])

    def refit_second(
        self, collected: Sequence[np.ndarray], first: AdaptiveScheme, update: np.ndarray | None
    ) -> np.ndarray:
        """Return the update of a codec of averages.

        Args:
            collected: Statistics of the first stage's codec.
            first: That codec.
            update: The update that it will apply, or None.
        """
        size = first.table.magnitudes.size
        magnitudes = first.table.magnitudes if update is None else update[OUTCOME:][:size]
        assert first._second is not None  # this codec belongs to it
        symmetric, ranks = first.table.symmetric, first._second.ranks

        def averaged(law: Distribution) -> Distribution:
            return averaged_law(law, magnitudes, symmetric, ranks, first.norm, self.norm)

        return self.refit(collected, averaged)

    def apply_update(self, update: np.ndarray, step: int, part: str = "") -> bool:
        """See ``adapt.joint_update.Fitted.apply_update``."""
        complete, fitted, self._share = bool(update[0]), bool(update[1]), float(update[4])
        if fitted:
            count = self._table.magnitudes.size
            magnitudes, probabilities = np.split(update[OUTCOME:], [count])
            book = probabilities if self.has_book else None
            self.install(magnitudes, self._table.version + 1, book)
            logger.info(
                "step %d: level table %d%s, expected variance per coordinate %.3g -> %.3g, "
                "magnitudes %s",
                step,
                self._table.version,
                part and f" of {part}",
                update[2],
                update[3],
                " ".join(f"{m:.4g}" for m in self._table.magnitudes),
            )
        return complete

    def install(
        self, magnitudes: np.ndarray, version: int, probabilities: np.ndarray | None = None
    ) -> None:
        """Use a table of these magnitudes and symbol probabilities from now on."""
        bits, symmetric = self._table.bits, self._table.symmetric
        self._table = LevelTable(bits, symmetric, magnitudes, version, probabilities)

    def _fitted(self, law: Distribution, of_coordinates: Distribution) -> LevelTable:
        """Return a table fitted to ``law``, with probabilities if there is a code book."""
        bits, symmetric, magnitudes = (
            self._table.bits,
            self._table.symmetric,
            self.fit_magnitudes(law),
        )
        probabilities = None
        if self.has_book:
            probabilities = symbol_probabilities(magnitudes, of_coordinates, symmetric)
        return LevelTable(bits, symmetric, magnitudes, probabilities=probabilities)

    def put_off(self) -> None:
        """Record that an update failed: a fit to the next statistics is worthwhile in any case."""
        self._share = 0.0

    def _usable(self, buckets: Sequence[torch.Tensor]) -> Usable:
        """Return the usable buckets, clipped if the settings say so."""
        clipped = [self._clipped(bucket) for bucket in buckets]
        return Usable.among(clipped, weights_of(buckets), self.norm)

    def adopt(self, old: AdaptiveScheme, keep: bool) -> None:
        super().adopt(old, keep)
        table = old._table if self.can_take(old._table) else self._table
        self._table = dataclasses.replace(table, version=old.table_version)
        self._share = old._share
        self.schedule.load_state_dict(old.schedule.state_dict())
        if keep:
            self._second_schedule = old._second_schedule
        elif self.is_fitted:
            self.schedule.request(self.step)

    def can_take(self, table: LevelTable) -> bool:
        """Return whether a fit could return such a table."""
        own = self._table
        return (table.bits, table.symmetric) == (own.bits, own.symmetric)

    def state_dict(self) -> dict[str, Any]:
        own = {
            "table": self._table.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        if self._share:
            own["share"] = self._share
        if self._seconds(list(self.parts)):
            own |= {"second_schedule": self._second_schedule.state_dict()}
        return super().state_dict() | own

    def take_state(self, state: dict[str, Any]) -> None:
        self.check_state(state, ("table", "schedule"))
        table = LevelTable.from_state_dict(state["table"])
        for schedule in ("schedule", "second_schedule"):
            if schedule in state:
                UpdateSchedule.checked(state[schedule])
        if (table.bits, table.symmetric) != (self._table.bits, self._table.symmetric):
            raise ValueError(
                f"state: table of bits={table.bits}, symmetric={table.symmetric} does not fit "
                f"bits={self._table.bits}, symmetric={self._table.symmetric}"
            )
        share = share_in(state)
        super().take_state(state)
        self.schedule.load_state_dict(state["schedule"])
        self._table, self._share = table, share
        self._second_schedule = UpdateSchedule(())
        if "second_schedule" in state:
            self._second_schedule.load_state_dict(state["second_schedule"])
            for second in self._seconds(list(self.parts)).values():
                second._requested = True


class FixedLevels(AdaptiveScheme):
    """A scheme with fixed levels; only a code book is fitted, if ``coding`` has one."""

    @property
    def is_fitted(self) -> bool:
        return self.has_book

    def fit_magnitudes(self, distribution: Distribution) -> np.ndarray:
        return self._table.magnitudes

    def second_codec(self, bits: int) -> StagedCodec:
        coding, adaptation = self.settings.coding, self.adaptation
        return self.codec_of_averages(
            bits=bits,
            norm="linf",
            coding=coding,
            samples=adaptation.samples,
            statistics=adaptation.statistics,
            **self._for_averages(),
        )

    def fitted_to(self, flat: torch.Tensor) -> StagedCodec:
        return self

    def scheme_settings(self) -> dict[str, Any]:
        settings = super().scheme_settings()
        del settings["normalized"]
        if not self.is_fitted:
            del settings["samples"], settings["statistics"]
        return settings

    def can_take(self, table: LevelTable) -> bool:
        return np.array_equal(table.magnitudes, self._table.magnitudes)

    def take_state(self, state: dict[str, Any]) -> None:
        if "table" in states.mapping(state):
            table = LevelTable.from_state_dict(state["table"])
            if not self.can_take(table):
                raise ValueError(
                    f"state: levels {table.levels.tolist()} are not {self.levels.tolist()}"
                )
        super().take_state(state)


def _numbers(table: LevelTable, has_book: bool) -> list[np.ndarray]:
    """Return what is broadcast of a table.

    Probabilities that do not exist are zeros; the update then says that nothing was fitted.
    """
    if not has_book:
        return [table.magnitudes]
    none = np.zeros(2 * table.magnitudes.size - (0 if table.symmetric else 1))
    return [table.magnitudes, none if table.probabilities is None else table.probabilities]
