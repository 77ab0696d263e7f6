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
    inside = {"second_stage_bits", "ranks_per_node", *declared(Tuning)}
    own = {key: value for key, value in keywords.items() if key not in inside}
    tuning = {key: value for key, value in keywords.items() if key in declared(Tuning)}
    if "exchange" in own:
        own["exchange"] = exchange_of(
            **{"name": own["exchange"]}
            | {key: value for key, value in keywords.items() if key in inside and key not in tuning}
        )
    return own | ({"tuning": Tuning(**tuning)} if tuning else {})
