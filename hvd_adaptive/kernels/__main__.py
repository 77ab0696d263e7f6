"""Compile every Numba kernel into its cache: ``python -m hvd_adaptive.kernels``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from hvd_adaptive.coding.fixed import packed_words
from hvd_adaptive.kernels import cpu
from hvd_adaptive.kernels.tables import kernel_table


def warm(bits: int) -> None:
    """Run encode and decode once at this width."""
    flat = torch.linspace(-1, 1, 1000)
    table = kernel_table(np.linspace(0, 1, (1 << (bits - 1)) + 1)[1:], bits, symmetric=True)
    scales, words = torch.empty(1), torch.empty(packed_words(1000, bits), dtype=torch.int32)
    cpu.encode(flat, scales, words, 1000, "l2", table, 0)
    cpu.decode_add([(scales, words)], 1000, table, 1.0, torch.zeros(1000))


def forget() -> None:
    """Remove cached code: Numba does not see that a helper in another file has changed."""
    for file in (Path(__file__).parent / "__pycache__").glob("*.nb[ic]"):
        file.unlink(missing_ok=True)


def main() -> None:
    """Compile everything anew."""
    forget()
    flat = torch.linspace(-1, 1, 100)
    for bits in tqdm(range(1, 9), desc="compiling kernels", unit="width"):
        warm(bits)
    cpu.bucket_norms(flat, 100, "l2")
    cpu.histogram(flat, 10.0)
    cpu.checksum(flat.view(torch.int32), 0)


if __name__ == "__main__":
    main()
