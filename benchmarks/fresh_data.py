"""Error of fitted tables on data that no fit has seen.

    python benchmarks/fresh_data.py [--laws normal,lenet] [--sizes 128,512] [--counts 20,500]
        [--bits 3,8] [--fits R] [--solver gradient_descent] [--normalized] [--all]

Tables are fitted to 20 to 500 buckets of a law, as in an update step of one rank. NumPy then
computes their exact relative error on ample fresh buckets of the same law,

    sum over buckets of ||v||^2 sum_i (u_i - r_i)(r_i - l_i)  /  sum over buckets of ||v||_2^2,

where l_i and u_i are the levels around r_i = |v_i|/||v|| (ALQ paper, Eqs 1, 2, 27, 28); with
--normalized each bucket is divided by its norm first. A row is ALQ's error, the mean over R fits to
independent samples, over the least mean of the others: AMQ, QSGD and NUQSGD. All meet the same
samples and the same fresh data. The standard error is a jackknife over 16 blocks of the fresh data.
For Student-1.5 it is large without --normalized, as E||v||^2 is infinite.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from fresh_laws import LAWS, Fresh
from tqdm import tqdm

from hvd_adaptive import ALQ, AMQ, NUQSGD, QSGD
from hvd_adaptive.tools.output import print_table

SIZES, COUNTS, BITS = (128, 512, 8192), (20, 80, 500), (2, 3, 4, 5, 6, 7, 8)
COORDINATES, LEAST_BUCKETS = 1 << 21, 600
MARGIN = 1.03


@dataclass(frozen=True)
class Sample:
    """What is fitted to."""

    law: str
    size: int
    count: int
    norm: str

    def draw(self, fit: int) -> list[torch.Tensor]:
        """Buckets of the given fit, independent of those of all others."""
        seed = [fit, self.size, self.count, *self.law.encode()]
        v = LAWS[self.law](np.random.default_rng(seed), self.count, self.size, False)
        return list(torch.from_numpy(v))


@dataclass(frozen=True)
class Row:
    """ALQ's mean error and that of the best other scheme; their ratio and its standard error."""

    sample: Sample
    bits: int
    symmetric: bool
    best: str
    error: float
    least: float
    deviation: float

    @property
    def ratio(self) -> float:
        return self.error / self.least

    def cells(self) -> list[str]:
        sample, kind = self.sample, "symmetric" if self.symmetric else "zero"
        numbers = [f"{self.error:.3g}", f"{self.least:.3g}", f"{self.ratio:.3f}"]
        of_sample = [sample.law, str(sample.size), str(sample.count), sample.norm]
        return [*of_sample, kind, str(self.bits), self.best, *numbers, f"{self.deviation:.3f}"]


HEADINGS = ("law", "bucket", "buckets", "norm", "table", "bits", "best other")
HEADINGS += ("ALQ", "other", "ratio", "s.e.")


def schemes(bits: int, norm: str, symmetric: bool, normalized: bool, solver: str) -> dict:
    """The compressors that are compared, ALQ first."""
    shared = {"bits": bits, "norm": norm}
    adaptive = shared | {"normalized": normalized}
    found = {"ALQ": ALQ(symmetric=symmetric, solver=solver, **adaptive)}
    found["AMQ"] = AMQ(symmetric=symmetric, **adaptive)
    found["QSGD"] = QSGD(symmetric=symmetric, **shared)
    found["NUQSGD"] = NUQSGD(symmetric=symmetric, **shared)
    return found


def rows_of(sample: Sample, fresh: Fresh, args: argparse.Namespace) -> Iterator[Row]:
    """A row for each number of bits and symmetry."""
    buckets = [sample.draw(fit) for fit in range(args.fits)]
    collector = ALQ(norm=sample.norm)
    collected = [collector.parts.default.collect(part) for part in buckets]
    for bits, symmetric in itertools.product(args.bits, (True, False)):
        errors: dict[str, np.ndarray] = {}
        found = schemes(bits, sample.norm, symmetric, args.normalized, args.solver)
        for name, scheme in found.items():
            errors[name] = np.zeros(len(fresh.totals))
            for part in collected:
                if isinstance(scheme, ALQ | AMQ):
                    scheme.parts.default.apply_update(scheme.parts.default.refit([part]), 0)
                errors[name] += (
                    fresh.errors(scheme.parts.default.table.magnitudes, symmetric) / args.fits
                )
        others = {name: error.sum() for name, error in errors.items() if name != "ALQ"}
        best = min(others, key=others.__getitem__)
        total, own, other = fresh.totals.sum(), errors["ALQ"], errors[best]
        ratios = (own.sum() - own) / (other.sum() - other)
        deviation = np.sqrt((len(ratios) - 1) * np.var(ratios))
        yield Row(sample, bits, symmetric, best, own.sum() / total, other.sum() / total, deviation)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--laws", default=",".join(LAWS))
    parser.add_argument("--sizes", type=numbers, default=SIZES)
    parser.add_argument("--counts", type=numbers, default=COUNTS)
    parser.add_argument("--bits", type=numbers, default=BITS)
    parser.add_argument("--fits", type=int, default=2)
    parser.add_argument("--solver", default="coordinate_descent")
    parser.add_argument("--normalized", action="store_true")
    parser.add_argument("--all", action="store_true", help="print every row, not the 20 largest")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = arguments()
    torch.set_num_threads(1)
    cases = list(itertools.product(args.laws.split(","), args.sizes, ("l2", "linf")))
    rows: list[Row] = []
    with tqdm(total=len(cases) * len(args.counts)) as progress:
        for law, size, norm in cases:
            draw = np.random.default_rng([size, *law.encode(), 1 << 31])
            v = LAWS[law](draw, max(COORDINATES // size, LEAST_BUCKETS), size, True)
            fresh = Fresh(v, norm, args.normalized)
            for count in args.counts:
                rows += rows_of(Sample(law, size, count, norm), fresh, args)
                progress.update()
    rows.sort(key=lambda row: -row.ratio)
    shown = [row.cells() for row in (rows if args.all else rows[:20])]
    print_table(HEADINGS, shown, title="error on fresh data")
    over = sum(row.ratio > MARGIN for row in rows)
    mean = np.exp(np.mean([np.log(row.ratio) for row in rows]))
    print(f"{len(rows)} cases, {over} above {MARGIN}; geometric mean {mean:.3f}")
    for law in args.laws.split(","):
        of_law = [row for row in rows if row.sample.law == law]
        print(f"{law}: largest ratio {of_law[0].ratio:.3f}")
    print(f"largest ratio of all: {rows[0].ratio:.3f} (s.e. {rows[0].deviation:.3f})")


if __name__ == "__main__":
    main()
