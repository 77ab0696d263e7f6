"""Count thresholds for 16 coordinates at a time; LLVM by itself would choose 8 on AVX-512."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hvd_adaptive.kernels.numba.lanes import FLOATS, INTS, LONG, WIDTH, Lanes, arrays_of


@intrinsic(prefer_literal=True)
def counted(typingctx, run, steps, part, inverse, offset, high, start, gap, first, total, count):
    """Put codes of the first ``run.size // 16 * 16`` coordinates into ``part``; return how many.

    count: the number of thresholds, a constant; first: the code of index 0. The other arguments are
    those of the functions in quantize.py.
    """
    thresholds = count.literal_value
    scalars = types.float32, types.uint32, types.uint32
    signature = types.int64(
        run, steps, part, *scalars, start, gap, types.uint32, types.uint32, count
    )

    def codegen(context, builder, signature, args):
        arrays = arrays_of(context, builder, signature, args, 0, 1, 2, 6, 7)
        x, counters, codes, *ends = (array.data for array in arrays)
        lanes = Lanes(builder)

        def spread(data: ir.Value, at: int) -> ir.Value:
            return lanes.spread(builder.load(builder.gep(data, [LONG(at)])))

        pairs = [tuple(spread(data, at) for data in ends) for at in range(thresholds)]
        scale, shift, key, code0, last = (lanes.spread(args[i]) for i in (3, 4, 5, 8, 9))
        ladder = [builder.add(code0, lanes.integers(index)) for index in range(thresholds + 1)]
        done = builder.and_(builder.extract_value(arrays[0].shape, 0), LONG(-WIDTH))
        with cgutils.for_range_slice(builder, LONG(0), done, LONG(WIDTH), LONG) as (at, _):
            v = lanes.load(x, at, FLOATS)
            positive = builder.and_(builder.bitcast(v, INTS), lanes.integers(0x7FFFFFFF))
            r = builder.fmul(builder.bitcast(positive, FLOATS), scale)
            u = lanes.uniform24(builder.add(lanes.load(counters, at, INTS), shift), key)
            code = ladder[0]
            for (lower, slope), above in zip(pairs, ladder[1:], strict=True):
                exceeds = builder.fcmp_ordered(">", r, builder.fadd(lower, builder.fmul(u, slope)))
                code = builder.select(exceeds, above, code)
            negative = builder.fcmp_ordered("<", v, ir.Constant(FLOATS, [0.0] * WIDTH))
            code = builder.select(negative, builder.sub(last, code), code)
            lanes.store(code, codes, at)
        return done

    return signature, codegen
