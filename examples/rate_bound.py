"""ECDQ against its bound, on coordinates of known laws: part of rate_curve.py's page."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hvd_adaptive import ECDQ
from hvd_adaptive.levels.dithered import rate_bound
from hvd_adaptive.simulate import Records

COORDINATES = 1 << 20
DELTAS = (5.0, 3.0, 1.5, 1.0, 0.5, 0.1, 0.02)


def _student(generator: torch.Generator) -> torch.Tensor:
    """Three degrees of freedom: a normal number over the root of a third of a chi-square."""
    normal = torch.randn(4, COORDINATES, generator=generator)
    return normal[0] / (normal[1:].square().mean(dim=0)).sqrt()


LAWS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "Gaussian": lambda g: torch.randn(COORDINATES, generator=g),
    "Student, 3 degrees": _student,
    "5 % Gaussian, else 0": lambda g: (
        torch.randn(COORDINATES, generator=g) * (torch.rand(COORDINATES, generator=g) < 0.05)
    ),
}


def measure() -> Records:
    """Rows (law, delta, error, bits, bound, blind): blind is the bound without the dither."""
    rows = []
    for name, law in LAWS.items():
        flat = law(torch.Generator().manual_seed(0))
        for delta in DELTAS:
            codec = ECDQ(relative_variance=delta**2 / 12)
            codec.fit(flat)
            payload = codec.encode(flat, seed=0)
            error = float((codec.decode(payload) - flat).double().square().sum())
            rows.append({
                "law": name, "delta": delta, "error": error / float(flat.double().square().sum()),
                "bits": 8 * payload.numel() / flat.numel(), "bound": rate_bound(delta),
                "blind": 0.5 * math.log2(2 * math.pi * math.e * (1 / delta**2 + 1 / 3)),
            })  # fmt: skip
    return Records({"coordinates": COORDINATES, "deltas": list(DELTAS)}, rows)


def section(records: Records) -> str:
    """Markdown: a row for each step, a column of bits for each law."""
    laws = list(dict.fromkeys(records.column("law")))
    lines = [["δ", "δ²/12", "measured error", *laws, "bound", "bound, dither not known"]]
    lines.append(["---"] * len(lines[0]))
    for delta in records.settings["deltas"]:
        rows = [row for row in records.rows if row["delta"] == delta]
        errors = ", ".join(f"{row['error']:.3g}" for row in rows)
        bits = [f"{row['bits']:.3f}" for row in rows]
        bounds = [f"{rows[0][name]:.3f}" for name in ("bound", "blind")]
        lines.append([f"{delta:g}", f"{delta**2 / 12:.3g}", errors, *bits, *bounds])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    gaussian = [row for row in records.rows if row["law"] == laws[0]]
    most = max(row["bits"] / row["bound"] - 1 for row in records.rows)
    word = "Holds" if most < 0.02 else "Does not hold"
    return (
        "## ECDQ and its bound\n\n"
        f"Wire bits per coordinate of {records.settings['coordinates']:,} independent ones, fitted "
        "to them; the error is promised, δ²/12, and measured for each law in turn. The bound, for "
        "any law, is ½ log2(2πe (1/δ² + 1/12)): ideal codes that know the dither. For codes that "
        f"do not, 1/3 stands in the place of 1/12.\n\n{table}\n\n"
        f"- Bits stay within 2 % of the bound, or below it, for every law and step. **{word}**: "
        f"the largest excess is {100 * most:.1f} %; Gaussian coordinates take "
        f"{gaussian[2]['bits']:.3f} bits at δ = {gaussian[2]['delta']:g}."
    )
