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

from hvd_adaptive.base.device import HOST
from hvd_adaptive.kernels.eden import Levels
from hvd_adaptive.kernels.numba import (
    bucket,
    checksum,
    codes,
    ecdq,
    eden,
    elias,
    huffman,
    levels,
    natural,
    onebit,
    qcs,
    sparse,
    tables,
    variance,
    zeros,
)
from hvd_adaptive.kernels.packing import Packing
from hvd_adaptive.kernels.tables import KernelTable, kernel_table


def _levels(bits: int) -> Levels:
    """Return some levels of so many bits; compiled code does not depend on their values."""
    return Levels.of(np.linspace(-1.0, 1.0, 1 << bits))


def each_table() -> Iterator[KernelTable]:
    """Yield one table of each shape that the schemes use: uneven, uniform, exponential."""
    for bits, symmetric in itertools.product(range(2, 9), (True, False)):
        count = 1 << (bits - 1)
        uneven = np.linspace(0 if not symmetric else 1 / count, 1, count) ** 1.1
        for magnitudes in (uneven, _uniform(count, symmetric), _exponential(count, symmetric)):
            yield kernel_table(magnitudes, symmetric)
    # The ORQ paper compares with QSGD's 5 and 9 levels.
    for count in (3, 5):
        yield kernel_table(_uniform(count, False), False)


def _uniform(count: int, symmetric: bool) -> np.ndarray:
    """Return equal steps of the signed table (levels/magnitudes.py)."""
    return np.linspace(1 / (2 * count - 1) if symmetric else 0, 1, count)


def _exponential(count: int, symmetric: bool) -> np.ndarray:
    """Return powers of 0.9 (levels/magnitudes.py)."""
    powers = 0.9 ** np.arange(count - 1, -1, -1.0)
    powers[0] *= symmetric
    return powers


def packings() -> list[Packing]:
    """Return the packings of those tables, each once."""
    return list(dict.fromkeys(table.packing for table in each_table()))


def warm_encoders(place: int) -> None:
    """Run encode once with each table. place: of the progress bar."""
    flat = torch.linspace(-1, 1, 1000, **HOST)
    for table in tqdm(list(each_table()), desc="compiling encoders", unit="table", position=place):
        words = torch.empty(table.packing.words(1000), dtype=torch.int32, device="cpu")
        tables.encode(flat, torch.empty(1, **HOST), words, 1000, "l2", table, 0)


def warm_decoders(place: int) -> None:
    """Run decode once with each table."""
    for table in tqdm(list(each_table()), desc="compiling decoders", unit="table", position=place):
        words = torch.zeros(table.packing.words(1000), dtype=torch.int32, device="cpu")
        tables.decode_add(
            [(torch.ones(1, **HOST), words)], 1000, table, 1.0, torch.zeros(1000, **HOST)
        )


def warm_others(place: int) -> None:
    """Run scans, and the kernels of schemes that have their own."""
    flat = torch.linspace(-1, 1, 100, **HOST)
    actions: list[Callable[[], object]] = [
        lambda: tables.bucket_norms(flat, 100, "l2"),
        lambda: tables.clipped(flat, 100, 2.5),
        lambda: tables.histogram(flat, 10.0),
        lambda: checksum.checksum(flat.view(torch.int32), 0),
        huffman.warm,
        elias.warm,
        ecdq.warm,
        levels.warm,
        natural.warm,
        onebit.warm,
        sparse.warm,
        variance.warm,
        zeros.warm,
        *(functools.partial(codes.warm, packing) for packing in packings()),
        *(functools.partial(bucket.warm, alphabet) for alphabet in (2, 3, 5, 9, 17)),
        *(functools.partial(eden.warm, _levels(bits)) for bits in range(1, 9)),
        *(functools.partial(qcs.warm, alphabet) for alphabet in (2, 3, 5, 7, 9)),
    ]
    for action in tqdm(actions, desc="compiling the rest", unit="kernel", position=place):
        action()


def forget() -> None:
    """Remove cached code: Numba does not see that a helper in another file has changed."""
    for file in (Path(__file__).parent / "__pycache__").glob("*.nb[ic]"):
        file.unlink(missing_ok=True)


def compile_all() -> None:
    """Compile everything anew, each kernel in one process: Numba's index of a kernel's cache is not
    safe against two writers.
    """
    forget()
    parts = (warm_encoders, warm_decoders, warm_others)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for done in [pool.submit(part, place) for place, part in enumerate(parts)]:
            done.result()
