"""Compile every Numba kernel into its cache."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from hvd_adaptive.base.tensors import HOST
from hvd_adaptive.kernels.dithered import Stretch
from hvd_adaptive.kernels.eden import Buckets, Levels
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
    zeros,
)
from hvd_adaptive.kernels.packing import Packing, packing_of
from hvd_adaptive.kernels.prefix_tables import PrefixTables
from hvd_adaptive.kernels.qcs import Run
from hvd_adaptive.kernels.tables import KernelTable, kernel_table


def each_table() -> Iterator[KernelTable]:
    """Yield one table of each shape that the schemes use: uneven, uniform, exponential."""
    for bits, symmetric in itertools.product(range(2, 9), (True, False)):
        count = 1 << (bits - 1)
        uniform = np.linspace(1 / (2 * count - 1) if symmetric else 0, 1, count)
        exponential = 0.9 ** np.arange(count - 1, -1, -1.0)
        exponential[0] *= symmetric
        for magnitudes in (uniform**1.1, uniform, exponential):
            yield kernel_table(magnitudes, symmetric)
    # The ORQ paper compares with QSGD's 5 and 9 levels.
    for count in (3, 5):
        yield kernel_table(np.linspace(0, 1, count), False)


def _actions() -> list[Callable[[], object]]:
    """Return what runs each kernel."""
    shapes = list(each_table())
    return [
        *(_scans, _schemes, _levels, _dithered, _lossless),
        *(functools.partial(_table, table) for table in shapes),
        *(functools.partial(_codes, each) for each in {table.packing for table in shapes}),
        *(functools.partial(_bucket, alphabet) for alphabet in (2, 3, 5, 9, 17)),
        *(functools.partial(_eden, bits) for bits in range(1, 9)),
        *(functools.partial(_qcs, alphabet) for alphabet in (2, 3, 5, 7, 9)),
    ]


def _line(count: int) -> torch.Tensor:
    return torch.linspace(-1, 1, count, **HOST)


def _words(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device="cpu")


def _table(table: KernelTable) -> None:
    scales, words = torch.empty(1, **HOST), _words(table.packing.words(1000))
    tables.encode(_line(1000), scales, words, 1000, "l2", table, 0)
    tables.decode_add([(scales, words)], 1000, table, 1.0, torch.zeros(1000, **HOST))


def _scans() -> None:
    flat = _line(100)
    tables.bucket_norms(flat, 100, "l2")
    tables.clipped(flat, 100, 2.5)
    tables.histogram(flat, 10.0)
    tables.errors(flat, 100, "l2", kernel_table(np.array([0.5, 1.0]), True))
    checksum.checksum(flat.view(torch.int32), 0)


def _schemes() -> None:
    flat, words, out = _line(100), _words(16), torch.zeros(100, **HOST)
    exponents = torch.empty(100, dtype=torch.uint8, device="cpu")
    natural.encode(flat, exponents, words, 100, 0)
    natural.decode_add([(exponents, words)], 1.0, out)
    onebit.encode(flat, torch.empty(1, 2, **HOST), words, 100)
    sections = sparse.encode(flat.numpy(), 100, 0.1, 3, 0)
    sparse.add(*sections, 100, np.int64(3), out.numpy())


def _levels() -> None:
    flat = _line(300)
    levels.orq_levels(flat, 300, 3, None, 1)
    levels.quantile_levels(flat, 300, 3, None)
    levels.mean_magnitudes(flat, 300, None)
    levels.symmetric_levels(flat, 300, None)
    levels.conditional_means(flat, 300, None, True)


def _dithered() -> None:
    flat, out = _line(100).numpy(), np.zeros(100, np.float32)
    steps = ecdq.bucket_steps(flat, 100, 1.0)
    ecdq.add(ecdq.quantize(flat, steps, 100, 0), steps, 100, 0, out)
    where = Stretch(steps, 100, np.uint64(0), 0, 100)
    for dtype in (np.uint8, np.uint16):
        runs = np.ones((4, 100), dtype)
        _, escaped = ecdq.split(flat, where, 1, runs, np.empty(100, np.int32))
        ecdq.counts(where, 4)
        ecdq.add_runs(runs, ecdq.numbers(ecdq.put_numbers(escaped, 1), 1), where, 1, out)


def _lossless() -> None:
    """Run the coders of codes, and those of the places of zeros."""
    codes, out = np.full(100, 1, np.uint8), np.empty(100, np.uint8)
    codes[::9] = 2
    elias.decode(out[: elias.encode(codes, 3, out)], 3, codes)
    book = PrefixTables(np.array([[-1, -2]], np.int32), np.ones(2, np.uint8))
    rows, outs = np.zeros((2, 10), np.uint8), np.zeros((2, huffman.most_bytes(10)), np.uint8)
    huffman.encode_two(rows, book, outs)
    huffman.decode_two(outs[0], outs[1], book, rows)
    for dtype in (np.uint8, np.uint16):
        symbols = np.zeros(10, dtype)
        end = huffman.encode(symbols, book, outs[0])
        huffman.decode(outs[0][: -(-end // 8)], 0, book, symbols)
    flat = _line(101)
    flat[50:60] = 0
    if zeros.has_zeros(flat):
        mask, runs = zeros.mark(flat)
        zeros.read(zeros.write(mask, runs), runs)
        values = torch.empty(runs.coordinates - runs.zeros, **HOST)
        zeros.take(flat, mask, values)
        zeros.put(values, mask, flat, True)


def _codes(packing: Packing) -> None:
    bare, words = torch.zeros(100, dtype=torch.uint8, device="cpu"), _words(packing.words(100))
    codes.pack(bare, packing, words)
    codes.unpack(words, packing, bare)


def _bucket(alphabet: int) -> None:
    flat, own = _line(300), _line(alphabet).view(1, -1)
    words = _words(packing_of(alphabet).words(300))
    bucket.round_codes(flat, own, words, 300, 0)
    bucket.decode_add([(own, words)], 300, 1.0, torch.zeros(300, **HOST))
    if alphabet == 2:
        bucket.cut_codes(flat, torch.zeros(1, **HOST), words, 300)


def _eden(bits: int) -> None:
    """Run EDEN with some levels of so many bits; compiled code does not depend on their values."""
    own, buckets = Levels.of(np.linspace(-1.0, 1.0, 1 << bits)), Buckets(600, 64)
    scales = torch.empty(buckets.count, **HOST)
    words = _words(packing_of(1 << bits).words(buckets.codes))
    eden.encode(_line(600), scales, words, 64, own, 0, 1)
    eden.decode_add([(scales, words)], 64, own, 0, [1], torch.zeros(600, **HOST))


def _qcs(alphabet: int) -> None:
    runs, scales = [Run(0, 192, 0, 96, 50, 1.0)], torch.empty(2, **HOST)
    words = _words(packing_of(alphabet).words(100))
    qcs.encode(_line(192), scales, words, runs, alphabet, 0)
    qcs.decode_add([(scales, words)], [0], runs, alphabet, 1.0, torch.zeros(192, **HOST))


def forget() -> None:
    """Remove cached code: Numba does not see that a helper in another file has changed."""
    for file in (Path(__file__).parent / "__pycache__").glob("*.nb[ic]"):
        file.unlink(missing_ok=True)


def compile_all() -> None:
    """Compile everything anew, on all processors."""
    forget()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        running = [pool.submit(action) for action in _actions()]
        for done in tqdm(as_completed(running), "compiling", len(running), unit="kernel"):
            done.result()
