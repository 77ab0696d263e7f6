"""Define Updates: when tables of a compressor's codecs are refitted, on all ranks together."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_adaptive import states
from hvd_adaptive.adapt.joint_update import JointUpdate
from hvd_adaptive.adapt.schedule import WINDOW, UpdateSchedule
from hvd_adaptive.base.errors import WarnOnce

logger = logging.getLogger("hvd_adaptive")


OF = "state: window"
# Bytes of earlier steps above which a rank keeps fewer of them, but at least one.
MOST_BYTES = 1 << 26


class SampleWindow:
    """Statistics of the last ``WINDOW`` steps, by rank and part.

    A rank has its own alone; a simulation has those of all ranks. A step of a part takes 40 kB with
    ALQ, whatever the sizes of buckets. There is nothing unless a fit follows soon.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], dict[int, np.ndarray]] = {}

    def add(self, worker: int, step: int, own: Mapping[str, np.ndarray]) -> None:
        """Keep the statistics of ``step`` by label. They replace those of an earlier attempt at the
        step, and of any later step: a restored state goes back.
        """
        most = max(1, MOST_BYTES // sum(vector.nbytes for vector in own.values()))
        for label, vector in own.items():
            last = dict([*self.before(worker, step, label).items()][-most:])
            self._kept[worker, label] = last | {step: vector}

    def before(self, worker: int, step: int, label: str) -> dict[int, np.ndarray]:
        """Return the statistics of the steps before ``step`` that count for a fit at it."""
        kept = self._kept.get((worker, label), {})
        return {s: vector for s, vector in kept.items() if step - WINDOW < s < step}

    def state_dict(self) -> dict[str, Any]:
        """Return {"window": ...} as plain tensors; {} if there is nothing."""
        if not self._kept:
            return {}
        of_workers: dict[str, dict[str, Any]] = {}
        for (worker, label), kept in self._kept.items():
            of_workers.setdefault(str(worker), {})[label] = {
                "steps": torch.tensor([*kept], dtype=torch.int64, device="cpu"),
                "statistics": torch.from_numpy(np.concatenate([*kept.values()])),
            }
        return {"window": of_workers}

    @classmethod
    def loaded(cls, state: Mapping[str, Any], length: int) -> SampleWindow:
        """Return the window of a ``state_dict`` of vectors of this length, or raise ValueError."""
        window = cls()
        for worker, parts in states.mapping(state.get("window", {}), OF).items():
            for label, saved in states.mapping(parts, OF).items():
                if not (str(worker).isdecimal() and isinstance(label, str)):
                    raise ValueError(f"{OF}: has no rank {worker!r} with a part {label!r}")
                window._kept[int(worker), label] = _vectors(saved, length)
        return window


def _vectors(saved: Any, length: int) -> dict[int, np.ndarray]:
    """Return vectors by step; raise ValueError if there are none such."""
    steps = states.numbers(saved, "steps", OF)
    whole = np.isfinite(steps) & (steps >= 0) & (steps == np.round(steps))
    if not (whole.all() and (np.diff(steps) > 0).all() and steps.size <= WINDOW):
        raise ValueError(
            f"{OF}: steps must be up to {WINDOW} ascending integers >= 0, not {steps.tolist()}"
        )
    flat = states.numbers(saved, "statistics", OF)
    if flat.size != steps.size * length or not np.isfinite(flat).all():
        raise ValueError(f"{OF}: statistics must be {steps.size} x {length} finite numbers")
    vectors = flat.copy().reshape(-1, length)
    return {int(step): vector for step, vector in zip(steps, vectors, strict=True)}


class Due(NamedTuple):
    """What is due at a step."""

    first: bool  # the tables of gradients, not only those of averages, are refitted
    second: bool  # new second stages are fitted, whatever the schedule says
    samples: bool  # ``Updates.run`` must be called: for a fit at the step, or for one soon after


NOTHING = Due(False, False, False)


class Updates:
    """Updates of the tables of a scheme's codecs (``codec.codec.FittedCodec``), by label; a scheme
    that is never fitted has none.
    """

    def __init__(self, codecs: Mapping[str, Any]) -> None:
        self._codecs = codecs
        adaptation = codecs[""].adaptation
        self._has_state = adaptation is not None
        self.schedule = UpdateSchedule(() if adaptation is None else adaptation.update_steps)
        # New second stages are fitted regardless of the schedule.
        self._second_schedule = UpdateSchedule(())
        self._quiet = range(0)  # steps at which nothing is planned
        self._window = SampleWindow()
        self._warn_kept, self._warn_lost = WarnOnce(logger), WarnOnce(logger)

    def at(self, step: int) -> Due:
        """Return what is due at ``step``. Wrong ``update_steps`` raise here."""
        if not self._codecs[""].is_fitted:
            return NOTHING
        requested = self.schedule.retry_at, self._second_schedule.retry_at
        if step in self._quiet and requested == (None, None):
            return NOTHING
        precedes, first = self.schedule.precedes_fit(step), self.schedule.is_due(step)
        second = self._second_schedule.retry_at == step  # nothing is planned
        self._quiet = self.schedule.quiet_from(step)
        return Due(first, second, precedes or first or second)

    def due(self, step: int) -> bool:
        """Return whether tables are refitted at ``step``."""
        due = self.at(step)
        return due.first or due.second

    def prepare_second_stages(
        self, averages_of: Sequence[int], labels: Sequence[str], step: int
    ) -> None:
        """Make the second stages of parts before ``step``, at which new tables are fitted. For
        ``averages_of`` see Exchange; if it is empty, there are none.
        """
        if not averages_of:
            return
        for ranks, label in itertools.product(averages_of, labels):
            self._codecs[label].second_stage(ranks)
        for second in self._seconds(labels).values():
            if second.table_version == 0 and not second.fit_requested:
                second.fit_requested = True
                self._second_schedule.request(step)

    def run(
        self,
        step: int,
        samples: Callable[[int, str], list[torch.Tensor]],
        sync: Callable,
        parts: Sequence[str] = ("",),
        worker: int = 0,
    ) -> None:
        """Sample the gradients of ``parts``, and refit their tables if that is due, on all ranks.

        Args:
            samples: Function (count, part) that draws buckets of this rank's gradients.
            sync: Function (vector, fit) that calls ``fit`` with the vectors of all ranks on the
                first rank, and returns its result on every rank.
            worker: The rank, if this process simulates several.
        """
        codecs = {label: self._codecs[label] for label in parts}
        own = {
            label: codec.collect(samples(codec.adaptation.samples, label))
            for label, codec in codecs.items()
        }
        self._window.add(worker, step, own)
        due = self.at(step)
        if due.first or due.second:
            self._fit(step, codecs, own, sync, worker, alone=not due.first)
        if not self.schedule.precedes_fit(step):
            self._window = SampleWindow()

    def _fit(
        self,
        step: int,
        codecs: Mapping[str, Any],
        own: Mapping[str, np.ndarray],
        sync: Callable,
        worker: int,
        alone: bool,
    ) -> None:
        """Refit tables, or those of averages ``alone``, to statistics of this and earlier steps."""
        seconds = self._seconds(list(codecs))
        schedule = self._second_schedule if alone else self.schedule
        joint = JointUpdate(
            codecs,
            seconds,
            alone,
            earlier=functools.partial(self._window.before, worker, step),
            warn_kept=self._warn_kept,
            warn_lost=self._warn_lost,
            again=schedule.retries(step),
        )
        update = sync(joint.joined(own), joint.refit)
        complete = joint.install(update, step)
        if seconds:
            self._second_schedule.done(step, complete)
        if not alone:
            self.schedule.done(step, complete)

    def load_from(self, old: Updates, keep: bool, step: int) -> None:
        """Continue the schedule of ``old``, whose compressor had other settings. If not ``keep``,
        because something that tables are fitted to has changed, they are fitted at ``step``, the
        next one.
        """
        self.schedule.go_on(old.schedule)
        if keep:
            self._second_schedule = old._second_schedule
        elif self._codecs[""].is_fitted:
            self.schedule.request(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the pending updates; {} if the scheme is never fitted."""
        if not self._has_state:
            return {}
        state = {"schedule": self.schedule.state_dict()} | self._window.state_dict()
        if self._seconds(list(self._codecs)):
            state["second_schedule"] = self._second_schedule.state_dict()
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``load_state`` can load ``state``."""
        if not self._has_state:
            return
        UpdateSchedule.checked(states.entry(state, "schedule"))
        if "second_schedule" in state:
            UpdateSchedule.checked(state["second_schedule"])
        self._loaded_window(state)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, after ``check_state`` and the codecs' tables."""
        if not self._has_state:
            return
        self.schedule.load_state_dict(state["schedule"])
        self._window = self._loaded_window(state)
        self._second_schedule = UpdateSchedule(())
        if "second_schedule" in state:
            self._second_schedule.load_state_dict(state["second_schedule"])

    def _loaded_window(self, state: Mapping[str, Any]) -> SampleWindow:
        """Return the window of a state; vectors of all parts have the same length."""
        return SampleWindow.loaded(state, self._codecs[""].collect([]).size)

    def _seconds(self, labels: Sequence[str]) -> dict[str, Any]:
        """Return the second stages of parts, if they are fitted."""
        seconds = {label: self._codecs[label].fitted_second for label in labels}
        return {label: second for label, second in seconds.items() if second is not None}
