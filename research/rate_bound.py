"""ECDQ against its bound, on coordinates of known laws: part of rate_curve.py's page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from compare_tables import table
from verdicts import Claim, Comparison

from hvd_adaptive import ECDQ
from hvd_adaptive.simulate import Records
from hvd_adaptive.simulate.records import Row

COORDINATES, DRAWS = 1 << 20, 10
# What bits may exceed the bound by.
EXCESS = 0.02
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


def rate_bound(delta: float) -> float:
    """Return ½ log2(2πe (1/δ² + 1/12)), the bits per coordinate that suffice for a step δ.

    ``delta`` is the step δ in units of the root mean square. The bound holds for any law if the
    code depends on the dither. Zamir and Feder (1992): H(q | dither) is the mutual information
    between v and v + e, where e is uniform, independent and of variance δ²/12. The variance of v +
    e is at most 1 + δ²/12, so its differential entropy is at most a Gaussian's. The entropy of e is
    log2(δ).
    """
    return 0.5 * math.log2(2 * math.pi * math.e * (1 / delta**2 + 1 / 12))


def measure() -> Records:
    """Rows (law, delta, draw, error, bits, bound, blind): blind is the bound without the dither.
    Each draw has its own coordinates."""
    rows = []
    for name, law in LAWS.items():
        for draw, delta in itertools.product(range(DRAWS), DELTAS):
            flat = law(torch.Generator().manual_seed(draw))
            codec = ECDQ(relative_variance=delta**2 / 12)
            codec.fit(flat)
            payload = codec.encode(flat, seed=draw)
            error = float((codec.decode(payload) - flat).double().square().sum())
            rows.append(
                {
                    "law": name,
                    "delta": delta,
                    "draw": draw,
                    "error": error / float(flat.double().square().sum()),
                    "bits": 8 * payload.numel() / flat.numel(),
                    "bound": rate_bound(delta),
                    "blind": 0.5 * math.log2(2 * math.pi * math.e * (1 / delta**2 + 1 / 3)),
                }
            )
    return Records({"coordinates": COORDINATES, "deltas": list(DELTAS)}, rows)


def section(records: Records) -> list[str | list[Claim]]:
    """Parts of the page: a row for each step, a column of bits for each law."""
    laws = list(dict.fromkeys(records.column("law")))
    head = ["δ", "δ²/12", "measured error", *laws, "bound", "bound, dither not known"]
    lines = []
    for delta in records.settings["deltas"]:
        of_law = [_mean(records, law, delta) for law in laws]
        errors = ", ".join(f"{mean['error']:.3g}" for mean in of_law)
        bits = [f"{mean['bits']:.3f}" for mean in of_law]
        bounds = [f"{of_law[0][name]:.3f}" for name in ("bound", "blind")]
        lines.append([f"{delta:g}", f"{delta**2 / 12:.3g}", errors, *bits, *bounds])
    comparisons, most = [], 0.0
    for law, delta in itertools.product(laws, records.settings["deltas"]):
        excess = [row["bits"] / row["bound"] - 1 for row in _rows(records, law, delta)]
        comparisons.append(Comparison(EXCESS - np.array(excess)))
        most = max(most, float(np.mean(excess)))
    coarse = _mean(records, laws[0], 1.5)["bits"]
    return [
        "## ECDQ and its bound",
        f"Wire bits per coordinate of {records.settings['coordinates']:,} independent ones, fitted "
        "to them. The error is given, as the proved δ²/12, and as measured for each law in turn. "
        f"Values are means of {DRAWS} draws of the coordinates. The bound, for any law, is "
        "½ log2(2πe (1/δ² + 1/12)): ideal codes that know the dither. "
        "For codes that do not, 1/12 becomes 1/3.",
        table(head, lines),
        [
            Claim(
                f"bits stay within {100 * EXCESS:g} % of the bound, or below it, for every law and "
                "step",
                f"The largest mean excess is {100 * most:.1f} %; Gaussian coordinates take "
                f"{coarse:.3f} bits at δ = 1.5.",
                tuple(comparisons),
            )
        ],
    ]


def _rows(records: Records, law: str, delta: float) -> list[Row]:
    return [row for row in records.rows if (row["law"], row["delta"]) == (law, delta)]


def _mean(records: Records, law: str, delta: float) -> dict[str, float]:
    rows = _rows(records, law, delta)
    return {
        name: float(np.mean([row[name] for row in rows]))
        for name in ("error", "bits", "bound", "blind")
    }
