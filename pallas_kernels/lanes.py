"""Code of one lane for use inside `inline_mgpu`: numbers with operators, shared-memory loads, shuffles and
bfloat16 matrix products of a warp.

A program written against `Lanes` also runs on the NumPy lanes of the tests.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector
from jaxlib.mlir.dialects import math as mlir_math


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _bf16() -> ir.Type:
    return ir.BF16Type.get()


class Number:
    """An int32, float32 or boolean of the lane; Python numbers beside it become constants of its type."""

    def __init__(self, raw: ir.Value) -> None:
        self.raw = raw

    def _of(self, other: "Number | float") -> ir.Value:
        if isinstance(other, Number):
            return other.raw
        real = self.raw.type == _f32()
        attribute = ir.FloatAttr.get(_f32(), other) if real else ir.IntegerAttr.get(_i32(), int(other))
        return arith.constant(self.raw.type, attribute)

    def _apply(self, integer: Any, real: Any, other: "Number | float") -> "Number":
        operation = real if self.raw.type == _f32() else integer
        return Number(operation(self.raw, self._of(other)))

    def __add__(self, other: "Number | float") -> "Number":
        return self._apply(arith.addi, arith.addf, other)

    def __radd__(self, other: int) -> "Number":
        return self + other

    def __sub__(self, other: "Number | float") -> "Number":
        return self._apply(arith.subi, arith.subf, other)

    def __mul__(self, other: "Number | float") -> "Number":
        return self._apply(arith.muli, arith.mulf, other)

    def __floordiv__(self, other: int) -> "Number":
        return Number(arith.divui(self.raw, self._of(other)))

    def __and__(self, other: "Number | int") -> "Number":
        return Number(arith.andi(self.raw, self._of(other)))

    def __xor__(self, other: "Number | int") -> "Number":
        return Number(arith.xori(self.raw, self._of(other)))

    def __or__(self, other: "Number") -> "Number":
        return Number(arith.ori(self.raw, self._of(other)))

    def __lt__(self, other: "Number | int") -> "Number":
        return Number(arith.cmpi(arith.CmpIPredicate.slt, self.raw, self._of(other)))


class Lanes:
    """The operations of a lane; `lane` is its place in the warp, `warp` that in the warpgroup."""

    def __init__(self) -> None:
        from jax.experimental.mosaic.gpu import utils

        self._utils = utils
        self.lane = Number(utils.thread_idx()) & 31
        self.warp = Number(utils.warp_idx()) & 3

    def equal(self, a: Number, b: Number | int) -> Number:
        """Whether two integers are equal."""
        return Number(arith.cmpi(arith.CmpIPredicate.eq, a.raw, a._of(b)))

    def select(self, condition: Number, yes: Number, no: Number | float) -> Number:
        """`yes` where the condition holds, else `no`."""
        return Number(arith.select(condition.raw, yes.raw, yes._of(no)))

    def loop(self, count: Number | int, body: Callable, carry: list) -> list:
        """carry = body(i, carry) for i below count: a loop of the program, to keep it short."""
        zero, one = self.lane._of(0), self.lane._of(1)
        loop = scf.ForOp(zero, self.lane._of(count), one, [x.raw for x in carry])
        with ir.InsertionPoint(loop.body):
            result = body(Number(loop.induction_variable), [Number(x) for x in loop.inner_iter_args])
            scf.yield_([x.raw for x in result])
        return [Number(x) for x in loop.results]

    def exp(self, x: Number) -> Number:
        """e to the power of a float32."""
        return Number(mlir_math.exp(x.raw))

    def fma(self, a: Number, b: Number, c: Number) -> Number:
        """a b + c in one rounding."""
        return Number(mlir_math.fma(a.raw, b.raw, c.raw))

    def shuffle(self, x: Number, lane: Number | int) -> Number:
        """The value of x in another lane (modulo 32)."""
        source = self.lane._of(lane)
        every, clamp = self.lane._of(-1), self.lane._of(31)
        bits = self._utils.bitcast(x.raw, _i32())
        moved = nvvm.shfl_sync(every, bits, source, clamp, nvvm.ShflKind.idx)
        return Number(self._utils.bitcast(moved, x.raw.type))

    def quad_sum(self, x: Number) -> Number:
        """Sum of x over the four lanes of a quad."""
        for distance in (1, 2):
            x = x + Number(self._utils.shfl_bfly(x.raw, distance))
        return x

    def rows(self, ref: Any) -> int:
        """Length of the axis of rows of a reference."""
        shape = ir.MemRefType(ref.type).shape
        return shape[0] if len(shape) < 4 else shape[0] * shape[2]

    def _pointer(self, ref: Any, row: Number, column: Any, at: Any = 0) -> ir.Value:
        """ref[row, column + at]; a bfloat16 reference may be swizzled: then the column is below 16, `at` an
        integer and a multiple of 16."""
        memref = ir.MemRefType(ref.type)
        if len(memref.shape) < 4:
            offset = row * memref.shape[-1] + column + at
        else:
            # Tiles of 8 rows of 128 bytes, in which 16-byte parts are exchanged by the row's number.
            tiles, size = memref.shape[1], 8 * 64
            place = (column ^ ((row & 7) * 8)) ^ (at % 64)
            offset = (row // 8) * (tiles * size) + (row & 7) * 64 + place + at // 64 * size
        return self._utils.getelementptr(self._utils.memref_ptr(ref), [offset.raw], memref.element_type)

    def _load(self, ref: Any, row: Number, column: Number | int, type_: ir.Type, at: Any = 0) -> ir.Value:
        return llvm.load(type_, self._pointer(ref, row, column, at))

    def real(self, ref: Any, row: Number, column: Number) -> Number:
        """ref[row, column] of float32 or bfloat16, as float32."""
        element = ir.MemRefType(ref.type).element_type
        value = self._load(ref, row, column, element)
        return Number(value if element == _f32() else arith.extf(_f32(), value))

    def reals(self, ref: Any, row: Number, column: Number) -> list[Number]:
        """Four float32 from ref[row, column] on; the column is a multiple of 4."""
        four = self._load(ref, row, column, ir.VectorType.get((4,), _f32()))
        return [Number(_item(four, i)) for i in range(4)]

    def store(self, ref: Any, row: Number, column: Number, values: list, condition: Number) -> None:
        """ref[row, column:] = one or four float32 where the condition holds."""
        with self._utils.when(condition.raw):
            value = values[0].raw if len(values) == 1 else _vector([x.raw for x in values])
            llvm.store(value, self._pointer(ref, row, column))

    def sync(self) -> None:
        """Orders the stores of the warp's lanes before and after."""
        self._utils.warp_barrier()

    def pair(self, ref: Any, row: Number, column: Number, at: Number | int = 0) -> Number:
        """Two bfloat16 from ref[row, column + at] on, as one int32; the column is even."""
        return Number(self._load(ref, row, column, _i32(), at))

    def quad(self, ref: Any, row: Number, column: Number, at: Number | int = 0) -> tuple[Number, Number]:
        """Four bfloat16 from ref[row, column + at] on, as two int32; the column is a multiple of 4."""
        both = self._load(ref, row, column, ir.VectorType.get((2,), _i32()), at)
        return Number(_item(both, 0)), Number(_item(both, 1))

    def pack(self, low: Number, high: Number) -> Number:
        """Two float32 rounded to bfloat16, in the halves of an int32."""
        both = arith.truncf(ir.VectorType.get((2,), _bf16()), _vector([low.raw, high.raw]))
        return Number(self._utils.bitcast(both, _i32()))

    def low(self, packed: Number) -> Number:
        """The low bfloat16 of an int32, as float32."""
        return Number(arith.bitcast(_f32(), arith.shli(packed.raw, packed._of(16))))

    def high(self, packed: Number) -> Number:
        """The high bfloat16 of an int32, as float32."""
        return Number(arith.bitcast(_f32(), (packed & -65536).raw))

    def lows(self, first: Number, second: Number) -> Number:
        """The low halves of two int32, the first one's lowest."""
        return Number(self._permute(first, second, 0x5410))

    def highs(self, first: Number, second: Number) -> Number:
        """The high halves of two int32, the first one's lowest."""
        return Number(self._permute(first, second, 0x7632))

    def _permute(self, first: Number, second: Number, selector: int) -> Any:
        return llvm.inline_asm(
            _i32(), [first.raw, second.raw, first._of(selector)], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"
        )

    def product(self, total: Sequence, left: Sequence, right: Sequence, kind: str = "bf16") -> list:
        """total + left x right of a warp: `mma.sync.m16n8k16` on bfloat16 or "f16" with float32 sums.

        With lane = 4 g + q: total holds rows g, g, g + 8, g + 8 of columns 2 q and 2 q + 1; left rows g,
        g + 8, g, g + 8 of inner pairs 2 q, 2 q, 2 q + 8, 2 q + 8; right column g of inner pairs 2 q, 2 q + 8.
        """
        names = [f"${i}" for i in range(14)]
        groups = (names[:4], names[4:8], names[8:10], names[10:])
        text = ", ".join("{" + ",".join(group) + "}" for group in groups)
        result: Any = llvm.inline_asm(
            llvm.StructType.get_literal([_f32()] * 4),
            [x.raw for x in (*left, *right, *total)],
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {text};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        )
        return [Number(llvm.extractvalue(_f32(), result, [i])) for i in range(4)]


def _item(array: ir.Value, i: int) -> ir.Value:
    return vector.extract(array, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def _vector(items: list) -> ir.Value:
    result = llvm.mlir_undef(ir.VectorType.get((len(items),), items[0].type))
    for i, item in enumerate(items):
        result = llvm.insertelement(result, item, position=arith.constant(_i32(), i))
    return result


def first_element(array: Any) -> Number:
    """The first element that the lane holds of a `FragmentedArray`; a scalar's only one."""
    register = array.registers.flat[0]
    return Number(_item(register, 0) if isinstance(register.type, ir.VectorType) else register)


def unpack(vectors: Any) -> list[list[Number]]:
    """The elements of a flat list of register vectors."""
    return [[Number(_item(v, i)) for i in range(ir.VectorType(v.type).shape[0])] for v in vectors]


def repack(numbers: list[list[Number]]) -> list[ir.Value]:
    """The register vectors of lists of elements."""
    return [_vector([x.raw for x in group]) for group in numbers]
