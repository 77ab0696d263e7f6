"""Define parts: parameters that share bits and a level table, with a codec of their own."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from hvd_adaptive import states
from hvd_adaptive.base.checks import check_parameter_bits
from hvd_adaptive.codec.codec import Codec, load_state, state_of

logger = logging.getLogger("hvd_adaptive")

LISTED = 4  # names in a warning
UNNAMED = "allreduce.noname."  # Horovod's names of parameters that it was given without names
ALIKE = 0.7  # of 1: a name that resembles a pattern so much is listed
LOOKS = 8  # steps at most whose gradients are looked at for zeros
DDP, COMPILED = "module.", "_orig_mod."  # what wrappers add to names


class Parts(dict[str, Codec]):
    """Codecs of a compressor's parts by label; the default part is "".

    Other labels are "bits=4" and similar; these codecs are made at once. With ``scope="tensor"``
    labels are the tensors' names, and a codec is made when it is first needed. Each codec has a
    table of its own and the compressor's keywords, except for its bits.

    Args:
        make: Function that returns a new codec with some keywords changed.

    Raises:
        ValueError: The scheme does not accept other bits.
    """

    def __init__(self, default: Codec, make: Callable[..., Codec]) -> None:
        super().__init__({"": default})
        self.default, self._make_codec, self._settings = default, make, default.settings
        self._warned = False
        self.looks_for_zeros = LOOKS  # in the next steps (run/rounded_zeros.py)
        self._by_tensor = self._settings.scope == "tensor"
        self._bits = dict(self._settings.parameter_bits or {})  # None for full precision
        # The names of tensors are not known yet, but bits that are not allowed fail now.
        made = {_label(bits): self._make(bits) for bits in self._bits.values() if bits is not None}
        if self._by_tensor:
            self._make(None)
        else:
            self.update(made)

    @property
    def may_be_several(self) -> bool:
        """Return whether there can be parts besides the default one."""
        return self._by_tensor or bool(self._bits)

    @property
    def others(self) -> dict[str, Codec]:
        return {label: codec for label, codec in self.items() if label}

    def __missing__(self, label: str) -> Codec:
        """Make the codec of a part; raise ValueError if there is no such part."""
        if not self._by_tensor or self.label_of(label) is None:
            known = ", ".join(map(repr, self))
            raise ValueError(f"part {label!r}: must be one of {known}")
        pattern = self._pattern(label)
        self[label] = made = self._make(None if pattern is None else self._bits[pattern])
        return made

    def label_of(self, name: str) -> str | None:
        """Return the label of a parameter's part, or None for full precision."""
        pattern = self._pattern(name)
        bits = None if pattern is None else self._bits[pattern]
        if pattern is not None and bits is None:
            return None
        return name if self._by_tensor else _label(bits)

    def plainly_named(self, named: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Return ``plain_names`` of (name, parameter) pairs, and warn of idle patterns."""
        plain = plain_names(named, self._settings.parameter_bits or ())
        if plain:
            self.warn_of_idle_patterns([name for name, _ in plain])
        return plain

    def warn_of_idle_patterns(self, names: Iterable[str]) -> None:
        """Warn, once, of patterns of ``parameter_bits`` that match none of these parameters."""
        names = list(names)
        used = {self._pattern(name) for name in names}
        idle = [pattern for pattern in self._bits if pattern not in used]
        if idle and not self._warned:
            logger.warning(
                "parameter_bits: %s",
                "; ".join(f"{pattern!r} {_idle(pattern, names)}" for pattern in idle),
            )
            self._warned = True

    def state_dict(self) -> dict[str, Any]:
        """Return the partition and its codecs' states, or {} if there is only the default part."""
        if not self.may_be_several:
            return {}
        patterns = self._settings.parameter_bits
        return {
            "scope": self._settings.scope,
            "parameter_bits": None if patterns is None else dict(patterns),
            "parts": {label: state_of(codec) for label, codec in self.others.items()},
        }

    def loaded(self, state: Mapping[str, Any]) -> dict[str, Codec]:
        """Return new codecs with a state's tables; raise ValueError if its partition differs."""
        own, kept = self._settings, state.get("parameter_bits")
        given = state.get("scope", "network"), check_parameter_bits("parameter_bits", kept)
        if repr(given) != repr((own.scope, own.parameter_bits)):  # the patterns' order counts
            raise ValueError(
                f"state: is of scope={given[0]!r} and parameter_bits={given[1]!r}, "
                f"not of {own.scope!r} and {own.parameter_bits!r}"
            )
        if self.may_be_several and "parts" not in state:
            raise ValueError("state: has no entry 'parts'")
        new = Parts(self.default, self._make_codec)
        saved = states.mapping(state.get("parts", {}), "state: parts")
        for label in new.others:
            states.entry(saved, label, "state: parts")
        for label, of_codec in saved.items():
            load_state(new[label], of_codec)
        return new.others

    def use(self, others: Mapping[str, Codec]) -> None:
        """Use these codecs of all parts except the default one from now on."""
        self.clear()
        self.update({"": self.default} | dict(others))

    def load_from(self, old: Parts, keep: bool) -> None:
        """Continue another compressor's codecs of the parts that still exist."""
        self._warned, self.looks_for_zeros = old._warned, old.looks_for_zeros
        for label, codec in old.others.items():
            by_tensor = self._by_tensor and old._by_tensor
            if label in self or (by_tensor and self.label_of(label) is not None):
                self[label].load_tables_from(codec, keep)

    def looked_for_zeros(self, again: bool) -> None:
        """Note that a step was looked at, and whether another one must be."""
        self.looks_for_zeros = self.looks_for_zeros - 1 if again else 0

    def _pattern(self, name: str) -> str | None:
        """Return the first pattern that matches, or None."""
        return next((pattern for pattern in self._bits if fnmatchcase(name, pattern)), None)

    def _make(self, bits: int | None) -> Codec:
        """Return a new codec with these bits, or the compressor's own if None."""
        try:
            return self._make_codec(**({} if bits is None else {"bits": bits}))
        except (TypeError, ValueError) as error:
            keyword = "scope" if bits is None else "parameter_bits"
            value = getattr(self._settings, keyword)
            raise ValueError(f"{keyword}={value!r}: {error}") from error


def plain_names(
    named: Sequence[tuple[str, Any]], patterns: Iterable[str] = ()
) -> list[tuple[str, Any]]:
    """Return (name, parameter) pairs with the names that the parameters have in the plain model.

    DistributedDataParallel puts "module." in front of all names, torch.compile "_orig_mod." in
    front of those of the module that it compiles. A wrapper's name stays if one of the patterns of
    ``parameter_bits`` has it, or if names would become equal.
    """
    names, patterns = [name for name, _ in named], list(patterns)
    wrappers = [w for w in (DDP, COMPILED) if not any(w in pattern for pattern in patterns)]
    of_all: str | None = ""
    while names and of_all is not None:
        names = [name.removeprefix(of_all) for name in names]
        of_all = next((w for w in wrappers if all(name.startswith(w) for name in names)), None)
    if COMPILED in wrappers:
        names = [f".{name}".replace(f".{COMPILED}", ".")[1:] for name in names]
    if len(set(names)) < len(names):
        return list(named)
    return [(name, parameter) for name, (_, parameter) in zip(names, named, strict=True)]


def _label(bits: int | None) -> str:
    return "" if bits is None else f"bits={bits}"


def _idle(pattern: str, names: Sequence[str]) -> str:
    """Return why a pattern applies to none of the names, and which are close to it."""
    if any(fnmatchcase(name, pattern) for name in names):
        return "applies to no parameter: earlier patterns match all that it matches"
    bare = pattern.replace("*", "").lower()
    inside = [name for name in names if bare and bare in name.lower()]
    alike = [name for name in names if name not in inside and _likeness(bare, name) >= ALIKE]
    alike.sort(key=lambda name: -_likeness(bare, name))
    close = [*inside, *alike][:LISTED]
    hint = f"close names are {_quoted(close)}" if close else f"names are {_quoted(names[:LISTED])}"
    if names and all(name.startswith(UNNAMED) for name in names):
        hint += "; give the optimizer named_parameters="
    return f"matches no parameter; {hint}" if names else "matches no parameter, as there is none"


def _likeness(bare: str, name: str) -> float:
    """Return how much a pattern resembles a name, one of the name's parts, or its beginning."""
    name = name.lower()
    texts = {name, *name.split("."), name[: len(bare)]}
    return max(difflib.SequenceMatcher(None, bare, text).ratio() for text in texts)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
