"""Write LLVM code for loops over 16 coordinates that Numba does not vectorise by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from hvd_adaptive.kernels import random

WIDTH = 16

FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(INT, WIDTH)


class Lanes:
    """Emit operations on 16 lanes."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def spread(self, scalar: ir.Value) -> ir.Value:
        kind = ir.VectorType(scalar.type, WIDTH)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, INT(0))
        zeros = ir.Constant(INTS, [0] * WIDTH)
        return self.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

    def integers(self, value: int) -> ir.Value:
        return ir.Constant(INTS, [value] * WIDTH)

    def load(self, pointer: ir.Value, at: ir.Value, kind: ir.VectorType) -> ir.Value:
        place = self.builder.gep(pointer, [at])
        vectors = self.builder.bitcast(place, kind.as_pointer())
        return self.builder.load(vectors, align=4)

    def store(self, value: ir.Value, pointer: ir.Value, at: ir.Value) -> None:
        place = self.builder.gep(pointer, [at])
        self.builder.store(value, self.builder.bitcast(place, value.type.as_pointer()), align=4)

    def mix(self, h: ir.Value, shift: int, factor: int) -> ir.Value:
        b = self.builder
        return b.mul(b.xor(h, b.lshr(h, self.integers(shift))), self.integers(factor))

    def uniform24(self, counter: ir.Value, key: ir.Value) -> ir.Value:
        """Mix integers below 2**24 as ``quantize.uniform24`` does; return them as floats."""
        b = self.builder
        h = b.add(self.mix(counter, 16, random.MIX32_A), key)
        h = b.lshr(self.mix(h, 13, random.MIX32_B), self.integers(8))
        return b.sitofp(h, FLOATS)

    def shifted(self, value: ir.Value, left: int) -> ir.Value:
        """Shift to the left, or to the right if ``left`` is negative."""
        if left == 0:
            return value
        move = self.builder.shl if left > 0 else self.builder.lshr
        return move(value, self.integers(abs(left)))


def emitted(
    signature: Any, emit: Callable[..., ir.Value | None], *places: int, kind: type[Lanes] = Lanes
) -> tuple[Any, Callable[..., ir.Value]]:
    """Return what an intrinsic of Numba returns: its signature, and what emits its code.

    ``emit(lanes, args, *arrays)`` emits it, and returns the result, if there is one. lanes: of
    ``kind``. arrays: the arguments at ``places``, with ``data`` and ``shape``.
    """

    def codegen(
        context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]
    ) -> ir.Value:
        kinds = (context.make_array(signature.args[at]) for at in places)
        arrays = [of(context, builder, args[at]) for of, at in zip(kinds, places, strict=True)]
        result = emit(kind(builder), args, *arrays)
        return context.get_dummy_value() if result is None else result

    return signature, codegen
