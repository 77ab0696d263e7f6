"""Code and decode runs of symbols by prefix codes over blocks (coding/prefix_code.py) in Triton.

The bits are the same as in reference/huffman.py. A parse tree is walked symbol by symbol, and a
stream is read code by code: one lane does so for each run when it writes, and for each segment when
it reads. The kernels are fast because there are many lanes. Runs are numbered segment by segment,
those of a segment in the order of its books.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from hvd_adaptive.device import from_host
from hvd_adaptive.kernels.prefix_tables import QUICK_BITS, PrefixTables
from hvd_adaptive.kernels.triton.launch import kernel, launch, on_device

_LANES = 32
# Symbols that a turn of the reading loop copies, and turns between two checks of which lanes are
# done.
_COPIED, _TURNS = 4, 4
_QUICK, _ENTRIES = tl.constexpr(QUICK_BITS), tl.constexpr(1 << QUICK_BITS)
# Entries of ``Tables.places`` for each book.
_PLACES = tl.constexpr(5)
# In ``flags``, the values for corrupt segments begin here: a segment's number is added.
SEGMENT_FLAG = 16


@dataclass(frozen=True)
class Tables:
    """Hold the tables of some books of one alphabet, end to end on a device.

    steps, ends, quick, lookup: int64, as in PrefixTables. pool: uint8 or int16. places: int64
    (books, 5), the places at which a book's steps, ends and lookup begin, lookup's mask, and the
    place at which the book's pool begins.
    """

    books: int
    alphabet: int
    steps: torch.Tensor
    ends: torch.Tensor
    quick: torch.Tensor
    lookup: torch.Tensor
    pool: torch.Tensor
    places: torch.Tensor


@functools.lru_cache(maxsize=32)
def tables(books: tuple[PrefixTables, ...], dtype: torch.dtype, device: torch.device) -> Tables:
    """Copy books' tables to a device and wait. dtype: of symbols, torch.uint8 or torch.int16."""
    kind = np.dtype(np.uint8 if dtype == torch.uint8 else np.uint16)
    pools = [book.pool(kind).view(kind) for book in books]
    parts = [
        [book.steps for book in books],
        [book.ends for book in books],
        [book.lookup for book in books],
        pools,
    ]
    starts = [np.cumsum([0, *(part.size for part in of_kind)])[:-1] for of_kind in parts]
    masks = [(1 << book.width) - 1 for book in books]
    places = np.stack([*starts[:3], masks, starts[3]], axis=1).astype(np.int64)
    quick = [book.quick for book in books]
    words = [np.concatenate(of_kind).view(np.int64) for of_kind in (*parts[:3], quick)]
    steps, ends, lookup, quick_words = (on_device(array, device) for array in words)
    symbols = np.concatenate(pools)
    pool = on_device(symbols if kind.itemsize == 1 else symbols.view(np.int16), device)
    return Tables(
        len(books),
        books[0].alphabet,
        steps,
        ends,
        quick_words,
        lookup,
        pool,
        on_device(places, device),
    )


def lengths(
    runs: torch.Tensor, begins: torch.Tensor, counts: torch.Tensor, books: Tables
) -> torch.Tensor:
    """Return the bits (int32) of each run's codes.

    runs: symbols, of the tables' dtype. begins, counts: int64 and int32, the place at which a run
    begins in ``runs`` and the number of its symbols.
    """
    bits = torch.empty_like(counts)
    _walk(runs, begins, counts, begins, begins, bits, books, WRITE=False)
    return bits


def write(
    runs: torch.Tensor,
    begins: torch.Tensor,
    counts: torch.Tensor,
    at: torch.Tensor,
    wanted: torch.Tensor,
    out: torch.Tensor,
    books: Tables,
) -> None:
    """Write each run's codes from bit ``at`` (int64) of ``out`` (int32, zeros) on.

    wanted: int64, one number; if it is 0, nothing is written.
    """
    _walk(runs, begins, counts, at, wanted, out, books, WRITE=True)


def _walk(
    runs: torch.Tensor,
    begins: torch.Tensor,
    counts: torch.Tensor,
    at: torch.Tensor,
    wanted: torch.Tensor,
    out: torch.Tensor,
    books: Tables,
    WRITE: bool,
) -> None:
    total = begins.numel()
    launch(
        _walk_kernel,
        -(-total // _LANES),
        runs,
        runs,
        begins,
        counts,
        at,
        wanted,
        out,
        books.steps,
        books.ends,
        books.places,
        total,
        books.alphabet,
        CLASSES=books.books,
        WRITE=WRITE,
        LANES=_LANES,
        num_warps=1,
    )


def read(
    streams: Sequence[torch.Tensor],
    head: int,
    segments: int,
    ends: int,
    begins: torch.Tensor,
    counts: torch.Tensor,
    books: Tables,
    runs: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    """Fill ``runs`` from streams that were cut into ``segments``.

    streams: int32. head: words before a stream's list of segments' ends; if there are any, the
    first must be 0, else the stream is left alone, as is a stream too short for the list. ends:
    numbers listed for each segment, 1 or 2; the codes end at the first of them, the segment at the
    last. begins, counts: int64 and int32, of the first stream's runs, the second's, and so on.
    flags: int32, one for each stream, raised to at least SEGMENT_FLAG plus the number of a corrupt
    segment; the runs of such a segment are undefined. No byte outside a stream is read.
    """
    first, lanes = streams[0].data_ptr(), len(streams) * segments
    facts = torch.tensor([[s.data_ptr() - first, 4 * s.numel()] for s in streams], device="cpu")
    launch(
        _read_kernel,
        -(-lanes // _LANES),
        runs,
        streams[0],
        from_host(facts, runs.device),
        begins,
        counts,
        runs,
        flags,
        books.quick,
        books.lookup,
        books.pool,
        books.places,
        lanes,
        segments,
        head,
        CLASSES=books.books,
        ENDS=ends,
        FLAG=SEGMENT_FLAG,
        COPIED=_COPIED,
        TURNS=_TURNS,
        LANES=_LANES,
        num_warps=1,
    )


@triton.jit
def _put(code, length, buffer, fill, word, fresh):
    """Append codes (uint64) of ``length`` bits (int32). A run's first word may hold the end of the
    run before it and is therefore added; its other words belong to the run alone.
    """
    buffer = buffer | (code << fill.to(tl.uint64))
    fill = fill + length
    full = fill >= 32
    low = buffer.to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_add(word, low, mask=full & fresh, sem="relaxed")
    tl.store(word, low, mask=full & (fresh == 0))
    buffer = tl.where(full, buffer >> 32, buffer)
    fill = tl.where(full, fill - 32, fill)
    return buffer, fill, word + full.to(tl.int32), fresh & (full == 0)


@kernel
def _walk_kernel(
    runs,
    begins,
    counts,
    at,
    wanted,
    out,
    steps,
    ends,
    tables,
    total: tl.int64,
    alphabet: tl.int64,
    CLASSES: tl.constexpr,
    WRITE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Walk a run in each lane. out: the stream's words or, if nothing is written, bits of runs."""
    run = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = run < total
    if WRITE:
        there = there & (tl.load(wanted) != 0)
    place = tables + run % CLASSES * _PLACES
    symbols = runs + tl.load(begins + run, mask=there, other=0)
    count = tl.load(counts + run, mask=there, other=0)
    table = steps + tl.load(place)
    state = tl.zeros((LANES,), tl.int64)
    bits = tl.zeros((LANES,), tl.int32)
    buffer, fresh, word = tl.zeros((LANES,), tl.uint64), there, out + state
    if WRITE:
        bit = tl.load(at + run, mask=there, other=0)
        bits, word = (bit & 31).to(tl.int32), out + (bit >> 5)
    for i in range(tl.max(count)):
        live = i < count
        symbol = tl.load(symbols + i, mask=live, other=0).to(tl.int64)
        step = tl.load(table + state + symbol, mask=live, other=0).to(tl.uint64, bitcast=True)
        length = (step & 0xFF).to(tl.int32)
        state = tl.where(live, (step >> 32).to(tl.int64), state)
        if WRITE:
            buffer, bits, word, fresh = _put(
                (step >> 8) & 0xFFFF, length, buffer, bits, word, fresh
            )
        else:
            bits += length
    last = ends + tl.load(place + 1) + state // alphabet
    end = tl.load(last, mask=there, other=0).to(tl.uint64, bitcast=True)
    length = (end & 0xFF).to(tl.int32)
    if WRITE:
        buffer, bits, word, fresh = _put((end >> 8) & 0xFFFF, length, buffer, bits, word, fresh)
        low = buffer.to(tl.uint32).to(tl.int32, bitcast=True)
        tl.atomic_add(word, low, mask=there & (low != 0), sem="relaxed")
    else:
        tl.store(out + run, bits + length, mask=there)


@triton.jit
def byte_of(words, at, mask):
    """Return the byte (int32) at a place (int64) counted from ``words``."""
    word = tl.load(words + (at >> 2), mask=mask, other=0).to(tl.uint32, bitcast=True)
    return ((word >> ((at & 3) * 8).to(tl.uint32)) & 0xFF).to(tl.int32)


@triton.jit
def segment_ends(words, origin, size, segment, segments, there, ENDS: tl.constexpr):
    """Return the begins of segments (int64), the ends of their codes and their own ends, in bytes
    from ``words`` on (int64), and whether these are possible.

    origin: of the list of ends, in bytes from ``words``. size: of the stream, in bytes.
    """
    listed, data = words + (origin >> 2) + segment * ENDS, origin + 4 * ENDS * segments
    start = tl.load(listed - 1, mask=there & (segment > 0), other=0)
    middle = tl.load(listed, mask=there, other=0)
    stop = tl.load(listed + (ENDS - 1), mask=there, other=0)
    start = start.to(tl.uint32, bitcast=True).to(tl.int64)
    middle = middle.to(tl.uint32, bitcast=True).to(tl.int64)
    stop = stop.to(tl.uint32, bitcast=True).to(tl.int64)
    room = size - 4 * ENDS * segments
    good = there & (start <= middle) & (middle <= stop) & (stop <= room)
    # At most 7 bytes of padding follow the last one, all 0.
    last = good & (segment == segments - 1)
    good = good & ((last == 0) | (room - stop <= 7))
    for k in tl.static_range(7):
        padding = byte_of(words, data + stop + k, last & (stop + k < room))
        good = good & (padding == 0)
    return data + start, data + middle, data + stop, good


@kernel
def _read_kernel(
    words,
    facts,
    begins,
    counts,
    runs,
    flags,
    quick,
    lookup,
    pool,
    tables,
    lanes: tl.int64,
    segments: tl.int64,
    head: tl.int64,
    CLASSES: tl.constexpr,
    ENDS: tl.constexpr,
    FLAG: tl.constexpr,
    COPIED: tl.constexpr,
    TURNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Read a segment in each lane. facts: int64 (streams, 2), distances from the first stream and
    sizes, in bytes.
    """
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = lane < lanes
    stream = lane // segments
    segment = lane - stream * segments
    origin = tl.load(facts + 2 * stream, mask=there, other=0)
    size = tl.load(facts + 2 * stream + 1, mask=there, other=0)
    kind = tl.load(words + (origin >> 2), mask=there & (head > 0), other=0)
    origin, size = origin + 4 * head, size - 4 * head
    there = there & (kind == 0) & (size >= 4 * ENDS * segments)
    start, middle, _stop, good = segment_ends(words, origin, size, segment, segments, there, ENDS)
    bit, end, limit = 8 * start, 8 * middle, (origin + size) >> 2
    own = tl.zeros((LANES,), tl.int64)
    at = tl.load(begins + lane * CLASSES, mask=good, other=0)
    until = at + tl.load(counts + lane * CLASSES, mask=good, other=0)
    source, left = tl.zeros((LANES,), tl.int64), tl.zeros((LANES,), tl.int64)
    live = good
    while tl.max(live.to(tl.int32)) > 0:
        for _ in tl.static_range(TURNS):
            for k in tl.static_range(COPIED):
                copied = live & (k < left)
                symbol = tl.load(pool + source + k, mask=copied, other=0)
                tl.store(runs + at + k, symbol, mask=copied)
            taken = tl.minimum(left, COPIED)
            at, source, left = at + taken, source + taken, left - taken
            # Go to the next run if this one is full.
            full = live & (at == until) & (left == 0)
            own = own + full.to(tl.int64)
            live = live & (own < CLASSES)
            full = full & live
            first = tl.load(begins + lane * CLASSES + own, mask=full, other=0)
            count = tl.load(counts + lane * CLASSES + own, mask=full, other=0)
            at, until = tl.where(full, first, at), tl.where(full, first + count, until)
            # Read the next code if the last one's symbols have been copied.
            wanting = live & (left == 0) & (at < until)
            place = tables + tl.where(live, own, 0) * _PLACES
            word = bit >> 5
            low = tl.load(words + word, mask=wanting & (word < limit), other=0)
            high = tl.load(words + word + 1, mask=wanting & (word + 1 < limit), other=0)
            both = low.to(tl.uint32, bitcast=True).to(tl.uint64)
            both = both | (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
            window = (both >> (bit & 31).to(tl.uint64)).to(tl.int64)
            # The quick look-up may return as many symbols as it has bits.
            many = wanting & (until - at >= _QUICK)
            near = quick + tl.where(live, own, 0) * _ENTRIES + (window & (_ENTRIES - 1))
            entry = tl.load(near, mask=many, other=0)
            far = lookup + tl.load(place + 2) + (window & tl.load(place + 3))
            entry = entry | tl.load(far, mask=wanting & (entry == 0), other=0)
            after = bit + (entry & 0xFF)
            wrong = wanting & ((after == bit) | (after > end))
            good, live = good & (wrong == 0), live & (wrong == 0)
            wanting = wanting & (wrong == 0)
            bit = tl.where(wanting, after, bit)
            given = tl.minimum((entry >> 8) & 0xFFFFFF, until - at)
            left = tl.where(wanting, given, left)
            source = tl.where(wanting, tl.load(place + 4) + (entry >> 32), source)
    # All bytes must have been used, and the bits that fill the last one must be 0.
    rest = end - bit
    good = good & (rest < 8)
    byte = byte_of(words, middle - 1, good & (rest > 0))
    filling = byte >> tl.where(good, 8 - rest, 8).to(tl.int32)
    good = good & ((rest == 0) | (filling == 0))
    told = (segment + FLAG).to(tl.int32)
    tl.atomic_max(flags + stream, told, mask=there & (good == 0), sem="relaxed")
