"""Relative error of EDEN beside other schemes and the rate-distortion bound, law by law.

    python benchmarks/eden.py [--bits 0.5,1,8] [--laws normal,lenet-50] [--bucket 4096] [--draws 4]
    python benchmarks/eden.py --methods ["ALQ(bits=3)" ...] [--laws normal,lognormal2]

Prints ||Q(v) - v||^2 / ||v||^2, the mean of draws, for vectors of about 2^19 coordinates and for
LeNet's gradients at steps 0, 50 and 600. Adaptive schemes are fitted to the same vector. The bound
of normal coordinates at b bits is 4^-b. "Lloyd-Max" is D/(1 - D) for the levels of N(0, 1), which
an ideal rotation would give EDEN for every law; "ALQ paper" is ALQ(norm="l2", symmetric=True).
Exits with 1 if EDEN has more than 1.03 times that error anywhere, or more than 0.58 at one bit.

--methods prints a row for each method, without names those of docs/choosing.md, and a column for
each law: the error, exact if a formula gives it, and the bits of a coordinate, without the
payload's header.
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
from tqdm import tqdm

from hvd_adaptive import ALQ, ECDQ, EDEN, QSGD
from hvd_adaptive.coding.payload import SIZE
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.tools.methods import Method, parse
from hvd_adaptive.tools.output import print_table

COORDINATES, STEPS, KEPT = 1 << 19, (0, 50, 600), (1, 2, 4, 8, 32)
MARGIN, ONE_BIT = 1.03, 0.58


def sparse(kept: int, size: int, draw: np.random.Generator) -> np.ndarray:
    """Buckets with ``kept`` normal coordinates each, at random places; the others are zero."""
    v = np.zeros((COORDINATES // size, size))
    for bucket in v:
        bucket[draw.choice(size, kept, replace=False)] = draw.standard_normal(kept)
    return v.reshape(-1)


def lognormal(sigma: float, draw: np.random.Generator) -> np.ndarray:
    """Log-normal magnitudes with random signs."""
    return draw.lognormal(0, sigma, COORDINATES) * draw.choice([-1.0, 1.0], COORDINATES)


def mostly_zero(share: float, draw: np.random.Generator) -> np.ndarray:
    """Normal coordinates, each with the chance ``share``; the others are zero."""
    return draw.standard_normal(COORDINATES) * (draw.random(COORDINATES) < share)


def laws(size: int) -> dict[str, Callable[[], np.ndarray]]:
    """Label -> sampler of a vector."""

    def draw() -> np.random.Generator:
        return np.random.default_rng(0)

    found: dict[str, Callable[[], np.ndarray]] = {
        "normal": lambda: draw().standard_normal(COORDINATES),
        "laplace": lambda: draw().laplace(size=COORDINATES),
        "student3": lambda: draw().standard_t(3, COORDINATES),
        "student1.5": lambda: draw().standard_t(1.5, COORDINATES),
        "lognormal2": lambda: lognormal(2, draw()),
        "1%-nonzero": lambda: mostly_zero(0.01, draw()),
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
        found["ALQ paper"] = ALQ(bits=bits, norm="l2", symmetric=True, bucket_size=size)
        found["ALQ"] = ALQ(bits=bits, bucket_size=size)
        found["QSGD linf"] = QSGD(bits=bits, norm="linf", bucket_size=size)
    return found


COLUMNS = ("EDEN", "ECDQ", "ALQ paper", "ALQ", "QSGD linf")


METHODS = (
    "ALQ(bits=3, norm='l2', symmetric=True)",
    "ALQ(bits=3, symmetric=True)",
    "ALQ(bits=3)",
    "ALQ(bits=3, coding='huffman')",
    "AMQ(bits=3)",
    "ALQ(bits=2)",
    "ALQ(bits=2, symmetric=True)",
    "EDEN(bits=1|2)",
)
COMPARED = ("normal", "laplace", "student3", "student1.5", "lognormal2", "1%-nonzero")


def compare(texts: list[str], labels: list[str], size: int, draws: int) -> None:
    """Print the error and the bits of methods (rows) for laws (columns)."""
    samplers = laws(size)
    flats = [torch.from_numpy(samplers[label]()).float() for label in labels]
    rows = [
        (method.label, *(cell(method, flat, size, draws) for flat in flats))
        for method in tqdm(parse(texts))
    ]
    print_table(("method", *labels), rows, title="relative error (bits of a coordinate)")


def cell(method: Method, flat: torch.Tensor, size: int, draws: int) -> str:
    """Return "error (bits)" after a fit."""
    codec = Method(method.name, {"bucket_size": size, **method.keywords}).scheme().parts.default
    if hasattr(codec, "fit"):
        codec.fit(flat)
    keys = range(1 if codec.knows_errors else draws)
    sums = sum(codec.payloads.squared_errors(flat, key).sum(dim=0) for key in keys)
    bits = 8 * (codec.payloads.encode(flat, flat.numel(), 0).bytes.numel() - SIZE) / flat.numel()
    return f"{float(sums[0] / sums[1]):.3f} ({bits:.2f})"


def error(scheme: GradientCompressor, flat: torch.Tensor, draws: int) -> float:
    """Mean relative squared error of ``draws`` estimates."""
    codec = scheme.parts.default
    if hasattr(codec, "fit"):
        codec.fit(flat)
    squares = [(codec.payloads.roundtrip(flat, key) - flat).square().sum() for key in range(draws)]
    return float(sum(squares) / draws / flat.square().sum())


def numbers(text: str) -> tuple[float, ...]:
    found = tuple(float(number) for number in text.split(","))
    return tuple(int(number) if number.is_integer() else number for number in found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=numbers, default=(0.5, *range(1, 9)))
    parser.add_argument("--laws", default=None, help="labels; all if not given")
    parser.add_argument("--bucket", type=int, help="4096, or 8192 with --methods")
    parser.add_argument("--methods", nargs="*", help="compare these, those of the docs if none")
    parser.add_argument("--draws", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = arguments()
    torch.set_num_threads(1)
    if args.methods is not None:
        labels = list(COMPARED) if args.laws is None else args.laws.split(",")
        compare(args.methods or list(METHODS), labels, args.bucket or 8192, args.draws)
        return
    size = args.bucket or 4096
    found = laws(size)
    chosen = list(found) if args.laws is None else args.laws.split(",")
    rows, ratios, one_bit = [], [0.0], [0.0]
    with tqdm(total=len(chosen) * len(args.bits)) as progress:
        for law in chosen:
            flat = torch.from_numpy(found[law]()).float()
            for bits in args.bits:
                own = schemes(bits, size)
                errors = {label: error(scheme, flat, args.draws) for label, scheme in own.items()}
                best = EDEN(bits=bits).parts.default.expected_error
                ratios.append(errors["EDEN"] / best)
                one_bit += [errors["EDEN"]] * (bits == 1)
                cells = [f"{errors[c]:.3g}" if c in errors else "-" for c in COLUMNS]
                rows.append((law, str(bits), *cells, f"{best:.3g}", f"{4.0**-bits:.2g}"))
                progress.update()
    headings = ("law", "bits", *COLUMNS, "Lloyd-Max", "4^-bits")
    print_table(headings, rows, title="relative error")
    print(f"EDEN's error over Lloyd-Max's: at most {max(ratios):.3f} (bar {MARGIN})")
    print(f"EDEN's error at 1 bit: at most {max(one_bit):.3f} (bar {ONE_BIT})")
    sys.exit(max(ratios) > MARGIN or max(one_bit) > ONE_BIT)


if __name__ == "__main__":
    main()
