"""Define JointUpdate, which fits several codecs' tables in one exchange of statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

logger = logging.getLogger("hvd_adaptive")

# The update that changes nothing, because a retry would see nothing new.
NOTHING_NEW = np.zeros(1)


class Fitted(Protocol):
    """Interface of a codec whose table is fitted (schemes/adaptive.py)."""

    @property
    def adaptation(self) -> Any:
        """Return the parameters of statistics; ``samples`` is the number of buckets per rank."""

    def collect(self, buckets: Sequence[torch.Tensor]) -> np.ndarray:
        """Return statistics of sampled buckets."""

    def has_more(self, collected: Sequence[np.ndarray]) -> bool:
        """Return whether statistics contain notably more than those of the last fit."""

    def refit(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        """Return the update computed from all ranks' statistics."""

    def refit_second(
        self, collected: Sequence[np.ndarray], first: Any, update: np.ndarray | None
    ) -> np.ndarray:
        """Return the update of a codec of the averages of ``first``."""

    def put_off(self) -> None:
        """Record that an update failed, so that the next statistics are fitted in any case."""

    def apply_update(self, update: np.ndarray, step: int, part: str = "") -> bool:
        """Apply the broadcast update, which is the same on every rank.

        Args:
            update: See ``refit``.
            step: Number of the step.
            part: Name of this codec in the log.

        Returns:
            Whether the update is complete, so that it need not be repeated soon.
        """


class JointUpdate:
    """One update of several parts' tables, whose statistics and tables are sent concatenated.

    Args:
        codecs: Codecs by label, in the same order on every rank.
        seconds: Codecs of averages by label, fitted to the same statistics.
        alone: Fit only ``seconds``.
        finite: Whether this rank's gradients are finite. If those of any rank are not, AMP skips
            the step on all ranks, and nothing is fitted.
        warn: Logs why tables are kept.
        again: The update retries an incomplete one. It fits only if there are notably more
            statistics than then; otherwise layers that never get a gradient would cause fits
            without end.
    """

    def __init__(
        self,
        codecs: Mapping[str, Fitted],
        seconds: Mapping[str, Fitted] | None = None,
        alone: bool = False,
        finite: bool = True,
        warn: Callable[..., None] = logger.warning,
        again: bool = False,
    ) -> None:
        self.codecs, self._finite, self._warn, self._again = codecs, finite, warn, again
        self._seconds = seconds or {}
        self._firsts = {} if alone else codecs
        self._ends: list[int] = []

    def collect(self, samples: Callable[[int, str], Sequence[torch.Tensor]]) -> np.ndarray:
        """Return this rank's statistics; ``samples(count, label)`` draws a part's buckets."""
        vectors = [np.array([float(self._finite)])] + [
            codec.collect(samples(codec.adaptation.samples, label))
            for label, codec in self.codecs.items()
        ]
        self._ends = np.cumsum([vector.size for vector in vectors]).tolist()
        return np.concatenate(vectors)

    def refit(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        """Return the update that the first rank broadcasts.

        Returns:
            The length of each part's update, then the updates. It is empty if gradients are not
            finite, and NOTHING_NEW if a retry is not worthwhile.
        """
        finite, *of_parts = zip(*(np.split(row, self._ends[:-1]) for row in collected), strict=True)
        if not np.all(finite):
            self._warn("level tables are kept, and fitted later: a rank's gradients are not finite")
            return np.empty(0)
        statistics = dict(zip(self.codecs, of_parts, strict=True))
        fitted = [*self._firsts.items(), *self._seconds.items()]
        if self._again and not any(codec.has_more(statistics[label]) for label, codec in fitted):
            return NOTHING_NEW
        updates = {label: codec.refit(statistics[label]) for label, codec in self._firsts.items()}
        seconds = [
            second.refit_second(statistics[label], self.codecs[label], updates.get(label))
            for label, second in self._seconds.items()
        ]
        all_updates = [*updates.values(), *seconds]
        if not all(update[1] for update in all_updates):
            self._warn(
                "some level tables are kept, and fitted later: all their sampled gradients are "
                "zero, or levels cannot be fitted to them"
            )
        return np.concatenate([[update.size for update in all_updates], *all_updates])

    def install(self, update: np.ndarray, step: int) -> bool:
        """Apply the broadcast update; return whether no part needs another one soon."""
        if not update.size:
            for codec in [*self._firsts.values(), *self._seconds.values()]:
                codec.put_off()
            return False
        if np.array_equal(update, NOTHING_NEW):
            return False
        seconds = {f"{label} second stage".strip(): c for label, c in self._seconds.items()}
        fitted = [*self._firsts.items(), *seconds.items()]
        count = len(fitted)
        ends = np.cumsum(update[:count]).astype(int)
        own = np.split(update[count:], ends[:-1])
        complete = [
            codec.apply_update(part, step, name)
            for (name, codec), part in zip(fitted, own, strict=True)
        ]
        return all(complete)
