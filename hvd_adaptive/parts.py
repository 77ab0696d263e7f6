"""Parts: tensors that share bits and a level table, and the codec that each part has of its own."""

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
    """What parts need of a codec."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""

    def adopt(self, old: Any, keep: bool) -> None:
        """Go on where ``old``, of other keywords, stopped."""


_Part = TypeVar("_Part", bound=Part)


def passed_on(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a compressor that the codecs of its parts have, too."""
    return {name: value for name, value in keywords.items() if keyword_of(name).for_parts}


class Parts(Generic[_Part]):
    """The codecs of a compressor's parts but the default one, "", which is the compressor itself.

    Labels are "bits=4" and the like, all made at once, or, with ``scope="tensor"``, the tensors'
    names, made when first asked for. Each codec is a compressor of the same class and keywords,
    but for its bits, and has a table of its own.

    keywords: those of ``passed_on``. ValueError where its class cannot be made with other bits.
    """

    def __init__(
        self, scheme: type[_Part], keywords: Mapping[str, Any], settings: Settings
    ) -> None:
        self._scheme, self._keywords, self._settings = scheme, keywords, settings
        self._warned = False
        self._by_tensor = settings.scope == "tensor"
        patterns = settings.parameter_bits or {}
        # What a pattern changes: None for full precision, nothing where no pattern matches.
        self._changes: dict[str | None, dict[str, int] | None] = {None: {}} | {
            pattern: None if bits is None else {"bits": bits} for pattern, bits in patterns.items()
        }
        # Tensors' names are not known yet, but what cannot be made is told now, too.
        wanted = [c for c in self._changes.values() if c or (c == {} and self._by_tensor)]
        made = {_label(changes): self._make(changes) for changes in wanted}
        self.codecs: dict[str, _Part] = {} if self._by_tensor else made

    def __bool__(self) -> bool:
        """Whether there can be parts besides the default one."""
        return self._by_tensor or len(self._changes) > 1

    def __getitem__(self, label: str) -> _Part:
        """The codec of a part; ValueError where there can be no such part."""
        if label not in self.codecs:
            changes = self._changes[self._pattern(label)] if self._by_tensor else None
            if changes is None:
                known = ", ".join(map(repr, ["", *self.codecs]))
                raise ValueError(f"part {label!r}: must be one of {known}")
            self.codecs[label] = self._make(changes)
        return self.codecs[label]

    def label_of(self, name: str) -> str | None:
        """The part of a parameter; None where it travels in full precision."""
        changes = self._changes[self._pattern(name)]
        if changes is None:
            return None
        return name if self._by_tensor else _label(changes)

    def warn_of_idle_patterns(self, names: Iterable[str]) -> None:
        """Tell, once, which patterns decide on none of these parameters."""
        used = {self._pattern(name) for name in names}
        idle = [repr(p) for p in self._changes if p is not None and p not in used]
        if idle and not self._warned:
            logger.warning(
                "parameter_bits: %s: no parameter matches that no earlier pattern matches",
                ", ".join(idle),
            )
            self._warned = True

    def state_dict(self) -> dict[str, Any]:
        """The partition and its codecs' states; nothing where there is the default part alone."""
        if not self:
            return {}
        patterns = self._settings.parameter_bits
        return {
            "scope": self._settings.scope,
            "parameter_bits": None if patterns is None else dict(patterns),
            "parts": {label: codec.state_dict() for label, codec in self.codecs.items()},
        }

    def loaded(self, state: Mapping[str, Any]) -> Parts[_Part]:
        """New codecs with a compressor's state; ValueError where it is of another partition."""
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
        """Go on with another compressor's codecs, where there still are such parts."""
        self._warned = old._warned
        for label, codec in old.codecs.items():
            known = label in self.codecs
            if known or (self._by_tensor and old._by_tensor and self.label_of(label) is not None):
                self[label].adopt(codec, keep)

    def _pattern(self, name: str) -> str | None:
        """The first pattern that matches."""
        return next((p for p in self._changes if p is not None and fnmatchcase(name, p)), None)

    def _make(self, changes: Mapping[str, int]) -> _Part:
        try:
            return self._scheme(**{**self._keywords, **changes})
        except (TypeError, ValueError) as error:
            asked = "parameter_bits" if changes else "scope"
            raise ValueError(f"{asked}={getattr(self._settings, asked)!r}: {error}") from error


def _label(changes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in changes.items())
