"""Parts: tensors that share bits and a level table, and the codec that each part has of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvd_adaptive import states
from hvd_adaptive.settings import Settings, check_parameter_bits

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.schemes.adaptive import AdaptiveScheme

logger = logging.getLogger("hvd_adaptive")

# An update that changes nothing.
NOT_AGAIN = np.zeros(1)

# They tell of parts, or of training, which the compressor sees to for all its parts; some of them
# can be read only once.
NOT_PASSED_ON = (
    "scope",
    "parameter_bits",
    "named_parameters",
    "process_set",
    "update_steps",
    "schedule",
    "grad_scaler",
    "monitor",
)


def passed_on(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a compressor that the codecs of its parts have, too."""
    return {name: value for name, value in keywords.items() if name not in NOT_PASSED_ON}


class Parts:
    """The codecs of a compressor's parts but the default one, "", which is the compressor itself.

    Labels are "bits=4" and the like, all made at once, or, with ``scope="tensor"``, the tensors'
    names, made when first asked for. Each codec is a compressor of the same class and keywords,
    but for its bits, and has a table of its own.

    keywords: those of ``passed_on``. ValueError where its class cannot be made with other bits.
    """

    def __init__(self, scheme: type, keywords: Mapping[str, Any], settings: Settings) -> None:
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
        self.codecs: dict[str, GradientCompressor] = {} if self._by_tensor else made

    def __bool__(self) -> bool:
        """Whether there can be parts besides the default one."""
        return self._by_tensor or len(self._changes) > 1

    def __getitem__(self, label: str) -> GradientCompressor:
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

    def loaded(self, state: Mapping[str, Any]) -> Parts:
        """New codecs with a compressor's state; ValueError where it is of another partition."""
        own, kept = self._settings, state.get("parameter_bits")
        given = state.get("scope", "network"), check_parameter_bits(kept)
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

    def adopt(self, old: Parts, keep: bool) -> None:
        """Go on with another compressor's codecs, where there still are such parts."""
        self._warned = old._warned
        for label, codec in old.codecs.items():
            known = label in self.codecs
            if known or (self._by_tensor and old._by_tensor and self.label_of(label) is not None):
                self[label].adopt(codec, keep)

    def _pattern(self, name: str) -> str | None:
        """The first pattern that matches."""
        return next((p for p in self._changes if p is not None and fnmatchcase(name, p)), None)

    def _make(self, changes: Mapping[str, int]) -> GradientCompressor:
        try:
            return self._scheme(**{**self._keywords, **changes})
        except (TypeError, ValueError) as error:
            asked = "parameter_bits" if changes else "scope"
            raise ValueError(f"{asked}={getattr(self._settings, asked)!r}: {error}") from error


def _label(changes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in changes.items())


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
        codecs: Mapping[str, AdaptiveScheme],
        seconds: Mapping[str, AdaptiveScheme] | None = None,
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
