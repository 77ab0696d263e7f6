"""Relative error of EDEN beside other schemes and the rate-distortion bound, law by law.

    python benchmarks/eden.py [--bits 0.5,1,8] [--laws normal,lenet-50] [--bucket 4096] [--draws 4]

Prints ||Q(v) - v||^2 / ||v||^2, the mean of draws, for vectors of about 2^19 coordinates and for
LeNet's gradients at steps 0, 50 and 600. Adaptive schemes are fitted to the same vector. The bound
of normal coordinates at b bits is 4^-b. "Lloyd-Max" is D/(1 - D) for the levels of N(0, 1), which
an ideal rotation would give EDEN for every law. Exits with 1 if EDEN has more than 1.03 times that
error anywhere, or more than 0.58 at one bit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from fresh_laws import lenet_gradients
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hvd_adaptive import ALQ, ECDQ, EDEN, QSGD
from hvd_adaptive.compressor import GradientCompressor

COORDINATES, STEPS, KEPT = 1 << 19, (0, 50, 600), (1, 2, 4, 8, 32)
MARGIN, ONE_BIT = 1.03, 0.58


def sparse(kept: int, size: int, draw: np.random.Generator) -> np.ndarray:
    """Buckets with ``kept`` normal coordinates each, at random places; the others are zero."""
    v = np.zeros((COORDINATES // size, size))
    for bucket in v:
        bucket[draw.choice(size, kept, replace=False)] = draw.standard_normal(kept)
    return v.reshape(-1)


def laws(size: int) -> dict[str, Callable[[], np.ndarray]]:
    """Label -> sampler of a vector."""

    def draw() -> np.random.Generator:
        return np.random.default_rng(0)

    found: dict[str, Callable[[], np.ndarray]] = {
        "normal": lambda: draw().standard_normal(COORDINATES),
        "student3": lambda: draw().standard_t(3, COORDINATES),
        "student1.5": lambda: draw().standard_t(1.5, COORDINATES),
    }
    for kept in KEPT:
        label = "one-hot" if kept == 1 else f"{kept}-sparse"
        found[label] = lambda kept=kept: sparse(kept, size, draw())
    for step in STEPS:
        found[f"lenet-{step}"] = lambda step=step: lenet_gradients(step)[0]
    return found


def schemes(bits: float, size: int) -> dict[str, GradientCompressor]:
    """Column -> compressor; tables begin at 2 bits."""
    found: dict[str, GradientCompressor] = {"EDEN": EDEN(bits=bits, bucket_size=size)}
    found["ECDQ"] = ECDQ(bits=float(bits), bucket_size=size)
    if bits > 1:
        for norm in ("l2", "linf"):
            found[f"ALQ {norm}"] = ALQ(bits=bits, norm=norm, bucket_size=size)
        found["QSGD linf"] = QSGD(bits=bits, norm="linf", bucket_size=size)
    return found


COLUMNS = ("EDEN", "ECDQ", "ALQ l2", "ALQ linf", "QSGD linf")


def error(scheme: GradientCompressor, flat: torch.Tensor, draws: int) -> float:
    """Mean relative squared error of ``draws`` estimates."""
    codec = scheme.codec
    if hasattr(codec, "fit"):
        codec.fit(flat)
    squares = [(codec.roundtrip(flat, key) - flat).square().sum() for key in range(draws)]
    return float(sum(squares) / draws / flat.square().sum())


def numbers(text: str) -> tuple[float, ...]:
    found = tuple(float(number) for number in text.split(","))
    return tuple(int(number) if number.is_integer() else number for number in found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=numbers, default=(0.5, *range(1, 9)))
    parser.add_argument("--laws", default=None, help="labels; all if not given")
    parser.add_argument("--bucket", type=int, default=4096)
    parser.add_argument("--draws", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = arguments()
    torch.set_num_threads(1)
    found = laws(args.bucket)
    chosen = list(found) if args.laws is None else args.laws.split(",")
    table = Table("law", "bits", *COLUMNS, "Lloyd-Max", "4^-bits", title="relative error")
    table.columns[0].no_wrap = True
    ratios, one_bit = [0.0], [0.0]
    with tqdm(total=len(chosen) * len(args.bits)) as progress:
        for law in chosen:
            flat = torch.from_numpy(found[law]()).float()
            for bits in args.bits:
                own = schemes(bits, args.bucket)
                errors = {label: error(scheme, flat, args.draws) for label, scheme in own.items()}
                best = EDEN(bits=bits).codec.expected_error
                ratios.append(errors["EDEN"] / best)
                one_bit += [errors["EDEN"]] * (bits == 1)
                cells = [f"{errors[c]:.3g}" if c in errors else "-" for c in COLUMNS]
                table.add_row(law, str(bits), *cells, f"{best:.3g}", f"{4.0**-bits:.2g}")
                progress.update()
    console = Console(width=110)
    console.print(table)
    console.print(f"EDEN's error over Lloyd-Max's: at most {max(ratios):.3f} (bar {MARGIN})")
    console.print(f"EDEN's error at 1 bit: at most {max(one_bit):.3f} (bar {ONE_BIT})")
    sys.exit(max(ratios) > MARGIN or max(one_bit) > ONE_BIT)


if __name__ == "__main__":
    main()
