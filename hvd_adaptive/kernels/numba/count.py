"""Count thresholds for 16 coordinates at a time; LLVM by itself would choose 8 on AVX-512."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hvd_adaptive.kernels.numba.lanes import FLOATS, INTS, LONG, WIDTH, Lanes, arrays_of

# The type of ``at`` in quantize.py.
AT = types.Tuple((types.float32, types.uint32, types.uint32, types.uint32))


@intrinsic(prefer_literal=True)
def counted(typingctx, run, steps, part, at, start, gap, first, count):
    """Put codes of the first ``run.size // 16 * 16`` coordinates into ``part``; return how many.

    steps: random.STEPS, or more. start, gap: those of ``count`` thresholds, a constant. first: the
    code of index 0. The other arguments are those of the functions in quantize.py.
    """
    signature = types.int64(run, steps, part, AT, start, gap, types.uint32, count)

    def codegen(context, builder, signature, args):
        lanes, places = Lanes(builder), range(count.literal_value)
        pairs = [
            [lanes.spread(builder.load(builder.gep(ends.data, [LONG(at)]))) for at in places]
            for ends in arrays_of(context, builder, signature, args, 4, 5)
        ]
        code0 = lanes.spread(args[6])
        ladder = [builder.add(code0, lanes.integers(index + 1)) for index in places]

        def code_of(r: ir.Value, u: ir.Value) -> ir.Value:
            code = code0
            for lower, slope, above in zip(*pairs, ladder, strict=True):
                exceeds = builder.fcmp_ordered(">", r, builder.fadd(lower, builder.fmul(u, slope)))
                code = builder.select(exceeds, above, code)
            return code

        return emit_codes(context, builder, signature, args, lanes, code_of)

    return signature, codegen


def emit_codes(
    context: Any,
    builder: ir.IRBuilder,
    signature: Any,
    args: tuple[ir.Value, ...],
    lanes: Lanes,
    code_of: Callable[[ir.Value, ir.Value], ir.Value],
) -> ir.Value:
    """Emit the loop over 16 coordinates, and return their number.

    The first arguments are those of ``counted``. code_of: emits the codes of positive coordinates,
    given r and the random integers of quantize.py.
    """
    arrays = arrays_of(context, builder, signature, args, 0, 1, 2)
    x, counters, codes = (array.data for array in arrays)
    numbers = cgutils.unpack_tuple(builder, args[3])
    scale, shift, key, last = (lanes.spread(number) for number in numbers)
    done = builder.and_(builder.extract_value(arrays[0].shape, 0), LONG(-WIDTH))
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
