"""Define table codecs whose levels or code book are fitted to the gradients."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_adaptive import states
from hvd_adaptive.adapt.coverage import HEAD, Coverage, share_in
from hvd_adaptive.adapt.statistics import STATISTICS, Adaptation
from hvd_adaptive.base.checks import check_choice
from hvd_adaptive.codec.codec import Codec, FittedCodec, buckets_of
from hvd_adaptive.codec.second_stage import SecondStage
from hvd_adaptive.codec.table_codec import LevelTable, TableCodec
from hvd_adaptive.coding.coders import CODERS
from hvd_adaptive.levels import (
    Distribution,
    averaged_law,
    expected_variance,
    symbol_probabilities,
    uniform_magnitudes,
)
from hvd_adaptive.settings import Settings

logger = logging.getLogger("hvd_adaptive")

# Numbers of an update before the table.
OUTCOME = 5
NORMS = ("l2", "linf")


class AdaptiveCodec(FittedCodec, TableCodec):
    """A table codec that is fitted to gradients (ALQ paper, Algorithm 1), with the symbols'
    probabilities (Props 6, 8) if ``coding`` needs a code book.

    Args:
        fit_magnitudes: Function (law of r = abs(v)/norm, current table) that returns fitted
            magnitudes, float64, ascending to 1.
        own_settings: The scheme's other settings, which must be equal on all ranks.
        again: Function (*dropped, **changes) that returns a new codec with the same keywords,
            except for these (GradientCompressor._again).
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        norm: str,
        table: LevelTable,
        adaptation: Adaptation,
        fit_magnitudes: Callable[[Distribution, LevelTable], np.ndarray],
        own_settings: Mapping[str, Any],
        again: Any,
    ) -> None:
        super().__init__(name, settings, norm, table)
        self.adaptation = adaptation
        self.fit_requested = False  # whether the first fit of this second stage was requested
        self.fit_magnitudes, self._own_settings = fit_magnitudes, own_settings
        self._again = again
        self._statistic = STATISTICS[adaptation.statistics](adaptation.samples)

    @property
    def has_book(self) -> bool:
        """Return whether the coding uses the probabilities of symbols."""
        coding = self.settings.coding
        return coding in CODERS and CODERS[coding].fitted

    @property
    def fitted_second(self) -> AdaptiveCodec | None:
        second = None if self.second is None else self.second.codec
        if second is self or not isinstance(second, AdaptiveCodec) or not second.is_fitted:
            return None
        return second

    def scheme_settings(self) -> dict[str, Any]:
        names = ("normalized", "samples", "statistics")
        adaptation = {name: getattr(self.adaptation, name) for name in names}
        return super().scheme_settings() | adaptation | dict(self._own_settings)

    def fit(self, gradients: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """See ``level_scheme.LevelScheme.fit``."""
        buckets = buckets_of(gradients, self.settings, self.leaves_zeros_out)
        statistic = STATISTICS[self.adaptation.statistics](len(buckets))
        usable = self._usable_in(buckets)
        if self.is_fitted:
            collected = [statistic.collect(usable.buckets, usable.norms, usable.weights)]
            law = statistic.pool(collected, self.adaptation.normalized)
            fitted = self._fitted(law, statistic.of_coordinates(collected))
            self.install(fitted.magnitudes, self.table.version + 1, fitted.probabilities)

    def second_codec(self, bits: int) -> Codec:
        return self._again("clip", bits=bits)

    def fitted_to(self, flat: torch.Tensor) -> Codec:
        copy = self._again()
        copy.fit(flat)
        return copy

    def trained_second(self, bits: int, ranks: int, flat: torch.Tensor) -> Codec:
        buckets = buckets_of(flat, self.settings)
        copy: Any = self.fitted_to(flat)
        copy._statistic = STATISTICS[self.adaptation.statistics](len(buckets))
        second = copy.second_codec(bits)
        copy.second = SecondStage(ranks, bits, second)
        update = second.refit_second([copy.collect(buckets)], copy, None)
        second.install(update[OUTCOME:][: second.table.magnitudes.size], 1)
        return second

    def collect(self, buckets: Sequence[torch.Tensor]) -> np.ndarray:
        """Return statistics of sampled buckets, float64 [coverage.Usable's head, ...]."""
        usable = self._usable(buckets)
        statistics = self._statistic.collect(usable.buckets, usable.norms, usable.weights)
        return np.concatenate([usable.head, statistics])

    def joined(self, steps: Sequence[np.ndarray]) -> np.ndarray:
        """See ``FittedCodec``."""
        head = np.sum([own[:HEAD] for own in steps], axis=0)
        return np.concatenate([head, self._statistic.joined([own[HEAD:] for own in steps])])

    def refit(
        self,
        collected: Sequence[np.ndarray],
        seen: Callable[[Distribution], Distribution] = lambda law: law,
    ) -> np.ndarray:
        """Return the update that rank 0 broadcasts, computed from ``collect`` of all ranks: float64
        [complete, fitted, expected variance before, after, share of coordinates fitted to,
        magnitudes..., probabilities... if there is a code book].

        Hostile statistics keep the old table; no exception is raised in the middle of a step.
        ``seen`` converts the ranks' law of coordinates to the law that this codec quantises.
        """
        coverage, table = Coverage.of(collected), self.table
        outcome = [float(coverage.complete), *[0.0] * (OUTCOME - 1)]
        if coverage.found > 0:
            try:
                statistics = [part[HEAD:] for part in collected]
                law = seen(self._statistic.pool(statistics, self.adaptation.normalized))
                table = self._fitted(law, seen(self._statistic.of_coordinates(statistics)))
                variances = [
                    float(expected_variance(t.magnitudes, law, t.symmetric))
                    for t in (self.table, table)
                ]
                outcome[1:] = [1.0, *variances, coverage.share]
            except ValueError as error:
                table = self.table
                logger.info("the level table was kept: %s", error)
        numbers = [np.array(outcome), table.magnitudes]
        if self.has_book:  # probabilities that do not exist are zeros
            known = table.probabilities
            numbers.append(np.zeros(len(table.levels)) if known is None else known)
        return np.concatenate(numbers)

    def refit_second(
        self, collected: Sequence[np.ndarray], first: AdaptiveCodec, update: np.ndarray | None
    ) -> np.ndarray:
        """Return the update of a codec of averages of ``first``, which will apply ``update``, or
        None.
        """
        table, second, magnitudes = first.table, first.second, first.table.magnitudes
        if update is not None:
            magnitudes = update[OUTCOME:][: magnitudes.size]
        assert second is not None  # this codec belongs to it

        def averaged(law: Distribution) -> Distribution:
            own = magnitudes, table.symmetric, second.ranks, first.norm, self.norm
            return averaged_law(law, *own)

        return self.refit(collected, averaged)

    def apply_update(self, update: np.ndarray, step: int, part: str = "") -> bool:
        """See ``FittedCodec``."""
        complete, fitted, self._share = bool(update[0]), bool(update[1]), float(update[4])
        if fitted:
            count = self.table.magnitudes.size
            magnitudes, probabilities = np.split(update[OUTCOME:], [count])
            book = probabilities if self.has_book else None
            self.install(magnitudes, self.table.version + 1, book)
            logger.info(
                "step %d: level table %d%s, expected variance per coordinate %.3g -> %.3g, "
                "magnitudes %s",
                step,
                self.table.version,
                part and f" of {part}",
                update[2],
                update[3],
                " ".join(f"{m:.4g}" for m in self.table.magnitudes),
            )
        return complete

    def install(
        self, magnitudes: np.ndarray, version: int, probabilities: np.ndarray | None = None
    ) -> None:
        """Use a table of these magnitudes and symbol probabilities from now on."""
        bits, symmetric = self.table.bits, self.table.symmetric
        self.table = LevelTable(bits, symmetric, magnitudes, version, probabilities)

    def _fitted(self, law: Distribution, of_coordinates: Distribution) -> LevelTable:
        """Return a table fitted to ``law``, with probabilities if there is a code book."""
        bits, symmetric = self.table.bits, self.table.symmetric
        magnitudes = self.fit_magnitudes(law, self.table)
        probabilities = None
        if self.has_book:
            probabilities = symbol_probabilities(magnitudes, of_coordinates, symmetric)
        return LevelTable(bits, symmetric, magnitudes, probabilities=probabilities)

    def load_tables_from(self, old: AdaptiveCodec, keep: bool) -> None:
        super().load_tables_from(old, keep)
        # A table that is not fitted may depend on the bucket size, which may have changed.
        kept = (keep or old.table_version > 0) and self.can_take(old.table)
        table = old.table if kept else self.table
        self.table = dataclasses.replace(table, version=old.table_version)
        self._share, self.fit_requested = old._share, old.fit_requested

    def can_take(self, table: LevelTable) -> bool:
        """Return whether a fit could return such a table."""
        own = self.table
        return (table.bits, table.symmetric) == (own.bits, own.symmetric)

    def tables_state(self) -> dict[str, Any]:
        state = super().tables_state() | {"table": self.table.state_dict(), "norm": self.norm}
        if self._share:
            state["share"] = self._share
        if self.fit_requested and not self.table_version:
            state["requested"] = True
        return state

    def tables_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        own = {"table": self._table_of(state), "_share": share_in(state)}
        own["fit_requested"] = "requested" in state and states.flag(state, "requested")
        return super().tables_in(state) | own

    def _table_of(self, state: Mapping[str, Any]) -> LevelTable:
        table = LevelTable.from_state_dict(states.entry(state, "table"))
        # States before the entry existed do not name their norm.
        norm = check_choice("state: norm", state.get("norm", self.norm), NORMS)
        found, own = (
            {"bits": of.bits, "norm": of_norm, "symmetric": of.symmetric, "levels": len(of.levels)}
            for of, of_norm in ((table, norm), (self.table, self.norm))
        )
        differing = [name for name in own if found[name] != own[name]]
        if differing:
            told = " does not fit ".join(
                ", ".join(f"{name}={of[name]!r}" for name in differing) for of in (found, own)
            )
            # States without a norm are older than today's defaults.
            older = "" if "norm" in state else " (once the defaults: norm='l2', symmetric=True)"
            raise ValueError(
                f"state: table of {told}: the compressor needs the keywords with which the state "
                f"was saved{older}"
            )
        return table


class FixedCodec(AdaptiveCodec):
    """A table codec with fixed levels; only a code book is fitted, if ``coding`` has one."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        norm: str,
        table: LevelTable,
        adaptation: Adaptation,
        own_settings: Mapping[str, Any],
    ) -> None:
        fit = _same_magnitudes
        super().__init__(name, settings, norm, table, adaptation, fit, own_settings, again=None)
        self.is_fitted = self.has_book

    def second_codec(self, bits: int) -> Codec:
        coding, own = self.settings.coding, self.adaptation
        return uniform_codec(bits, self._for_averages(), coding, own.samples, own.statistics)

    def fitted_to(self, flat: torch.Tensor) -> Codec:
        return self

    def trained_second(self, bits: int, ranks: int, flat: torch.Tensor) -> Codec:
        return self.second_codec(bits)

    def scheme_settings(self) -> dict[str, Any]:
        settings = super().scheme_settings()
        unused = ("normalized",) if self.is_fitted else ("normalized", "samples", "statistics")
        return {name: value for name, value in settings.items() if name not in unused}

    def can_take(self, table: LevelTable) -> bool:
        return np.array_equal(table.magnitudes, self.table.magnitudes)

    def _table_of(self, state: Mapping[str, Any]) -> LevelTable:
        table = LevelTable.from_state_dict(states.entry(state, "table"))
        if not self.can_take(table):
            raise ValueError(
                f"state: levels {table.levels.tolist()} are not {self.levels.tolist()}"
            )
        return super()._table_of(state)


def _same_magnitudes(law: Distribution, table: LevelTable) -> np.ndarray:
    return table.magnitudes


def uniform_codec(
    bits: int,
    keywords: Mapping[str, Any],
    coding: str = "fixed",
    samples: int = 20,
    statistics: str = "histogram",
) -> FixedCodec:
    """Return QSGD's codec of ``bits`` bits with the norm "linf": that of the averages of many
    schemes. ``keywords`` are those of ``Settings``; the others are QSGD's.
    """
    table = LevelTable(bits, False, uniform_magnitudes(1 << (bits - 1), False))
    adaptation = Adaptation(False, None, samples, statistics)
    return FixedCodec("qsgd", Settings(coding=coding, **keywords), "linf", table, adaptation, {})


class PlainCodec(Codec):
    """Base of codecs whose averages are encoded by ``uniform_codec``."""

    coding_of_averages = "fixed"

    def second_codec(self, bits: int) -> Codec:
        return uniform_codec(bits, self._for_averages(), self.coding_of_averages)
