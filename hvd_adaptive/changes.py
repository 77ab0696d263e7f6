"""Settings that change in the middle of training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_adaptive.instances import Instance
from hvd_adaptive.parts import passed_on
from hvd_adaptive.settings import UNCHANGEABLE, keyword_of

if TYPE_CHECKING:
    from hvd_adaptive.connection import Connection
    from hvd_adaptive.settings import Settings

logger = logging.getLogger("hvd_adaptive")


class Changing:
    """The part of a compressor that remembers its keywords, and becomes one of others.

    Keywords are checked in constructors alone: a change constructs another compressor, which
    ``adopt``s what this one has come to, and whose attributes become this one's. So optimizers keep
    holding the same object.
    """

    settings: Settings
    step: int
    fingerprint: Any
    schedule: Any
    instance: Instance
    _session: Connection | None
    _constructed: dict[str, Any]
    _changed: dict[str, Any]
    _keywords: dict[str, Any]
    _next: Any  # what this becomes when the step in progress has ended
    _asked_at: int

    def __new__(cls, *args: Any, **keywords: Any) -> Changing:
        """Keeps the keywords, from which the codecs of parts are made, too."""
        self = super().__new__(cls)
        self._constructed = dict(keywords)
        self._changed = {}
        self._keywords = passed_on(keywords)
        self._next = None
        self._asked_at = -1
        return self

    def set(self, **keywords: Any) -> None:
        """Change settings from the next step on; on every rank alike, before the same step.

        Any keyword of the constructor but named_parameters, process_set, schedule, table,
        update_steps, grad_scaler and monitor. Between two steps it holds at once, from ``backward``
        to the end of ``optimizer.step`` for the step that follows. Ranks that ask for different
        things, or at different steps, end in a RankMismatchError at their next step.

        The step, its random numbers, the schedule of updates and residuals (by parameters' names)
        go on as they were. So do level tables, where their number of levels stays; they are
        refitted at the next step, unless nothing changes that they are fitted to.

        Raises TypeError for unknown keywords and those above, ValueError for values that are not
        allowed; then nothing has changed.
        """
        self._ask(keywords)
        if self._session is None or self._session.is_idle:
            self._take_changes()

    def begin_step(self) -> bool:
        """Before a step's first gradient: take the settings that ``set`` and the schedule want from
        it on; whether any changed."""
        schedule = self.settings.schedule
        if schedule is not None and self._asked_at != self.step:
            self._asked_at = self.step
            told = schedule(self.step)
            if told is not None and not isinstance(told, Mapping):
                raise ValueError(
                    f"schedule: gave {told!r} for step {self.step}; must give a dict of keywords, "
                    "or None"
                )
            self._ask(told or {})
        return self._take_changes()

    def adopt(self, old: Any, keep: bool) -> None:
        """Go on where ``old``, of other keywords, stopped.

        keep: what tables are fitted to has not changed.
        """
        raise NotImplementedError

    def _ask(self, keywords: Mapping[str, Any]) -> None:
        """Note changes, once they are known to be possible."""
        known = self._next or self
        now = known._constructed | known._changed
        changed = {
            name: _plain(value)
            for name, value in keywords.items()
            if not keyword_of(name).changeable or name not in now or now[name] != value
        }
        if changed:
            self._next = self._remade(known._changed | changed)

    def _take_changes(self) -> bool:
        new, self._next = self._next, None
        if new is None:
            return False
        if new.fingerprint == self.fingerprint:
            self._changed = new._changed
            return False
        told = {n: v for n, v in new._changed.items() if self._changed.get(n, new) != v}
        new.adopt(self, not any(keyword_of(name).refits for name in told))
        logger.info("from step %d on: %s", self.step, ", ".join(f"{n}={told[n]!r}" for n in told))
        self._become(new)
        return True

    def _remade(self, changed: Mapping[str, Any]) -> Any:
        """A new compressor of the constructor's keywords, but for those."""
        for name in UNCHANGEABLE:
            if name in changed:
                raise TypeError(
                    f"set() cannot change {name!r}; it can change the constructor's other keywords"
                )
        given = dict(self._constructed)
        # What could be read only once has been read.
        if "named_parameters" in given:
            given["named_parameters"] = self.settings.named_parameters
        if "update_steps" in given:
            given["update_steps"] = self.schedule.planned
        if changed:
            given.pop("table", None)
        new: Any = type(self)(**given | dict(changed))
        new._constructed, new._changed = self._constructed, dict(changed)
        return new

    def _become(self, new: Any) -> None:
        session, asked_at = self._session, self._asked_at
        self.__dict__ = new.__dict__
        self._session, self._asked_at = session, asked_at
        if session is not None:
            session.rebind()

    # Copies are of settings and state; they serve no optimizer yet.

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Parameters, ranks and a user's functions are what they are.
        shared = [self.settings, *(self._constructed.get(name) for name in UNCHANGEABLE)]
        memo |= {id(one): one for one in shared}
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__getstate__(), memo)
        return new


def _plain(value: Any) -> Any:
    """Without NumPy's types: it goes into states."""
    if isinstance(value, Mapping):
        return {name: _plain(of_name) for name, of_name in value.items()}
    return value.item() if isinstance(value, np.generic) else value
