"""Compile every Numba kernel into its cache."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from hvd_adaptive.coding.packing import Packing
from hvd_adaptive.device import HOST
from hvd_adaptive.kernels import (
    cpu,
    cpu_bucket,
    cpu_codes,
    cpu_ecdq,
    cpu_elias,
    cpu_huffman,
    cpu_levels,
    cpu_natural,
    cpu_onebit,
    cpu_qcs,
    cpu_sparse,
    cpu_variance,
)
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
    # QSGD's 5 and 9 levels, with which the ORQ paper compares.
    for count in (3, 5):
        yield kernel_table(uniform_magnitudes(count, False), False)


def packings() -> list[Packing]:
    """Of those tables, each once."""
    return list(dict.fromkeys(table.packing for table in tables()))


def warm_encoders(place: int) -> None:
    """Run encode once with each table. place: of the progress bar."""
    flat = torch.linspace(-1, 1, 1000, **HOST)
    for table in tqdm(list(tables()), desc="compiling encoders", unit="table", position=place):
        words = torch.empty(table.packing.words(1000), dtype=torch.int32, device="cpu")
        cpu.encode(flat, torch.empty(1, **HOST), words, 1000, "l2", table, 0)


def warm_decoders(place: int) -> None:
    """Run decode once with each table."""
    for table in tqdm(list(tables()), desc="compiling decoders", unit="table", position=place):
        words = torch.zeros(table.packing.words(1000), dtype=torch.int32, device="cpu")
        cpu.decode_add(
            [(torch.ones(1, **HOST), words)], 1000, table, 1.0, torch.zeros(1000, **HOST)
        )


def warm_others(place: int) -> None:
    """Run scans, and the kernels of schemes that have their own."""
    flat = torch.linspace(-1, 1, 100, **HOST)
    actions: list[Callable[[], object]] = [
        lambda: cpu.bucket_norms(flat, 100, "l2"),
        lambda: cpu.clipped(flat, 100, 2.5),
        lambda: cpu.histogram(flat, 10.0),
        lambda: cpu.checksum(flat.view(torch.int32), 0),
        cpu_huffman.warm,
        cpu_elias.warm,
        cpu_ecdq.warm,
        cpu_levels.warm,
        cpu_natural.warm,
        cpu_onebit.warm,
        cpu_sparse.warm,
        cpu_variance.warm,
        *(functools.partial(cpu_codes.warm, packing) for packing in packings()),
        *(functools.partial(cpu_bucket.warm, alphabet) for alphabet in (2, 3, 5, 9, 17)),
        *(functools.partial(cpu_qcs.warm, alphabet) for alphabet in (2, 3, 5, 7, 9)),
    ]
    for action in tqdm(actions, desc="compiling the rest", unit="kernel", position=place):
        action()


def forget() -> None:
    """Remove cached code: Numba does not see that a helper in another file has changed."""
    for file in (Path(__file__).parent / "__pycache__").glob("*.nb[ic]"):
        file.unlink(missing_ok=True)


def compile_all() -> None:
    """Compile everything anew, each kernel in one process: Numba's index of a kernel's cache is not
    safe against two writers."""
    forget()
    parts = (warm_encoders, warm_decoders, warm_others)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for done in [pool.submit(part, place) for place, part in enumerate(parts)]:
            done.result()
