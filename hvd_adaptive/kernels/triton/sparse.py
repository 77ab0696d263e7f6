"""Sparsify at random in Triton, with bodies (kernels/sparse.py) that equal the CPU's byte for byte.

Encoding: thresholds are found bucket by bucket, and coordinates are marked one by one. Tiles count
the bits and exact values of their coordinates; sums of these counts give the places of both, which
are then written.

Decoding: a stream has no known starting point but its first bit. So from every bit the end of the
code that would begin there is found, and codes are those that are met on the way from the first
one: ways of one step, then of two, four, and so on, are composed of each other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hvd_adaptive.device import HostCopy
from hvd_adaptive.errors import BodyCheck
from hvd_adaptive.kernels.constants import SMALLEST_NORM
from hvd_adaptive.kernels.sparse import unreadable
from hvd_adaptive.kernels.tables import UNIFORM_SCALE
from hvd_adaptive.kernels.triton.lanes import fold, lane_tree, largest_bits
from hvd_adaptive.kernels.triton.launch import kernel, launch, whole_words
from hvd_adaptive.kernels.triton.places import for_each, own_integer, own_place

_TILE = 1024
_SMALLEST = tl.constexpr(SMALLEST_NORM)
_SCALE, _HALF_SCALE = tl.constexpr(float(UNIFORM_SCALE)), tl.constexpr(float(UNIFORM_SCALE) / 2)
_LARGEST = tl.constexpr(0x7F7FFFFF)  # bits of the largest finite float32
# Marks of kept coordinates: sent as plus or minus the threshold, or exactly.
_PLUS, _MINUS, _EXACT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


def encode_body(
    flat: torch.Tensor, bucket_size: int, density: float, k: int, key: int, body: torch.Tensor
) -> int | HostCopy:
    """See reference.sparse.encode_body."""
    if not flat.numel():
        body.zero_()
        return body.numel()
    n, device, filled = flat.numel(), flat.device, whole_words(body)
    words, head = filled.view(torch.int32).zero_(), 2 + -(-n // bucket_size)
    limits, marks = words[2:head].view(torch.float32), flat.new_empty(n, dtype=torch.uint8)
    (bits_of_density,) = struct.unpack("<q", struct.pack("<d", density))
    launch(
        _limits_kernel,
        limits.numel(),
        flat,
        flat,
        limits,
        n,
        bucket_size,
        bits_of_density,
        num_warps=1,
    )
    for_each(_marks_kernel, flat, n, bucket_size, key, flat, limits, marks)
    tiles = -(-n // _TILE)
    first, last, bits, exact = torch.empty(4, tiles, dtype=torch.int64, device=device).unbind()
    launch(_sizes_kernel, tiles, flat, marks, first, last, bits, exact, n, k, TILE=_TILE)
    before = last.new_full((tiles,), -1)
    before[1:] = last.cummax(0).values[:-1]
    bits += torch.where(first >= 0, (first - before - 1) >> k, 0)
    bits_to, exact_to = bits.cumsum(0), exact.cumsum(0)
    words[:2].copy_(exact_to[-1:].clone().view(torch.int32))
    launch(
        _put_kernel,
        tiles,
        flat,
        flat,
        marks,
        before,
        bits_to - bits,
        exact_to - exact,
        exact_to[-1:],
        words[head:],
        n,
        words.numel() - head,
        k,
        TILE=_TILE,
    )
    if filled is not body:
        body.copy_(filled[: body.numel()])
    return HostCopy(4 * (head + exact_to[-1:] + (bits_to[-1:] + 31) // 32))


def add_bodies(
    bodies: Sequence[torch.Tensor], bucket_size: int, k: int, out: torch.Tensor
) -> BodyCheck | None:
    """See reference.sparse.add_bodies."""
    if not out.numel():
        return None
    flags = flags_of(bodies, bucket_size, k, out)

    def judge() -> None:
        if flags.get().any():
            raise unreadable(out.numel())

    return judge


def flags_of(
    bodies: Sequence[torch.Tensor], bucket_size: int, k: int, out: torch.Tensor
) -> HostCopy:
    """Add the values of ``bodies``; return int32 flags, 0 for each body that could be read."""
    flags = torch.zeros(len(bodies), dtype=torch.int32, device=out.device)
    for body, flag in zip(bodies, flags.split(1), strict=True):
        _add(whole_words(body, True).view(torch.int32), bucket_size, k, out, flag)
    return HostCopy(flags)


def _add(
    words: torch.Tensor, bucket_size: int, k: int, out: torch.Tensor, flag: torch.Tensor
) -> None:
    """Add one body (int32)."""
    n, device, head = out.numel(), out.device, 2 + -(-out.numel() // bucket_size)
    limits, data = words[2:head].view(torch.float32), words[head:]
    for_each(_broken_kernel, out, n, bucket_size, 0, limits, out)
    bits = 32 * data.numel()
    # For each word, the next word that is not 0.
    there = torch.arange(data.numel(), device=device)
    there = torch.where(data != 0, there, data.numel())
    following = torch.full((data.numel() + 1,), data.numel(), dtype=torch.int64, device=device)
    following[:-1] = there.flip(0).cummin(0).values.flip(0) if data.numel() else there
    narrow = torch.int32 if bits < 1 << 31 else torch.int64
    ways = torch.empty(bits + 1, dtype=narrow, device=device)
    again, met = torch.empty_like(ways), torch.zeros(bits + 1, dtype=torch.uint8, device=device)
    exact, tiles = words[:2].clone().view(torch.int64), -(-(bits + 1) // _TILE)
    stream = (data, following, bits, n, k)
    launch(_ways_kernel, tiles, out, *stream, ways, met, exact, flag, TILE=_TILE)
    codes = min(n, bits // (k + 2)) + 1
    for _ in range(codes.bit_length()):
        launch(_double_kernel, tiles, out, ways, again, met, bits, TILE=_TILE)
        ways, again = again, ways
    moved, used = torch.empty(2, tiles, dtype=torch.int64, device=device).unbind()
    launch(_moves_kernel, tiles, out, *stream, met, moved, used, flag, TILE=_TILE)
    index_to, used_to = moved.cumsum(0), used.cumsum(0)
    launch(
        _values_kernel,
        tiles,
        out,
        *stream,
        met,
        index_to - moved,
        used_to - used,
        exact,
        limits,
        bucket_size,
        out,
        flag,
        TILE=_TILE,
    )
    flag.copy_(torch.maximum(flag, (used_to[-1:] != exact).to(torch.int32)))


@triton.jit
def _size(v):
    size = tl.abs(v)
    return tl.where(size < _SMALLEST, 0.0, size)


@triton.jit
def _add_below(v, limit, total):
    """Return the sum of sizes below a limit, and how many are not below it."""
    size = _size(v)
    below = size < limit
    return total[0] + tl.where(below, size, 0.0).to(tl.float64), total[1] + (below == 0).to(
        tl.int64
    )


@kernel
def _limits_kernel(x, limits, n: tl.int64, bucket_size: tl.int64, density: tl.int64):
    """Compute reference.sparse.threshold of a bucket in each program. density: a float64's bits."""
    bucket = tl.program_id(0).to(tl.int64)
    zero = tl.zeros((1, 1), tl.int64)
    begin, count = bucket * bucket_size, tl.minimum(n - bucket * bucket_size, bucket_size)
    begins, sizes = begin + zero, count + zero
    top = tl.max(fold(x, begins, sizes, count, largest_bits, 0, tl.zeros((1, 32), tl.int32)))
    none = (tl.zeros((1, 32), tl.float64), tl.zeros((1, 32), tl.int64))
    limit = tl.full((1, 1), float("inf"), tl.float32)
    sums, reached = fold(x, begins, sizes, count, _add_below, limit, none)
    rest = tl.sum(lane_tree(sums, 1), 0)
    wanted = density.to(tl.float64, bitcast=True) * count.to(tl.float64)
    exact = count * 0
    found = tl.where(top > _LARGEST, float("nan"), 0.0).to(tl.float32)
    going = (top <= _LARGEST) & (rest > 0)
    while going:
        goal = rest / (wanted - exact.to(tl.float64))
        found = goal.to(tl.float32)
        up = (found.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
        found = tl.where((found < float("inf")) & (found.to(tl.float64) < goal), up, found)
        before = exact
        limit = found + tl.zeros((1, 1), tl.float32)
        sums, reached = fold(x, begins, sizes, count, _add_below, limit, none)
        exact = tl.sum(tl.sum(reached, 1), 0)
        rest = tl.sum(lane_tree(sums, 1), 0)
        going = (exact > before) & (rest != 0) & (exact.to(tl.float64) < wanted)
        going = going & (found < float("inf"))
        found = tl.where(found < float("inf"), found, float("nan"))
    tl.store(limits + bucket, found)


@kernel
def _marks_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    x,
    limits,
    marks,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    i, there, bucket, place = own_place(n, bucket_size, magic, TILE, BUCKETS)
    limit = tl.load(limits + bucket, mask=there, other=0.0)
    v = tl.load(x + i, mask=there, other=0.0)
    size, usable = _size(v), limit > 0
    fraction = own_integer(stream, bucket, place).to(tl.float32) * _SCALE + _HALF_SCALE
    kept = usable & (size > 0) & (tl.div_rn(size, tl.where(usable, limit, 1.0)) > fraction)
    mark = tl.where(kept, tl.where(v < 0, _MINUS, _PLUS), 0)
    mark = tl.where(usable & (size >= limit), _EXACT, mark)
    tl.store(marks + i, mark.to(tl.uint8), mask=there)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _marked(marks, n, TILE: tl.constexpr):
    """Return a tile's places (int64), marks (int32), and the last kept place before each, from the
    one before the tile's first on; -1 if there is none.
    """
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mark = tl.load(marks + i, mask=i < n, other=0).to(tl.int32)
    before = tl.load(marks + i - 1, mask=(i > 0) & (i < n), other=0)
    last = tl.associative_scan(tl.where(before > 0, i - 1, -1), 0, _larger)
    return i, mark, last


@kernel
def _sizes_kernel(marks, first, last, bits, exact, n: tl.int64, k: tl.int64, TILE: tl.constexpr):
    """Store for each tile the first kept place, if none is known before it, and the last one, -1 if
    there is none; bits, without the first gap's quotient in that case; exact values.
    """
    tile = tl.program_id(0).to(tl.int64)
    i, mark, before = _marked(marks, n, TILE)
    kept, known = mark > 0, before >= 0
    own = tl.where(kept, k + 3 - (mark == _EXACT).to(tl.int64), 0)
    gaps = tl.where(kept & known, (i - before - 1) >> k, 0)
    unknown = tl.max(tl.where(kept & (known == 0), i, -1), 0)
    tl.store(first + tile, unknown)
    tl.store(last + tile, tl.max(tl.where(kept, i, -1), 0))
    tl.store(bits + tile, tl.sum(own + gaps, 0))
    tl.store(exact + tile, tl.sum((mark == _EXACT).to(tl.int64), 0))


@kernel
def _put_kernel(
    x,
    marks,
    last,
    bits,
    exact,
    count,
    out,
    n: tl.int64,
    room: tl.int64,
    k: tl.int64,
    TILE: tl.constexpr,
):
    """Write exact values, ``count`` of them, and behind them codes, of which no two share a bit,
    into ``out`` (int32, ``room`` zeros). last, bits, exact: totals before each tile.
    """
    tile = tl.program_id(0).to(tl.int64)
    i, mark, before = _marked(marks, n, TILE)
    kept, full = mark > 0, mark == _EXACT
    gap = i - tl.where(before >= 0, before, tl.load(last + tile)) - 1
    length = tl.where(kept, (gap >> k) + k + 3 - full.to(tl.int64), 0)
    at = tl.load(bits + tile) + tl.cumsum(length, 0) - length + (gap >> k)
    low = gap & ((1 << k) - 1)
    code = 1 | (low << 1) | tl.where(full, 1 << (k + 1), (mark == _MINUS).to(tl.int64) << (k + 2))
    wide = code.to(tl.uint64) << (at & 31).to(tl.uint64)
    word = tl.load(count) + (at >> 5)
    lower = wide.to(tl.uint32).to(tl.int32, bitcast=True)
    upper = (wide >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_add(out + word, lower, mask=kept & (word < room), sem="relaxed")
    over = kept & (upper != 0) & (word + 1 < room)
    tl.atomic_add(out + word + 1, upper, mask=over, sem="relaxed")
    place = tl.load(exact + tile) + tl.cumsum(full.to(tl.int64), 0) - 1
    value = tl.load(x + i, mask=full, other=0.0).to(tl.int32, bitcast=True)
    tl.store(out + place, value, mask=full & (place < room))


@kernel
def _broken_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    limits,
    out,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """Write NaN if thresholds are NaN."""
    i, there, bucket, _ = own_place(n, bucket_size, magic, TILE, BUCKETS)
    limit = tl.load(limits + bucket, mask=there, other=0.0)
    tl.store(out + i, limit, mask=there & (limit != limit))


@triton.jit
def _lowest_one(word):
    """Return the place of the lowest 1 of words (uint32) that are not 0: int64."""
    alone = word & ((word ^ 0xFFFFFFFF) + 1)
    return ((alone.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127).to(tl.int64)


@triton.jit
def _bit(data, at, bits):
    """Return the bit (int64) at a place, 0 behind the last one."""
    word = tl.load(data + (at >> 5), mask=at < bits, other=0).to(tl.uint32, bitcast=True)
    return ((word >> (at & 31).to(tl.uint32)) & 1).to(tl.int64)


@triton.jit
def _code_at(at, data, following, bits, n, k):
    """Read the code that would begin at places (int64): return its gap, whether a full value and
    whether a minus follows (int64), and its end; then whether it can be read, and whether only
    zeros remain up to the stream's end.
    """
    inside = at < bits
    word = at >> 5
    own = tl.load(data + word, mask=inside, other=0).to(tl.uint32, bitcast=True)
    own = own >> (at & 31).to(tl.uint32)
    later = tl.load(following + word + 1, mask=inside & (own == 0), other=0)
    other = tl.load(data + later, mask=inside & (own == 0) & (later * 32 < bits), other=0)
    other = other.to(tl.uint32, bitcast=True)
    one = tl.where(own != 0, at + _lowest_one(own), later * 32 + _lowest_one(other))
    ended = (inside == 0) | ((own == 0) & (other == 0))
    one = tl.where(ended, bits, one)
    # The low bits, and the one behind them, may lie in two words.
    low = tl.load(data + ((one + 1) >> 5), mask=one + 1 < bits, other=0)
    high = tl.load(data + ((one + 1) >> 5) + 1, mask=((one + 1) | 31) + 1 < bits, other=0)
    both = low.to(tl.uint32, bitcast=True).to(tl.uint64)
    both = both | (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    fields = (both >> ((one + 1) & 31).to(tl.uint64)).to(tl.int64)
    full = (fields >> k) & 1
    end = one + k + 3 - full
    gap = ((one - at) << k) + (fields & ((1 << k) - 1))
    good = (end <= bits) & (one - at <= n >> k)
    minus = _bit(data, end - 1, bits)
    return gap, full, minus, end, good, ended


@kernel
def _ways_kernel(
    data,
    following,
    bits: tl.int64,
    n: tl.int64,
    k: tl.int64,
    ways,
    met,
    exact,
    flag,
    TILE: tl.constexpr,
):
    """Set the way from each bit to the begin of the next code, or to the end if there is none; mark
    the first code's place as met.
    """
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    _, _, _, end, good, ended = _code_at(at, data, following, bits, n, k)
    way = tl.where(good & (ended == 0), end, bits)
    tl.store(ways + at, way.to(ways.dtype.element_ty), mask=at <= bits)
    if tile == 0:
        count = tl.load(exact)
        possible = (count >= 0) & (count <= n) & (count * 32 <= bits)
        tl.store(met + count * 32, 1, mask=possible)
        tl.atomic_max(flag, 1, mask=possible == 0, sem="relaxed")


@kernel
def _double_kernel(ways, again, met, bits: tl.int64, TILE: tl.constexpr):
    """Mark as met each end of a way from a met place; double the length of ways."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    way = tl.load(ways + at, mask=at <= bits, other=0).to(tl.int64)
    known = tl.load(met + at, mask=at <= bits, other=0)
    tl.store(met + way, known, mask=known > 0)
    tl.store(again + at, tl.load(ways + way, mask=at <= bits, other=0), mask=at <= bits)


@triton.jit
def _met_codes(data, following, bits, n, k, met, TILE: tl.constexpr):
    """Return which codes begin in a tile, and ``_code_at``."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    known = tl.load(met + at, mask=at < bits, other=0) > 0
    gap, full, minus, _, good, ended = _code_at(at, data, following, bits, n, k)
    return known & (ended == 0), gap, full, minus, good


@kernel
def _moves_kernel(
    data,
    following,
    bits: tl.int64,
    n: tl.int64,
    k: tl.int64,
    met,
    moved,
    used,
    flag,
    TILE: tl.constexpr,
):
    """Count the coordinates that each tile's codes pass, and the full values that follow them."""
    tile = tl.program_id(0).to(tl.int64)
    there, gap, full, _, good = _met_codes(data, following, bits, n, k, met, TILE)
    bad = tl.max((there & (good == 0)).to(tl.int32), 0)
    tl.atomic_max(flag, bad, mask=bad > 0, sem="relaxed")
    there = there & good
    tl.store(moved + tile, tl.sum(tl.where(there, gap + 1, 0), 0))
    tl.store(used + tile, tl.sum(tl.where(there, full, 0), 0))


@kernel
def _values_kernel(
    data,
    following,
    bits: tl.int64,
    n: tl.int64,
    k: tl.int64,
    met,
    moved,
    used,
    exact,
    limits,
    bucket_size: tl.int64,
    out,
    flag,
    TILE: tl.constexpr,
):
    """Add the decoded values of each tile's codes. moved, used: totals before each tile."""
    tile = tl.program_id(0).to(tl.int64)
    there, gap, full, minus, good = _met_codes(data, following, bits, n, k, met, TILE)
    there = there & good
    index = tl.load(moved + tile) + tl.cumsum(tl.where(there, gap + 1, 0), 0) - 1
    place = tl.load(used + tile) + tl.cumsum(tl.where(there, full, 0), 0) - 1
    known = there & (index < n) & ((full == 0) | (place < tl.load(exact)))
    limit = tl.load(limits + index // bucket_size, mask=known, other=0.0)
    value = tl.where(minus != 0, limit * -1.0, limit)
    own = tl.load(data + place, mask=known & (full != 0), other=0).to(tl.float32, bitcast=True)
    value = tl.where(full != 0, own, value)
    tl.store(out + index, tl.load(out + index, mask=known, other=0.0) + value, mask=known)
    bad = tl.max((there & (known == 0)).to(tl.int32), 0)
    tl.atomic_max(flag, bad, mask=bad > 0, sem="relaxed")
