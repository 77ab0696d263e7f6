"""Errors of level tables if gradients of two kinds take turns, as those of a GAN or of SAM.

    python benchmarks/gradients_in_turn.py [--steps S] [--coordinates N] [--methods METHOD ...]

Gradients are normal at even steps, and log-normal (σ = 2, with random signs) at odd steps. In "one
network" every parameter has a gradient at every step (SAM). In "two networks" the parameters of one
half have one at even steps, and those of the other half at odd steps (a GAN in one model). Two
ranks fit tables as in training. Printed is the relative error ||Q(v) - v||²/||v||² of fresh
gradients after S steps, as an expectation over the rounding. "alone" is that of a table that is
fitted to the kind alone.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from tqdm import tqdm

from hvd_adaptive.simulate import Ranks
from hvd_adaptive.tools.methods import Method, parse
from hvd_adaptive.tools.output import print_table

RANKS = 2
METHODS = [
    f"ALQ(bits=3, {norm}, scope='{scope}')"
    for scope in ("network", "tensor")
    for norm in (
        "norm='l2', symmetric=True",
        "norm='linf', symmetric=True",
        "norm='linf', symmetric=False",
    )
]
NETWORKS = {"one": False, "two": True}
KINDS = ("normal", "log-normal")


def gradient(kind: int, count: int, *seed: int) -> torch.Tensor:
    """Return ``count`` coordinates of a kind, float32."""
    rng = np.random.default_rng([kind, *seed])
    flat = rng.standard_normal(count)
    if KINDS[kind] == "log-normal":
        flat = np.exp(2 * flat) * rng.choice([-1.0, 1.0], count)
    return torch.from_numpy(flat.astype(np.float32))


def trained(method: Method, steps: int, count: int, halves: bool, kinds=(0, 1)):
    """Return a compressor whose tables are those after ``steps`` steps of ``kinds`` in turn."""
    compressor = method.scheme()
    named = [(name, torch.nn.Parameter(torch.zeros(count // 2))) for name in ("a", "b")]
    ranks = Ranks(named, compressor, RANKS)
    for step in range(steps):
        kind = kinds[step % len(kinds)]
        for rank in range(RANKS):
            for index, (_, parameter) in enumerate(named):
                own = not halves or index == kind
                parameter.grad = own * gradient(kind, count // 2, step, rank, index)
            ranks.take(rank)
        if ranks.due(step):
            ranks.refit(step)
    return compressor


def error(compressor, part: str, kind: int, count: int) -> float:
    """Return the relative error of a part's table on fresh gradients."""
    fresh = gradient(kind, count, 1 << 20)
    squares = compressor.parts[part].payloads.squared_errors(fresh, 0).sum(0)
    return float(squares[0] / squares[1])


def row(method: Method, networks: str, steps: int, count: int) -> list[str]:
    """Return the cells of a method's errors: of each kind in turn, then of each kind alone."""
    halves = NETWORKS[networks]
    mixed, errors = trained(method, steps, count, halves), []
    own = len(mixed.parts) > 1
    for kind in range(2):
        errors.append(error(mixed, "ab"[halves * kind] if own else "", kind, count))
    for kind in range(2):
        alone = trained(method, 1, count, False, (kind,))
        errors.append(error(alone, "a" if own else "", kind, count))
    return [method.label, networks, *(f"{one:.2f}" for one in errors)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=104)
    parser.add_argument("--coordinates", type=int, default=1 << 19)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(method, networks) for method in parse(args.methods) for networks in NETWORKS]
    rows = [row(*case, args.steps, args.coordinates) for case in tqdm(cases)]
    names = ("networks", *KINDS, *(f"{kind} alone" for kind in KINDS))
    title = f"relative errors of two kinds in turn, after {args.steps} steps"
    print_table(("method", *names), rows, title=title)


if __name__ == "__main__":
    main()
