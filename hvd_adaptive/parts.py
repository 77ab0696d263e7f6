"""Define parts: parameters that share bits and a level table, with a codec of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Generic, Protocol, TypeVar

from hvd_adaptive import states
from hvd_adaptive.checks import check_parameter_bits
from hvd_adaptive.settings import Settings, keyword_of

logger = logging.getLogger("hvd_adaptive")


class Part(Protocol):
    """Interface of a part's codec."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""

    def adopt(self, old: Any, keep: bool) -> None:
        """Continue the state of ``old``, which has other keywords."""


_Part = TypeVar("_Part", bound=Part)


def passed_on(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a compressor that the codecs of its parts have, too."""
    return {name: value for name, value in keywords.items() if keyword_of(name).for_parts}


class Parts(Generic[_Part]):
    """Codecs of a compressor's parts, except for the default part "", which is the compressor.

    Labels are "bits=4" and similar; these codecs are made at once. With ``scope="tensor"`` labels
    are the tensors' names, and a codec is made when it is first needed. Each codec has a table of
    its own and the compressor's class and keywords, except for its bits.

    Args:
        scheme: The compressor's class.
        keywords: Its keywords, see ``passed_on``.
        settings: Its settings.

    Raises:
        ValueError: The class does not accept other bits.
    """

    def __init__(
        self, scheme: type[_Part], keywords: Mapping[str, Any], settings: Settings
    ) -> None:
        self._scheme, self._keywords, self._settings = scheme, keywords, settings
        self._warned = False
        self._by_tensor = settings.scope == "tensor"
        patterns = settings.parameter_bits or {}
        # Keywords that a pattern changes, None for full precision. The key None is for parameters
        # that no pattern matches.
        self._changes: dict[str | None, dict[str, int] | None] = {None: {}} | {
            pattern: None if bits is None else {"bits": bits} for pattern, bits in patterns.items()
        }
        # The names of tensors are not known yet, but bits that are not allowed fail now.
        wanted = [c for c in self._changes.values() if c or (c == {} and self._by_tensor)]
        made = {_label(changes): self._make(changes) for changes in wanted}
        self.codecs: dict[str, _Part] = {} if self._by_tensor else made

    def __bool__(self) -> bool:
        """Return whether there can be parts besides the default one."""
        return self._by_tensor or len(self._changes) > 1

    def __getitem__(self, label: str) -> _Part:
        """Return the codec of a part; raise ValueError if there is no such part."""
        if label not in self.codecs:
            changes = self._changes[self._pattern(label)] if self._by_tensor else None
            if changes is None:
                known = ", ".join(map(repr, ["", *self.codecs]))
                raise ValueError(f"part {label!r}: must be one of {known}")
            self.codecs[label] = self._make(changes)
        return self.codecs[label]

    def label_of(self, name: str) -> str | None:
        """Return the label of a parameter's part, or None for full precision."""
        changes = self._changes[self._pattern(name)]
        if changes is None:
            return None
        return name if self._by_tensor else _label(changes)

    def warn_of_idle_patterns(self, names: Iterable[str]) -> None:
        """Warn, once, of patterns that apply to none of these parameters."""
        used = {self._pattern(name) for name in names}
        idle = [repr(p) for p in self._changes if p is not None and p not in used]
        if idle and not self._warned:
            logger.warning(
                "parameter_bits: %s: no parameter matches that no earlier pattern matches",
                ", ".join(idle),
            )
            self._warned = True

    def state_dict(self) -> dict[str, Any]:
        """Return the partition and its codecs' states, or {} if there is only the default part."""
        if not self:
            return {}
        patterns = self._settings.parameter_bits
        return {
            "scope": self._settings.scope,
            "parameter_bits": None if patterns is None else dict(patterns),
            "parts": {label: codec.state_dict() for label, codec in self.codecs.items()},
        }

    def loaded(self, state: Mapping[str, Any]) -> Parts[_Part]:
        """Return new codecs with a compressor's state; ValueError if it has another partition."""
        own, kept = self._settings, state.get("parameter_bits")
        given = state.get("scope", "network"), check_parameter_bits("parameter_bits", kept)
        if repr(given) != repr((own.scope, own.parameter_bits)):  # the patterns' order counts
            raise ValueError(
                f"state: is of scope={given[0]!r} and parameter_bits={given[1]!r}, "
                f"not of {own.scope!r} and {own.parameter_bits!r}"
            )
        if self and "parts" not in state:
            raise ValueError("state: has no entry 'parts'")
        parts = Parts(self._scheme, self._keywords, own)
        parts._warned = self._warned
        saved = states.mapping(state.get("parts", {}), "state: parts")
        for label in parts.codecs:
            states.entry(saved, label, "state: parts")
        for label, of_codec in saved.items():
            parts[label].load_state_dict(of_codec)
        return parts

    def adopt(self, old: Parts[_Part], keep: bool) -> None:
        """Continue another compressor's codecs of the parts that still exist."""
        self._warned = old._warned
        for label, codec in old.codecs.items():
            known = label in self.codecs
            if known or (self._by_tensor and old._by_tensor and self.label_of(label) is not None):
                self[label].adopt(codec, keep)

    def _pattern(self, name: str) -> str | None:
        """Return the first pattern that matches, or None."""
        return next((p for p in self._changes if p is not None and fnmatchcase(name, p)), None)

    def _make(self, changes: Mapping[str, int]) -> _Part:
        try:
            return self._scheme(**{**self._keywords, **changes})
        except (TypeError, ValueError) as error:
            keyword = "parameter_bits" if changes else "scope"
            value = getattr(self._settings, keyword)
            raise ValueError(f"{keyword}={value!r}: {error}") from error


def _label(changes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in changes.items())
