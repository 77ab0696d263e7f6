"""Constants that are kept in a file, for later plans under the same conditions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hvd_adaptive.tools.plan.quantities import (
    LABORATORY,
    Averages,
    Codec,
    Collective,
    Conditions,
    Machine,
)

VERSION = 2  # of what is measured, and how


class KeptError(ValueError):
    """A file does not hold the required constants."""


def constants(
    path: Path | None,
    schemes: Sequence[str],
    conditions: Conditions,
    measure: Callable[[], Machine],
) -> Machine:
    """Return the constants in the file, or measure them and write the file if there is none.

    Raises:
        KeptError: as ``load``.
    """
    if path is not None and path.exists():
        return load(path, schemes, conditions)
    machine = measure()
    if path is not None:
        save(machine, conditions, path)
    return machine


def save(machine: Machine, conditions: Conditions, path: Path) -> None:
    """Write everything that was measured here, but not the laboratory's constants."""
    measured = asdict(machine)
    del measured["reached"]
    kept = {"version": VERSION, "conditions": asdict(conditions), "machine": measured}
    path.write_text(json.dumps(kept, indent=1), encoding="utf-8")


def load(path: Path, schemes: Sequence[str], conditions: Conditions) -> Machine:
    """Read what ``save`` wrote, with the codecs of the given schemes only.

    Raises:
        KeptError: the file lacks a scheme, has other conditions or another version, or holds no
            constants.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        own = dict(kept["machine"])
        if kept.get("version") != VERSION:
            raise KeptError(f"{path}: is of another version of `hvd-adaptive plan`; remove it")
        measured_for = Conditions(**kept["conditions"])
        reduce = {int(size): Collective(**of_size) for size, of_size in own["allreduce"].items()}
        own |= {"allreduce": reduce, "codecs": tuple(_codec(c) for c in own["codecs"])}
        own |= {name: Collective(**own[name]) for name in ("allgather", "alltoall", "local")}
        machine = Machine(**own, reached=LABORATORY[own["launcher"]])
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise KeptError(f"{path}: holds no constants of `hvd-adaptive plan`: {error}") from error
    if measured_for != conditions:
        raise KeptError(f"{path}: was measured for {measured_for}, not for {conditions}")
    known = {codec.label: codec for codec in machine.codecs}
    if missing := [scheme for scheme in schemes if scheme not in known]:
        raise KeptError(f"{path}: has no constants of {', '.join(missing)}")
    return replace(machine, codecs=tuple(known[scheme] for scheme in dict.fromkeys(schemes)))


def _codec(kept: dict[str, Any]) -> Codec:
    averages = {name: Averages(**kept[name]) for name in ("second", "between")}
    return Codec(**(kept | averages))
