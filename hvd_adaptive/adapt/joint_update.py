"""Define JointUpdate, which fits several codecs' tables in one exchange of statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_adaptive.adapt.coverage import Coverage

# The update that changes nothing, because a retry would see nothing new.
NOTHING_NEW = np.zeros(1)


@dataclass
class JointUpdate:
    """One update of several parts' tables, whose statistics and tables are sent concatenated.

    Buckets with NaN or Inf do not count; tables are fitted to the others. If AMP skips the step, no
    table is the worse for it: r = abs(v)/norm does not depend on the loss scale, and a fit that
    lacks notable parts of the gradient is incomplete, so it is repeated at the next step.
    """

    codecs: Mapping[str, Any]  # codec.codec.FittedCodec by label, in the same order on every rank
    seconds: Mapping[str, Any]  # codecs of averages by label, fitted to the same statistics
    alone: bool  # fit only ``seconds``
    earlier: Callable[[str], Mapping[int, np.ndarray]]  # a label's statistics of earlier steps
    warn_kept: Callable[..., None]
    warn_lost: Callable[..., None]
    # Fit only if there are notably more statistics than at the incomplete update that this one
    # retries: layers that never get a gradient would cause fits without end.
    again: bool

    def __post_init__(self) -> None:
        self._firsts = {} if self.alone else self.codecs
        self._ends: list[int] = []

    def joined(self, own: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the statistics to send: those of this step by label, and of earlier steps."""
        vectors = [
            self.codecs[label].joined([*self.earlier(label).values(), vector])
            for label, vector in own.items()
        ]
        self._ends = np.cumsum([vector.size for vector in vectors]).tolist()
        return np.concatenate(vectors)

    def refit(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        """Return the update that the first rank broadcasts: the length of each part's update, then
        the updates; or NOTHING_NEW if a retry is not worthwhile.
        """
        of_parts = zip(*(np.split(row, self._ends[:-1]) for row in collected), strict=True)
        statistics = dict(zip(self.codecs, of_parts, strict=True))
        fitted = [*self._firsts.items(), *self.seconds.items()]
        if self.again and not any(codec.has_more(statistics[label]) for label, codec in fitted):
            return NOTHING_NEW
        updates = {label: codec.refit(statistics[label]) for label, codec in self._firsts.items()}
        seconds = [
            second.refit_second(statistics[label], self.codecs[label], updates.get(label))
            for label, second in self.seconds.items()
        ]
        all_updates = [*updates.values(), *seconds]
        kept = [label for (label, _), new in zip(fitted, all_updates, strict=True) if not new[1]]
        self._report({label: Coverage.of(statistics[label]) for label in statistics}, kept)
        return np.concatenate([[update.size for update in all_updates], *all_updates])

    def _report(self, coverages: Mapping[str, Coverage], kept: Collection[str]) -> None:
        """Warn of tables that are kept although something is quantised, and of lost buckets."""
        reasons = {_why_kept(coverages[label]) for label in kept if coverages[label].sampled}
        if reasons:
            self.warn_kept(
                "some level tables are kept, and fitted later: %s", "; ".join(sorted(reasons))
            )
        lost = sum(coverage.lost for coverage in coverages.values())
        if lost and not reasons:
            sampled = sum(coverage.sampled for coverage in coverages.values())
            self.warn_lost(
                "level tables are fitted without %d of %d sampled buckets, which contain NaN or "
                "Inf: one such coordinate makes its whole bucket NaN in the average",
                lost,
                sampled,
            )

    def install(self, update: np.ndarray, step: int) -> bool:
        """Apply the broadcast update; return whether no part needs another one soon."""
        if np.array_equal(update, NOTHING_NEW):
            return False
        seconds = {f"{label} second stage".strip(): c for label, c in self.seconds.items()}
        fitted = [*self._firsts.items(), *seconds.items()]
        count = len(fitted)
        ends = np.cumsum(update[:count]).astype(int)
        own = np.split(update[count:], ends[:-1])
        complete = [
            codec.apply_update(part, step, name)
            for (name, codec), part in zip(fitted, own, strict=True)
        ]
        return all(complete)


def _why_kept(coverage: Coverage) -> str:
    """Return why nothing could be fitted to samples."""
    if coverage.found:
        return "levels cannot be fitted to their samples"
    if coverage.lost == coverage.sampled:
        return "no sampled gradient is finite"
    return "all their sampled gradients are zero" + (" or not finite" if coverage.lost else "")
