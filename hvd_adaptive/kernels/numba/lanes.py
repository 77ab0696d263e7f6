"""Write LLVM code for loops over 16 coordinates that Numba does not vectorise by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features

from hvd_adaptive.kernels import random

WIDTH = 16

FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(INT, WIDTH)
_EIGHT_FLOATS, _EIGHT_INTS = ir.VectorType(FLOAT, 8), ir.VectorType(INT, 8)


def _entries_of_a_register() -> int:
    """Return the entries of a register that one permutation looks up; 0 if there is none.

    Numba compiles for the processor that it runs on, unless it is configured otherwise.
    """
    told = config.CPU_FEATURES
    features = (get_host_cpu_features() if told is None else told).split(",")
    return 16 if "+avx512f" in features else 8 if "+avx2" in features else 0


ENTRIES = _entries_of_a_register()


class Lanes:
    """Emit operations on 16 lanes, and look-ups in tables of ``entries`` numbers a register; each
    register has one number if ``entries`` is 0.
    """

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder, self.entries = builder, ENTRIES

    def registers_of(self, count: int) -> int:
        """Return how many registers hold ``count`` entries, a power of two."""
        return max(1, count // max(1, self.entries))

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
        """Mix integers below 2**24 as ``random.uniform24`` does; return them as floats."""
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

    def load_table(self, data: ir.Value, begin: int, end: int) -> list[ir.Value]:
        """Return the floats from ``begin`` to ``end``, filled up to 16, as registers."""
        vectors = (self.load(data, LONG(at), FLOATS) for at in range(begin, end, WIDTH))
        return [register for vector in vectors for register in self.registers(vector)]

    def registers(self, table: ir.Value) -> list[ir.Value]:
        """Return 16 floats as registers, without permutations each in a vector of its own."""
        if self.entries == WIDTH:
            return [table]
        if self.entries:
            return self._halves(table)
        entries = (self.builder.extract_element(table, INT(k)) for k in range(WIDTH))
        return [self.spread(entry) for entry in entries]

    def look_up(self, registers: list[ir.Value], index: ir.Value) -> ir.Value:
        """Return entry ``index`` (its low bits) of a table in a power of two of registers."""
        if self.entries == WIDTH:
            return self._look_up_16(registers, index)
        if not self.entries:
            return self._select(registers, index)
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

    def _select(self, entries: list[ir.Value], index: ir.Value) -> ir.Value:
        """Return entries[index], by selections on the index's bits, the lowest first."""
        for bit in range(len(entries).bit_length() - 1):
            is_set = self.builder.icmp_signed("<", self.shifted(index, 31 - bit), self.integers(0))
            pairs = zip(entries[::2], entries[1::2], strict=True)
            entries = [self.builder.select(is_set, high, low) for low, high in pairs]
        return entries[0]

    def _halves(self, vector: ir.Value) -> list[ir.Value]:
        halves = (range(8), range(8, 16))
        places = [ir.Constant(_EIGHT_INTS, list(half)) for half in halves]
        return [self.builder.shuffle_vector(vector, vector, place) for place in places]


def emitted(
    signature: Any, emit: Callable[..., ir.Value | None], *places: int
) -> tuple[Any, Callable[..., ir.Value]]:
    """Return what an intrinsic of Numba returns: its signature, and what emits its code.

    ``emit(lanes, args, *arrays)`` emits it, and returns the result, if there is one. arrays: the
    arguments at ``places``, with ``data`` and ``shape``.
    """

    def codegen(
        context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]
    ) -> ir.Value:
        kinds = (context.make_array(signature.args[at]) for at in places)
        arrays = [of(context, builder, args[at]) for of, at in zip(kinds, places, strict=True)]
        result = emit(Lanes(builder), args, *arrays)
        return context.get_dummy_value() if result is None else result

    return signature, codegen
