"""Count or look up thresholds, and look up levels of codes, in vector registers.

LLVM by itself would count for 8 coordinates at a time on AVX-512, and not for 16. Counting
thresholds costs four instructions each, and look-ups in memory do not vectorise; but a
permutation looks up every lane of a vector in a table of 8 entries (AVX2), or of 16 or 32
(AVX-512). Numba compiles no such loop by itself, since LLVM does not find the permutation, so the
loops over 16 coordinates are written in LLVM's language.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from hvd_adaptive.kernels.numba.lanes import FLOAT, FLOATS, INT, INTS, LONG, WIDTH, Lanes, emitted

# The type of ``at`` in encoder.py.
AT = types.Tuple((types.float32, types.uint32, types.uint32, types.uint32))
_EIGHT_FLOATS, _EIGHT_INTS = ir.VectorType(FLOAT, 8), ir.VectorType(INT, 8)


def _entries_of_a_register() -> int:
    """Return the entries of a register that one permutation looks up; 0 if there is none.

    Numba compiles for the processor that it runs on, unless it is configured otherwise.
    """
    told = config.CPU_FEATURES
    features = (get_host_cpu_features() if told is None else told).split(",")
    return 16 if "+avx512f" in features else 8 if "+avx2" in features else 0


ENTRIES = _entries_of_a_register()
# Fewer thresholds are counted faster. More thresholds, and more values, are looked up in memory.
FEWEST_THRESHOLDS = 5
MOST_THRESHOLDS = {16: 128, 8: 32, 0: 0}[ENTRIES]
MOST_VALUES = {16: 128, 8: 32, 0: 0}[ENTRIES]


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


class TableLanes(Lanes):
    """Emit operations on 16 lanes, and look-ups in tables of ``entries`` numbers a register."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        super().__init__(builder)
        self.entries = ENTRIES

    def load_table(self, data: ir.Value, begin: int, end: int) -> list[ir.Value]:
        """Return the floats from ``begin`` to ``end``, filled up to 16, as registers."""
        vectors = (self.load(data, LONG(at), FLOATS) for at in range(begin, end, WIDTH))
        return [register for vector in vectors for register in self.registers(vector)]

    def registers(self, table: ir.Value) -> list[ir.Value]:
        """Return 16 floats as registers."""
        if self.entries == WIDTH:
            return [table]
        return self._halves(table)

    def look_up(self, registers: list[ir.Value], index: ir.Value) -> ir.Value:
        """Return entry ``index`` (its low bits) of a table in a power of two of registers."""
        if self.entries == WIDTH:
            return self._look_up_16(registers, index)
        found = [self._look_up_8(registers, half) for half in self._halves(index)]
        return self.builder.shuffle_vector(*found, ir.Constant(INTS, list(range(WIDTH))))

    def _look_up_16(self, registers: list[ir.Value], index: ir.Value) -> ir.Value:
        b, module = self.builder, self.builder.module
        if len(registers) == 1:
            kind = ir.FunctionType(FLOATS, [FLOATS, INTS])
            name = "llvm.x86.avx512.permvar.sf.512"
            one = cgutils.get_or_insert_function(module, kind, name)
            return b.call(one, [registers[0], index])
        if len(registers) == 2:
            kind = ir.FunctionType(FLOATS, [FLOATS, INTS, FLOATS])
            name = "llvm.x86.avx512.vpermi2var.ps.512"
            two = cgutils.get_or_insert_function(module, kind, name)
            return b.call(two, [registers[0], index, registers[1]])
        half = len(registers) // 2
        bit = b.and_(index, self.integers(half * WIDTH))
        upper = b.icmp_unsigned("!=", bit, self.integers(0))
        low, high = (self._look_up_16(part, index) for part in (registers[:half], registers[half:]))
        return b.select(upper, high, low)

    def _look_up_8(self, registers: list[ir.Value], index: ir.Value) -> ir.Value:
        b, half = self.builder, len(registers) // 2
        if not half:
            kind = ir.FunctionType(_EIGHT_FLOATS, [_EIGHT_FLOATS, _EIGHT_INTS])
            one = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx2.permps")
            return b.call(one, [registers[0], index])
        low, high = (self._look_up_8(part, index) for part in (registers[:half], registers[half:]))
        # A blend looks at signs: the bit that selects a half becomes the sign.
        shift = 32 - (half * 8).bit_length()
        sign = b.shl(index, ir.Constant(_EIGHT_INTS, [shift] * 8))
        upper = b.icmp_signed("<", sign, ir.Constant(_EIGHT_INTS, [0] * 8))
        return b.select(upper, high, low)

    def _halves(self, vector: ir.Value) -> list[ir.Value]:
        halves = (range(8), range(8, 16))
        places = [ir.Constant(_EIGHT_INTS, list(half)) for half in halves]
        return [self.builder.shuffle_vector(vector, vector, place) for place in places]


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

    return emitted(signature, emit, 4, 0, 1, 2, kind=TableLanes)


@intrinsic(prefer_literal=True)
def add_permuted(typingctx, part, scale, values, target, entries):
    """Add ``values[code] * scale`` to the first ``target.size // 16 * 16`` coordinates of
    ``target``; return their number.

    entries: a constant, a power of two from ENTRIES to MOST_VALUES. part: codes below ``entries``.
    values: so many, and at least 16.
    """
    count = entries.literal_value
    signature = types.int64(part, types.float32, values, target, entries)

    def emit(lanes, args, codes, values, target):
        builder, sums = lanes.builder, target.data
        factor, *_ = lanes.registers(lanes.spread(args[1]))
        held = lanes.load_table(values.data, 0, count)[: count // lanes.entries]
        table = [builder.fmul(register, factor) for register in held]
        length = builder.extract_value(target.shape, 0)
        done = builder.and_(length, LONG(-WIDTH))
        with cgutils.for_range_slice(builder, LONG(0), done, LONG(WIDTH), LONG) as (at, _):
            level = lanes.look_up(table, lanes.load(codes.data, at, INTS))
            lanes.store(builder.fadd(lanes.load(sums, at, FLOATS), level), sums, at)
        return done

    return emitted(signature, emit, 0, 2, 3, kind=TableLanes)
