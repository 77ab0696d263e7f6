"""Keep measurements of the laboratory in a file, so that a long series can be interrupted."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laboratory.files import write_json
from laboratory.hosts import Hosts
from laboratory.measure import Settings, measure
from laboratory.methods import parse


def measured(
    path: Path | None, labels: list[str], hosts: int, rate: str, settings: Settings
) -> dict[str, dict[str, Any]]:
    """Measure methods that the file does not hold, keep those without trouble there; return all.

    Returns:
        {label: {"seconds": of each step, "sent": bytes that a host sends, "trouble": None or why
        rounds are missing}}.

    Raises:
        ValueError: the file was written under other conditions, or holds something else.
    """
    conditions = {
        "hosts": hosts,
        "rate": rate,
        "cores": len(os.sched_getaffinity(0)),
        **asdict(settings),
    }
    found = _read(path, conditions) if path is not None and path.exists() else {}
    missing = [label for label in labels if label not in found]
    if missing:
        with Hosts(hosts, rate) as place:
            results = measure(place, parse(missing), settings)
        for result in results:
            sent = result.mean("sent_bytes") if result.seconds else None
            found[result.method.label] = {
                "seconds": result.seconds,
                "sent": sent,
                "trouble": result.trouble,
            }
        if path is not None:
            whole = {label: own for label, own in found.items() if own["trouble"] is None}
            write_json(path, {"conditions": conditions, "found": whole})
    return {label: found[label] for label in labels}


def _read(path: Path, conditions: dict[str, Any]) -> dict[str, dict[str, Any]]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        before, found = kept["conditions"], dict(kept["found"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: holds no measurements of the laboratory: {error}") from error
    if before != conditions:
        raise ValueError(f"{path}: was measured under {before}, not {conditions}; remove it")
    return found
