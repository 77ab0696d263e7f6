"""JointUpdate: one fit of several codecs' tables, from one exchange of statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

logger = logging.getLogger("hvd_adaptive")

# An update that changes nothing.
NOT_AGAIN = np.zeros(1)


class Fitted(Protocol):
    """What an update needs of a codec whose table is fitted (schemes/adaptive.py)."""

    @property
    def adaptation(self) -> Any:
        """How statistics are gathered; ``samples`` buckets of each rank."""

    def collect(self, buckets: Sequence[torch.Tensor]) -> np.ndarray:
        """Return statistics of sampled buckets."""

    def has_more(self, collected: Sequence[np.ndarray]) -> bool:
        """Return whether statistics hold notably more than those of the last fit."""

    def refit(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        """Return the update that follows from all ranks' statistics."""

    def refit_second(
        self, collected: Sequence[np.ndarray], first: Any, update: np.ndarray | None
    ) -> np.ndarray:
        """Return the update of a codec of the averages of ``first``."""

    def put_off(self) -> None:
        """Make the next statistics worth a fit: an update could not be made."""

    def apply_update(self, update: np.ndarray, step: int, part: str = "") -> bool:
        """Take an update; return whether it need not be repeated soon."""


class JointUpdate:
    """One update of several parts' tables: their statistics and tables travel end to end.

    codecs: by label, in the same order on every rank.
    seconds: by label of these, the codecs of averages, which are fitted to the same statistics.
    alone: the seconds are, and the codecs are left as they are.
    finite: whether this rank's gradients are. Where a rank's are not, AMP skips the step on all,
        and nothing is fitted to it.
    warn: told why tables are kept.
    again: the last update was incomplete, and this one is worth a fit only if there is more to see
        than then: layers that never get a gradient would be fitted for again and again.
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
        """This rank's statistics; ``samples(count, label)`` draws a part's buckets."""
        vectors = [np.array([float(self._finite)])] + [
            codec.collect(samples(codec.adaptation.samples, label))
            for label, codec in self.codecs.items()
        ]
        self._ends = np.cumsum([vector.size for vector in vectors]).tolist()
        return np.concatenate(vectors)

    def refit(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        """The update that the first rank broadcasts: each part's length, then each part's own;
        nothing where the step is not to be fitted to, NOT_AGAIN where it is not worth while."""
        finite, *of_parts = zip(*(np.split(row, self._ends[:-1]) for row in collected), strict=True)
        if not np.all(finite):
            self._warn("level tables are kept, and fitted later: a rank's gradients are not finite")
            return np.empty(0)
        statistics = dict(zip(self.codecs, of_parts, strict=True))
        fitted = [*self._firsts.items(), *self._seconds.items()]
        if self._again and not any(codec.has_more(statistics[label]) for label, codec in fitted):
            return NOT_AGAIN
        updates = {label: codec.refit(statistics[label]) for label, codec in self._firsts.items()}
        seconds = [
            second.refit_second(statistics[label], self.codecs[label], updates.get(label))
            for label, second in self._seconds.items()
        ]
        all_updates = [*updates.values(), *seconds]
        if not all(update[1] for update in all_updates):
            self._warn(
                "some level tables are kept, and fitted later: no sampled gradient of theirs is "
                "different from zero, or none that levels can be fitted to"
            )
        return np.concatenate([[update.size for update in all_updates], *all_updates])

    def install(self, update: np.ndarray, step: int) -> bool:
        """Take the broadcast update; whether none of the parts needs another soon."""
        if not update.size:
            for codec in [*self._firsts.values(), *self._seconds.values()]:
                codec.put_off()
            return False
        if np.array_equal(update, NOT_AGAIN):
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
