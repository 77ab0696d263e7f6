"""Change settings during training."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.keywords import check_keywords_only
from hvd_adaptive.settings import UNCHANGEABLE, Settings, keyword_of
from hvd_adaptive.training import Training

logger = logging.getLogger("hvd_adaptive")


class Changing:
    """Base of compressors that remembers their keywords and changes them.

    Only constructors check keywords, so a change constructs another compressor. Before the next
    step this compressor's constructor is called with the same keywords, and ``_load_from`` restores
    its state.
    """

    settings: Settings
    step: int
    _codec: Codec
    _training: Training
    _constructed: dict[str, Any]
    _changed: dict[str, Any]
    _keywords: dict[str, Any]
    _next: Any  # a compressor with the settings of the next step
    _scheduled_at: int  # the step for which the schedule was last called

    def __new__(cls, *args: Any, **keywords: Any) -> Changing:
        """Store the keywords, from which the codecs of parts are made, too."""
        check_keywords_only(cls, args)
        self = super().__new__(cls)
        self._constructed, self._changed = dict(keywords), {}
        self._keywords = dict(keywords)
        self._next, self._scheduled_at = None, -1
        return self

    def set(self, **keywords: Any) -> None:
        """Change settings from the next step on.

        Call it on every rank with the same keywords, before the same step; otherwise the next step
        raises RankMismatchError. Between two steps the change applies at once. Between ``backward``
        and the end of ``optimizer.step`` it applies to the following step. Averages in the
        background (``average``, ``LocalSGD``) are waited for, and have the old settings.

        The step, its random numbers, the schedule of updates and residuals (by parameters' names)
        are kept. Level tables are kept if their number of levels stays, and are refitted at the
        next step if the keyword changes what they are fitted to.

        Args:
            **keywords: Keywords of the constructor, except for named_parameters, process_set,
                schedule, table, update_steps, grad_scaler and monitor.

        Raises:
            TypeError: A keyword is unknown or cannot be changed. Nothing has changed.
            ValueError: A value is not allowed. Nothing has changed.
        """
        self._training.wait()
        self._request(keywords)
        self._settle()

    def _load_from(self, old: Any, keep: bool) -> None:
        """Continue ``old``, which has other keywords; ``keep`` fitted tables if these still fit."""
        raise NotImplementedError

    def _request(self, keywords: Mapping[str, Any]) -> None:
        """Check changes, and keep them for ``_apply_changes``."""
        scheme: Any = type(self)
        known = self._next or self
        now = _defaults(scheme) | vars(known.settings) | known._constructed | known._changed
        changed = {
            name: _plain(value)
            for name, value in keywords.items()
            if not keyword_of(name).changeable or name not in now or now[name] != value
        }
        if changed:
            self._next = self._with(known._changed | changed)

    def _settle(self) -> None:
        """Wait for averages in the background; adopt ``_next`` if no step is in progress."""
        self._training.wait()
        connection = self._training.connection
        if self._next is not None and (connection is None or connection.is_idle):
            self._apply_changes()

    def _apply_changes(self) -> bool:
        """Adopt ``_next``, which is not None; return whether a setting changed that ranks share."""
        new, self._next = self._next, None
        changed = {n: v for n, v in new._changed.items() if self._changed.get(n, new) != v}
        if new._codec.settings_fingerprint == self._codec.settings_fingerprint:
            self._changed, self.settings = new._changed, new.settings  # settings of this rank alone
            return False
        old = copy.copy(self)
        self._construct(new._changed)
        self._load_from(old, not any(keyword_of(name).refits for name in changed))
        listed = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        logger.info("from step %d on: %s", self.step, listed)
        self._rebind()
        return True

    def _with(self, changed: Mapping[str, Any]) -> Any:
        """Return a new compressor with the constructor's keywords and these changes."""
        for name in UNCHANGEABLE:
            if name in changed:
                raise TypeError(
                    f"set() cannot change {name!r}; it can change the constructor's other keywords"
                )
        new: Any = type(self)(**self._given(changed))
        new._constructed, new._changed = self._constructed, dict(changed)
        return new

    def _construct(self, changed: Mapping[str, Any]) -> None:
        """Call the constructor again, with these changes, which ``_with`` has accepted."""
        constructor: Any = type(self).__init__
        given = self._given(changed)
        self._changed, self._keywords = dict(changed), given
        old = self._training
        constructor(self, **given)
        self._training.serve_as(old)

    def _given(self, changed: Mapping[str, Any]) -> dict[str, Any]:
        given = keywords_of(self)
        if changed:
            given.pop("table", None)
        return given | dict(changed)

    def _rebind(self) -> None:
        if self._training.connection is not None:
            self._training.connection.rebind()

    # A copy has settings and state, but serves no optimizer.

    def __getstate__(self) -> dict[str, Any]:
        self._training.wait()
        return self.__dict__ | {"_training": copy.copy(self._training)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Parameters, process sets and a user's functions are shared, not copied.
        shared = [self.settings, *(self._constructed.get(name) for name in UNCHANGEABLE)]
        shared.append(self._training._scaler)
        memo |= {id(one): one for one in shared}
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__getstate__(), memo)
        return new


@functools.cache
def _defaults(scheme: type) -> dict[str, Any]:
    """Return the defaults of a scheme's own keywords."""
    return {name: p.default for name, p in inspect.signature(scheme).parameters.items()}


def keywords_of(compressor: Any) -> dict[str, Any]:
    """Return the constructor's keywords; some may have been iterators, which have been read."""
    given = dict(compressor._constructed)
    if "named_parameters" in given:
        given["named_parameters"] = compressor.settings.named_parameters
    if "update_steps" in given:
        given["update_steps"] = compressor._training.updates.schedule.planned
    return given


def _plain(value: Any) -> Any:
    """Return ``value`` without NumPy's types, for states."""
    if isinstance(value, Mapping):
        return {name: _plain(of_name) for name, of_name in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def begin_step(compressor: Changing) -> bool:
    """Apply ``set`` and the schedule before a step begins; return whether a setting changed."""
    schedule, step = compressor.settings.schedule, compressor.step
    if schedule is not None and compressor._scheduled_at != step:
        compressor._scheduled_at = step
        keywords = schedule(step)
        if keywords is not None and not isinstance(keywords, Mapping):
            raise ValueError(
                f"schedule: returned {keywords!r} for step {step}; must return a dict of "
                "keywords, or None"
            )
        compressor._request(keywords or {})
    return compressor._next is not None and compressor._apply_changes()
