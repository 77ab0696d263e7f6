"""Declare, for each keyword of a scheme, who uses it and what may happen to it."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Keyword:
    """Properties of a keyword.

    ``check(name, value)`` returns the value to keep, and raises ValueError if the value is not
    allowed. It is None if the scheme's constructor checks the keyword.
    """

    check: Callable[[str, Any], Any] | None = None
    agreed: bool = True  # all ranks must have it alike
    changeable: bool = True  # ``compressor.set`` may change it
    refits: bool = False  # after a change level tables are fitted to something else
    for_parts: bool = True  # the codecs of parts (parts.py) have it, too
    for_averages: bool = True  # a codec of averages that repeats a scheme's keywords has it, too
    picklable: bool = True  # it is part of a pickle of ``ddp.CompressionState``


def keyword(
    default: Any, check: Callable[[str, Any], Any] | None = None, **properties: bool
) -> Any:
    """Return a dataclass field with a ``Keyword`` as metadata."""
    return dataclasses.field(default=default, metadata={"keyword": Keyword(check, **properties)})


# Keywords of single schemes that need more than the default properties. The others set what tables
# are fitted to.
SCHEMES_OWN = {
    "table": Keyword(changeable=False, refits=True, for_averages=False),
    "update_steps": Keyword(changeable=False, refits=True, for_parts=False),
    "samples": Keyword(),
}
OTHER = Keyword(refits=True)


def declared(settings: Any) -> dict[str, Keyword]:
    """Return the declarations of the fields of a dataclass."""
    return {f.name: f.metadata["keyword"] for f in dataclasses.fields(settings)}


class Checked:
    """Base of frozen dataclasses of keywords, which checks names and values, and shows them."""

    def __new__(cls, *values: Any, **keywords: Any) -> Any:
        check_keywords_only(cls, values)
        known = declared(cls)
        for name in keywords:
            if name not in known:
                raise unknown_keyword(cls, name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, properties in declared(self).items():
            if properties.check is not None:
                object.__setattr__(self, name, properties.check(name, getattr(self, name)))

    def given(self) -> dict[str, Any]:
        """Return the keywords that differ from their defaults."""
        values = {name: getattr(self, name) for name in declared(self)}
        return {n: value for n, value in values.items() if value != getattr(type(self), n)}

    def shared(self) -> dict[str, Any]:
        """Return the keywords that all ranks must have alike."""
        values = {n: getattr(self, n) for n, k in declared(self).items() if k.agreed}
        return {
            name: type(value)(**value.shared()) if isinstance(value, Checked) else value
            for name, value in values.items()
        }

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.given().items())
        return f"{type(self).__name__}({given})"


# Keywords of some schemes that say the same as others of other schemes.
ALIKE = {"bits": ("levels",), "levels": ("bits",)}


def own_keywords(scheme: type) -> dict[str, str]:
    """Return a scheme's own keywords and the text of their defaults, "" if there is none."""
    parameters = inspect.signature(scheme).parameters.values()
    return {
        p.name: "" if p.default is p.empty else repr(p.default)
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }


def check_keywords_only(scheme: type, values: tuple[Any, ...]) -> None:
    """Raise TypeError if values are given without a name to a scheme that takes keywords only."""
    parameters = inspect.signature(scheme).parameters.values()
    if not values or any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters):
        return
    name, own = scheme.__name__, own_keywords(scheme)
    given = ", ".join(map(repr, values))
    example = f"{next(iter(own))}={values[0]!r}" if own else "bucket_size=8192"
    raise TypeError(
        f"{name}({given}): values must be given by keyword, such as {name}({example})"
        + (f"; {name}'s own keywords are {_listed(own)}" if own else "")
    )


def unknown_keyword(
    scheme: str | type,
    name: str,
    shared: Iterable[str] = (),
    inside: Mapping[str, str] | None = None,
) -> TypeError:
    """Return the error about a keyword that a scheme does not have. Its own keywords are listed
    unless only its name is given; ``inside`` says how keywords of objects are written, by name.
    """
    own = own_keywords(scheme) if isinstance(scheme, type) else {}
    called = scheme.__name__ if isinstance(scheme, type) else scheme
    inside = inside or {}
    alike = [other for other in ALIKE.get(name, ()) if other in own]
    known = [] if name in SCHEMES_OWN else [*own, *shared, *inside]  # no other one is meant
    close = alike or difflib.get_close_matches(name, known, n=1)
    parts = [f"{called}() has no keyword {name!r}"]
    if close:
        parts[0] += f"; did you mean {inside.get(close[0], repr(close[0]))}?"
    if own:
        parts.append(f"{called}'s own keywords are {_listed(own)}")
    if shared:
        parts.append(f"shared keywords are {', '.join(shared)}")
    return TypeError((" " if close else "; ").join([parts[0], "; ".join(parts[1:])]))


def _listed(own: dict[str, str]) -> str:
    return ", ".join(f"{name}={default}" if default else name for name, default in own.items())
