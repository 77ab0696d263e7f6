"""Declare, for each keyword of a scheme, who uses it and what may happen to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Keyword:
    """Properties of a keyword.

    Attributes:
        check: Function (name, value) that returns the value to keep and raises ValueError if the
            value is not allowed; None if the scheme's constructor checks the keyword.
        agreed: All ranks must have it alike.
        changeable: ``compressor.set`` may change it.
        refits: Level tables are refitted after a change, because they are fitted to something else.
        for_parts: The codecs of parts (parts.py) have it, too.
        for_averages: A codec of averages that repeats a scheme's keywords has it, too.
        picklable: It is part of a pickle of ``ddp.CompressionState``.
    """

    check: Callable[[str, Any], Any] | None = None
    agreed: bool = True
    changeable: bool = True
    refits: bool = False
    for_parts: bool = True
    for_averages: bool = True
    picklable: bool = True


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
