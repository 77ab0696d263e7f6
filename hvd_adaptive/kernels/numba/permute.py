"""Count or look up thresholds, and look up levels of codes, in vector registers.

LLVM by itself would count for 8 coordinates at a time on AVX-512, and not for 16. Counting
thresholds costs four instructions each, and look-ups in memory do not vectorise; but a
permutation looks up every lane of a vector in a table of 8 entries (AVX2), or of 16 or 32
(AVX-512); other processors select a value by the bits of its code. Numba compiles no such loop by
itself, since LLVM does not find the permutation, so the loops over 16 coordinates are written in
LLVM's language.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hvd_adaptive.kernels.numba.lanes import ENTRIES, FLOATS, INTS, LONG, WIDTH, Lanes, emitted

# The type of ``at`` in encoder.py.
AT = types.Tuple((types.float32, types.uint32, types.uint32, types.uint32))
# Fewer thresholds are counted faster. More thresholds, and more values, are looked up in memory.
FEWEST_THRESHOLDS = 5
MOST_THRESHOLDS = {16: 128, 8: 32, 0: 0}[ENTRIES]
MOST_VALUES = {16: 128, 8: 32, 0: 16}[ENTRIES]


def tables(lower: np.ndarray, start: np.ndarray, gap: np.ndarray, depth: int) -> np.ndarray:
    """Return the tables of ``permuted``, end to end: float32 (3 * max(16, 2**depth),).

    The inner lower ends come first, as a search tree: the children of node h are 2 h and 2 h + 1,
    the root is node 1. Then come starts and gaps. Unused intervals are beyond every r.
    """
    size = 1 << depth
    result = np.zeros((3, max(WIDTH, size)), np.float32)
    ends = np.full(size, np.inf, np.float32)
    ends[: len(lower)] = lower
    for level in range(depth):
        nodes = 1 << level
        half = size >> (level + 1)
        result[0, nodes : 2 * nodes] = ends[half :: 2 * half][:nodes]
    # Interval i is node ``size + i``; look-ups use its low bits.
    at = size % max(WIDTH, size)
    result[1, at : at + len(start)], result[2, at : at + len(gap)] = start, gap
    return result.reshape(-1)


@intrinsic(prefer_literal=True)
def counted(typingctx, run, steps, part, at, start, gap, first, count):
    """Put codes of the first ``run.size // 16 * 16`` coordinates into ``part``; return how many.

    steps: random.STEPS, or more. start, gap: those of ``count`` thresholds, a constant. first: the
    code of index 0. The other arguments are those of the functions in encoder.py.
    """
    signature = types.int64(run, steps, part, AT, start, gap, types.uint32, count)

    def emit(lanes, args, start, gap, *arrays):
        builder, places = lanes.builder, range(count.literal_value)
        pairs = [
            [lanes.spread(builder.load(builder.gep(ends.data, [LONG(at)]))) for at in places]
            for ends in (start, gap)
        ]
        code0 = lanes.spread(args[6])
        ladder = [builder.add(code0, lanes.integers(index + 1)) for index in places]

        def code_of(r: ir.Value, u: ir.Value) -> ir.Value:
            code = code0
            for lower, slope, above in zip(*pairs, ladder, strict=True):
                exceeds = builder.fcmp_ordered(">", r, builder.fadd(lower, builder.fmul(u, slope)))
                code = builder.select(exceeds, above, code)
            return code

        return _emit_codes(lanes, args[3], code_of, *arrays)

    return emitted(signature, emit, 4, 5, 0, 1, 2)


def _emit_codes(
    lanes: Lanes,
    at: ir.Value,
    code_of: Callable[[ir.Value, ir.Value], ir.Value],
    run: Any,
    steps: Any,
    part: Any,
) -> ir.Value:
    """Emit the loop over 16 coordinates, and return their number.

    code_of: emits the codes of positive coordinates, given r and the random integers of encoder.py.
    The other arguments are those of ``counted``.
    """
    builder, x, counters, codes = lanes.builder, run.data, steps.data, part.data
    numbers = cgutils.unpack_tuple(builder, at)
    scale, shift, key, last = (lanes.spread(number) for number in numbers)
    done = builder.and_(builder.extract_value(run.shape, 0), LONG(-WIDTH))
    with cgutils.for_range_slice(builder, LONG(0), done, LONG(WIDTH), LONG) as (at, _):
        v = lanes.load(x, at, FLOATS)
        positive = builder.and_(builder.bitcast(v, INTS), lanes.integers(0x7FFFFFFF))
        r = builder.fmul(builder.bitcast(positive, FLOATS), scale)
        counter = builder.add(lanes.load(counters, at, INTS), shift)
        code = code_of(r, lanes.uniform24(counter, key))
        negative = builder.fcmp_ordered("<", v, ir.Constant(FLOATS, [0.0] * WIDTH))
        code = builder.select(negative, builder.sub(last, code), code)
        lanes.store(code, codes, at)
    return done


@intrinsic(prefer_literal=True)
def permuted(typingctx, run, steps, part, at, tree, first, depth):
    """Put codes of the first ``run.size // 16 * 16`` coordinates into ``part``; return how many.

    steps: random.STEPS, or more. tree: the result of ``tables`` for ``depth``, a constant from 1 to
    7; first: the code of index 0. The other arguments are those of the functions in encoder.py.
    """
    levels = depth.literal_value
    signature = types.int64(run, steps, part, AT, tree, types.uint32, depth)

    def emit(lanes, args, table, *arrays):
        builder, size = lanes.builder, 1 << levels
        third, each = max(WIDTH, size), lanes.entries
        nodes, starts, gaps = (
            lanes.load_table(table.data, begin, begin + third)
            for begin in range(0, 3 * third, third)
        )
        # See ``tables`` for the places of intervals.
        first_interval = size % third // each
        kept = slice(first_interval, first_interval + max(1, size // each))
        starts, gaps = starts[kept], gaps[kept]
        first_code = builder.sub(lanes.spread(args[5]), lanes.integers(size))

        def code_of(r: ir.Value, u: ir.Value) -> ir.Value:
            node = lanes.integers(1)
            for level in range(levels):
                # Nodes of one tree level fill whole registers, or lie in the first register.
                count = (1 << level) // each
                group = nodes[count : 2 * count] if count else nodes[:1]
                right = builder.fcmp_ordered(">", r, lanes.look_up(group, node))
                node = builder.add(node, node)
                node = builder.select(right, builder.add(node, lanes.integers(1)), node)
            start, gap = lanes.look_up(starts, node), lanes.look_up(gaps, node)
            above = builder.fcmp_ordered(">", r, builder.fadd(start, builder.fmul(u, gap)))
            code = builder.add(node, first_code)
            return builder.select(above, builder.add(code, lanes.integers(1)), code)

        return _emit_codes(lanes, args[3], code_of, *arrays)

    return emitted(signature, emit, 4, 0, 1, 2)


def entries_of(values: int) -> int:
    """Return the size of the table in which ``add_values`` looks up so many values; 0 if they are
    too many.
    """
    size = 1 << (values - 1).bit_length()
    return max(size, ENTRIES) if size <= MOST_VALUES else 0


@intrinsic(prefer_literal=True)
def add_values(typingctx, part, scale, values, target, entries):
    """Add ``values[code] * scale`` to the first ``target.size // 16 * 16`` coordinates of
    ``target``; return their number.

    entries: a constant, the result of ``entries_of``. part: codes below ``entries``. values: so
    many, and at least 16.
    """
    count = entries.literal_value
    signature = types.int64(part, types.float32, values, target, entries)

    def emit(lanes, args, codes, values, target):
        builder, sums = lanes.builder, target.data
        factor, *_ = lanes.registers(lanes.spread(args[1]))
        held = lanes.load_table(values.data, 0, count)[: lanes.registers_of(count)]
        table = [builder.fmul(register, factor) for register in held]
        length = builder.extract_value(target.shape, 0)
        done = builder.and_(length, LONG(-WIDTH))
        with cgutils.for_range_slice(builder, LONG(0), done, LONG(WIDTH), LONG) as (at, _):
            level = lanes.look_up(table, lanes.load(codes.data, at, INTS))
            lanes.store(builder.fadd(lanes.load(sums, at, FLOATS), level), sums, at)
        return done

    return emitted(signature, emit, 0, 2, 3)
