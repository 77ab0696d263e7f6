"""Measured length of QSGD's and NUQSGD's Elias code beside the papers' formulas.

    python benchmarks/elias_length.py [--buckets B] [--markdown]

Every vector is one bucket of about 8,192 coordinates: Gaussian, constant, sparse (1 % Gaussian, the
rest zeros), and LeNet's gradients on MNIST after 0, 50 and 200 steps. Columns, in bits for a
vector: the formula without its o(1) (QSGD Theorem 3.2 and Corollary 3.3, NUQSGD Theorem 3); the
proved bound of theory.sparse_code_length_bound; then what was measured, the mean over all vectors
of that kind: the papers' code, and what travels with coding="elias" (its payload without the
header, so with offsets and ends of segments), in brackets with coding="fixed".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hvd_adaptive import NUQSGD, QSGD, kernels, theory
from hvd_adaptive.coding.payload import SIZE
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.tools.output import print_table

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = (0, 50, 200)
KEY = 7
COLUMNS = ("scheme", "vector", "formula", "bound", "paper's code", "on the wire", "a coordinate")


@dataclass(frozen=True)
class Case:
    """A scheme (coding -> compressor), its bucket and the paper's formula for a bucket."""

    label: str
    bucket: int
    make: Callable[[str], GradientCompressor]
    formula: Callable[[int], float]


def qsgd(intervals: int, bucket: int, formula: Callable[[int], float]) -> Case:
    """QSGD under L2."""
    return Case(
        f"QSGD s={intervals}",
        bucket,
        lambda coding: QSGD(intervals=intervals, bucket_size=bucket, coding=coding),
        formula,
    )


def nuqsgd(bits: int, bucket: int) -> Case:
    """NUQSGD; its s counts levels between 0 and 1."""
    s = (1 << (bits - 1)) - 2
    return Case(
        f"NUQSGD s={s}",
        bucket,
        lambda coding: NUQSGD(bits=bits, bucket_size=bucket, coding=coding),
        lambda n: theory.nuqsgd_code_length(s, n),
    )


CASES = (
    *(qsgd(s, 8192, lambda n, s=s: theory.qsgd_code_length(s, n)) for s in (1, 3, 7)),
    qsgd(90, 8100, theory.qsgd_dense_code_length),  # s = sqrt(n)
    nuqsgd(3, 8192),
)


def lenet_gradients() -> dict[str, torch.Tensor]:
    """Gradients of one minibatch of 64, all layers end to end, after ``steps`` steps."""
    sys.path.insert(0, str(EXAMPLES))
    from lenet import LeNet, read_images, split

    torch.manual_seed(0)
    train, _ = split(*read_images())
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    found = {}
    for step in range(max(STEPS) + 1):
        images, digits = train[torch.randint(len(train), (64,))]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), digits).backward()
        if step in STEPS:
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            found[f"LeNet, step {step}"] = gradient
        optimizer.step()
    return found


def vectors(buckets: int) -> dict[str, torch.Tensor]:
    """Label -> as many coordinates as there are or more than all cases need."""
    generator = torch.Generator().manual_seed(0)
    n = 8192 * buckets
    normal = torch.randn(n, generator=generator)
    kept = torch.rand(n, generator=generator) < 0.01
    made = {
        "Gaussian": normal,
        "constant": torch.ones(n),
        "sparse": torch.where(kept, normal, torch.zeros(n)),
    }
    return made | lenet_gradients()


def level_numbers(scheme: GradientCompressor, flat: torch.Tensor) -> np.ndarray:
    """(buckets, bucket size): 0 for zero, +-k for the k-th level."""
    body = torch.empty(scheme.parts.default.body_bytes(flat.numel()), dtype=torch.uint8)
    scheme.parts.default.encode_body(flat, body, KEY)
    size, packing = scheme.settings.bucket_size, scheme.parts.default.table.kernel.packing
    codes = torch.empty(flat.numel(), dtype=torch.uint8)
    words = body[4 * (flat.numel() // size) :].view(torch.int32)
    kernels.on_host("codes").unpack(words, packing, codes)
    return codes.numpy().reshape(-1, size).astype(np.int64) - packing.alphabet // 2


def row(case: Case, label: str, vector: torch.Tensor) -> tuple[str, ...]:
    """Strings for COLUMNS."""
    buckets = vector.numel() // case.bucket
    flat = vector[: buckets * case.bucket].contiguous()
    elias, fixed = case.make("elias"), case.make("fixed")
    paper = np.mean([theory.sparse_code_bits(v) for v in level_numbers(elias, flat)])
    magnitudes = elias.parts.default.table.magnitudes
    wire, packed = (
        8
        * (scheme.parts.default.payloads.encode(flat, flat.numel(), KEY).bytes.numel() - SIZE)
        / buckets
        for scheme in (elias, fixed)
    )
    return (
        case.label,
        label,
        f"{case.formula(case.bucket):,.0f}",
        f"{theory.sparse_code_length_bound(magnitudes, case.bucket):,.0f}",
        f"{paper:,.0f}",
        f"{wire:,.0f} ({packed:,.0f})",
        f"{wire / case.bucket:.3f}",
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--buckets", type=int, default=100, help="of each kind of made-up vector")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = vectors(args.buckets)
    rows = [row(case, label, vector) for case in CASES for label, vector in found.items()]
    if args.markdown:
        print("| " + " | ".join(COLUMNS) + " |")
        print("| --- | --- " + "| ---: " * (len(COLUMNS) - 2) + "|")
        for cells in rows:
            print("| " + " | ".join(cells) + " |")
        return
    print_table(COLUMNS, rows, texts=2, title="bits of one vector")


if __name__ == "__main__":
    main()
