"""Tables of compare.py's runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from compare_scores import Scores

HEADINGS = (
    "method",
    "accuracy, %",
    "± deviation",
    "deficit to SuperSGD, points",
    "95% interval",
    "training loss",
    "bits a coordinate",
)


def rows_of(scores: Scores) -> list[tuple[str, ...]]:
    """A line for each method, in the order of HEADINGS."""
    lines = []
    for method, outcomes in scores.outcomes.items():
        accuracy = scores.accuracy(method)
        spread = f"{accuracy.std(ddof=1):.2f}" if len(accuracy) > 1 else "-"
        gap = interval = "-"
        if method != "SuperSGD" and "SuperSGD" in scores:
            deficit = scores.deficit(method)
            gap = f"{deficit.mean:+.2f}"
            interval = f"{deficit.low:+.2f} to {deficit.high:+.2f}" if len(accuracy) > 1 else "-"
        lost = scores.lost(method)
        loss = np.mean([o.training_loss for o in outcomes if not o.diverged] or [np.nan])
        told = "-" if lost == len(outcomes) else f"{loss:.4f}"
        told += f" ({lost} of {len(outcomes)} diverged)" if lost else ""
        bits = f"{scores.bits(method):.2f}"
        lines.append((method, f"{accuracy.mean():.2f}", spread, gap, interval, told, bits))
    return lines


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of numbers, on the right."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of text, on the left."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
