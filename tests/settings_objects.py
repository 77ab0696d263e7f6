"""Settings objects for tests whose exchange, or whose settings, are parameters."""

from __future__ import annotations

from typing import Any

from hvd_adaptive.keywords import declared
from hvd_adaptive.options import Auto, Hierarchical, ScatterReduce, Tuning

KINDS = {kind.name: kind for kind in (ScatterReduce, Hierarchical, Auto)}


def exchange_of(name: str | None, **settings: Any) -> Any:
    """The exchange of this name, with those of the settings that it has."""
    if name not in KINDS:
        return name
    kind = KINDS[name]
    return kind(**{key: value for key, value in settings.items() if key in declared(kind)})


def grouped(keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a scheme, from a plain dict that also holds settings of objects."""
    own = dict(keywords)
    tuning = {key: own.pop(key) for key in declared(Tuning) if key in own}
    settings = {key: own.pop(key) for key in declared(Auto) if key in own}
    if "exchange" in own:
        own["exchange"] = exchange_of(own["exchange"], **settings)
    return own | ({"tuning": Tuning(**tuning)} if tuning else {})
