"""Compile every Numba kernel into its cache: ``python -m hvd_adaptive.kernels``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from hvd_adaptive.kernels import cpu, cpu_bucket, cpu_levels, cpu_natural, cpu_onebit, cpu_sparse
from hvd_adaptive.kernels.tables import KernelTable, kernel_table
from hvd_adaptive.levels import exponential_magnitudes, uniform_magnitudes


def tables() -> Iterator[KernelTable]:
    """One table of each shape that the schemes use: uneven, uniform, exponential."""
    for bits, symmetric in itertools.product(range(2, 9), (True, False)):
        count = 1 << (bits - 1)
        uneven = np.linspace(0 if not symmetric else 1 / count, 1, count) ** 1.1
        for magnitudes in (
            uneven,
            uniform_magnitudes(count, symmetric),
            exponential_magnitudes(count, 0.9, symmetric),
        ):
            yield kernel_table(magnitudes, symmetric)


def warm(table: KernelTable) -> None:
    """Run encode and decode once with this table."""
    flat = torch.linspace(-1, 1, 1000)
    scales, words = torch.empty(1), torch.empty(table.packing.words(1000), dtype=torch.int32)
    cpu.encode(flat, scales, words, 1000, "l2", table, 0)
    cpu.decode_add([(scales, words)], 1000, table, 1.0, torch.zeros(1000))


def warm_schemes() -> None:
    """Run the kernels of schemes that have their own."""
    cpu_levels.warm()
    for alphabet in (2, 3, 5, 9, 17, 33, 65, 129):
        cpu_bucket.warm(alphabet)
    cpu_natural.warm()
    cpu_onebit.warm()
    cpu_sparse.warm()


def forget() -> None:
    """Remove cached code: Numba does not see that a helper in another file has changed."""
    for file in (Path(__file__).parent / "__pycache__").glob("*.nb[ic]"):
        file.unlink(missing_ok=True)


def main() -> None:
    """Compile everything anew."""
    forget()
    flat = torch.linspace(-1, 1, 100)
    cpu.bucket_norms(flat, 100, "l2")
    cpu.clipped(flat, 100, 2.5)
    cpu.histogram(flat, 10.0)
    cpu.checksum(flat.view(torch.int32), 0)
    warm_schemes()
    for table in tqdm(list(tables()), desc="compiling kernels", unit="table"):
        warm(table)


if __name__ == "__main__":
    main()
