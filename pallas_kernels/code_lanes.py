"""Lane operations for coded states: bytes, float16 products and linear places of buffers.

A program written against `CodeLanes` also runs on the NumPy lanes of the tests.
"""

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.lanes import Lanes, Number, _f32, _i32, _item, _vector


class CodeLanes(Lanes):
    """Lane operations on codes, float16 products and linear places of buffers."""

    def bits(self, word: Any, shift: int, mask: int) -> Any:
        """(word << shift) & mask."""
        moved = word if shift == 0 else word * (1 << shift)
        return moved & (mask - (1 << 32) if mask >> 31 else mask)

    def join(self, a: Any, b: Any) -> Any:
        """a | b."""
        return type(a)(arith.ori(a.raw, b.raw))

    def _place(self, ref: Any, place: Any, element: Any = None) -> Any:
        own = ir.MemRefType(ref.type).element_type
        return self._utils.getelementptr(self._utils.memref_ptr(ref), [place.raw], element or own)

    def _byte(self, ref: Any, place: Any) -> Any:
        return self._place(ref, place, ir.IntegerType.get_signless(8))

    def words(self, ref: Any, place: Any, count: int) -> list:
        """`count` (1, 2 or 4) 32-bit words from byte `place` of a buffer on."""
        loaded = llvm.load(ir.VectorType.get((count,), _i32()), self._byte(ref, place))
        return [Number(_item(loaded, i)) for i in range(count)]

    def short(self, ref: Any, place: Any) -> Any:
        """Two bytes from byte `place` (even) of a buffer on."""
        loaded = llvm.load(ir.IntegerType.get_signless(16), self._byte(ref, place))
        return Number(arith.extui(_i32(), loaded))

    def elements(self, ref: Any, place: Any, count: int) -> list:
        """`count` float32 of elements `place`, ... of a buffer of floats."""
        element = ir.MemRefType(ref.type).element_type
        loaded = llvm.load(ir.VectorType.get((count,), element), self._place(ref, place))
        if element != _f32():
            loaded = arith.extf(ir.VectorType.get((count,), _f32()), loaded)
        return [Number(_item(loaded, i)) for i in range(count)]

    def put(self, ref: Any, place: Any, values: list, condition: Any = None) -> None:
        """Elements `place`, ... of a buffer of floats = float32 values, rounded to its type."""
        element = ir.MemRefType(ref.type).element_type

        def store() -> None:
            vector = _vector([x.raw for x in values])
            if element != _f32():
                vector = arith.truncf(ir.VectorType.get((len(values),), element), vector)
            llvm.store(vector, self._place(ref, place))

        if condition is None:
            store()
            return
        with self._utils.when(condition.raw):
            store()

    def put_words(self, ref: Any, place: Any, words: list, condition: Any = None) -> None:
        """32-bit words at byte `place` of a buffer."""

        def store() -> None:
            llvm.store(_vector([x.raw for x in words]), self._byte(ref, place))

        if condition is None:
            store()
            return
        with self._utils.when(condition.raw):
            store()

    def put_byte(self, ref: Any, place: Any, value: Any) -> None:
        """Byte `place` of a buffer = the lowest of an integer."""
        byte = arith.trunci(ir.IntegerType.get_signless(8), value.raw)
        llvm.store(byte, self._byte(ref, place))

    def word(self, x: Any) -> Any:
        """The bits of a float32."""
        return type(x)(arith.bitcast(_i32(), x.raw))

    def number(self, word: Any) -> Any:
        """The float32 of 32 bits."""
        return type(word)(arith.bitcast(_f32(), word.raw))

    def real_of(self, number: Any) -> Any:
        """A small integer as float32."""
        return type(number)(arith.sitofp(_f32(), number.raw))

    def shifted(self, word: Any, count: Any) -> Any:
        """word >> count, zeros from above."""
        return type(word)(arith.shrui(word.raw, count.raw))

    def bit(self, word: Any, place: int) -> Any:
        """One bit of a word, 0 or 1."""
        return self.shifted(word, self.lane * 0 + place) & 1

    def moved(self, word: Any, count: int) -> Any:
        """word << count, or word >> -count with zeros from above."""
        places = arith.constant(_i32(), abs(count))
        return type(word)((arith.shli if count > 0 else arith.shrui)(word.raw, places))

    def masked(self, word: Any, mask: int) -> Any:
        """word & mask."""
        return word & (mask - (1 << 32) if mask >> 31 else mask)

    def shifted_by(self, word: Any, count: int) -> Any:
        """word >> count, zeros from above."""
        return self.moved(word, -count)

    def shifted_left(self, word: Any, count: Any) -> Any:
        """word << count."""
        return type(word)(arith.shli(word.raw, count.raw))

    def negated(self, condition: Any) -> Any:
        """Whether the condition does not hold."""
        return type(condition)(arith.xori(condition.raw, arith.constant(condition.raw.type, 1)))

    def smaller(self, a: Any, b: Any) -> Any:
        """The smaller of two integers."""
        return type(a)(arith.minsi(a.raw, b.raw))

    def magnitude(self, x: Any) -> Any:
        """|x|."""
        return type(x)(mlir_math.absf(x.raw))

    def reciprocal(self, x: Any) -> Any:
        """About 1 / x, off by a unit in the last place at most."""
        return type(x)(llvm.inline_asm(_f32(), [x.raw], "rcp.approx.ftz.f32 $0, $1;", "=f,f"))

    def any(self, condition: Any) -> Any:
        """Whether the condition holds in any lane of the warp."""
        text = "{ .reg .pred p; vote.sync.any.pred p, $1, -1; selp.b32 $0, 1, 0, p; }"
        word: Any = llvm.inline_asm(_i32(), [condition.raw], text, "=r,b", has_side_effects=True)
        return self.equal(type(condition)(word), 1)

    def when(self, condition: Any, yes: Any, no: Any) -> None:
        """Calls yes() or no() in the program, whichever the condition says."""
        chosen = scf.IfOp(condition.raw, has_else=True)
        blocks: Any = chosen.then_block, chosen.else_block
        for block, call in zip(blocks, (yes, no), strict=True):
            with ir.InsertionPoint(block):
                call()
                scf.yield_([])

    def choose(self, condition: Any, count: int, yes: Any, no: Any) -> list:
        """yes() or no(), lists of `count` integers: which, the condition says; only that is computed."""
        chosen = scf.IfOp(condition.raw, [_i32()] * count, has_else=True)
        blocks: Any = chosen.then_block, chosen.else_block
        for block, call in zip(blocks, (yes, no), strict=True):
            with ir.InsertionPoint(block):
                scf.yield_([x.raw for x in call()])
        return [Number(x) for x in chosen.results]

    def e4m3_codes(self, four: list) -> Any:
        """The E4M3 codes of four float32, rounded to nearest even, in one word."""
        text = (
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
        )
        word: Any = llvm.inline_asm(_i32(), [x.raw for x in four], text, "=r,f,f,f,f")
        return Number(word)

    def half_reals(self, word: Any) -> list:
        """Two float16 as float32."""
        halves = self._utils.bitcast(word.raw, ir.VectorType.get((2,), ir.F16Type.get()))
        both = arith.extf(ir.VectorType.get((2,), _f32()), halves)
        return [Number(_item(both, i)) for i in range(2)]

    def above(self, a: Any, b: Any) -> Any:
        """Whether a > b, of float32."""
        return type(a)(arith.cmpf(arith.CmpFPredicate.OGT, a.raw, a._of(b)))

    def reaches(self, a: Any, b: Any) -> Any:
        """Whether a >= b, of float32."""
        return type(a)(arith.cmpf(arith.CmpFPredicate.OGE, a.raw, a._of(b)))

    def policy(self) -> Any:
        """Keeps lines in the L2 cache while the state streams through it."""
        i64 = ir.IntegerType.get_signless(64)
        return llvm.inline_asm(i64, [], "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l")

    def put_pair(self, ref: Any, place: Any, values: list, policy: Any) -> None:
        """Two elements of a buffer in global memory = two float32, rounded to its type."""
        element = ir.MemRefType(ref.type).element_type
        vector = _vector([x.raw for x in values])
        if element != _f32():
            vector = arith.truncf(ir.VectorType.get((2,), element), vector)
        size = 2 * self._utils.bitwidth(element)
        raw = self._utils.bitcast(vector, ir.IntegerType.get_signless(size))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [self._place(ref, place), raw, policy],
            f"st.global.L2::cache_hint.b{size} [$0], $1, $2;",
            f"l,{'r' if size == 32 else 'l'},l",
            has_side_effects=True,
        )

    def e4m3_halves(self, word: Any) -> list:
        """Four E4M3 codes as two words of two float16."""
        text = (
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
            "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
        )
        both: Any = llvm.inline_asm(llvm.StructType.get_literal([_i32()] * 2), [word.raw], text, "=r,=r,r")
        return [Number(llvm.extractvalue(_i32(), both, [i])) for i in range(2)]

    def e4m3_reals(self, short: Any) -> list:
        """Two E4M3 codes as float32."""
        halves = self._utils.bitcast(
            self.e4m3_halves(short)[0].raw, ir.VectorType.get((2,), ir.F16Type.get())
        )
        both = arith.extf(ir.VectorType.get((2,), _f32()), halves)
        return [Number(_item(both, i)) for i in range(2)]

    def half(self, x: Any) -> Any:
        """A float32 rounded to float16, as float32."""
        return type(x)(arith.extf(_f32(), arith.truncf(ir.F16Type.get(), x.raw)))

    def exponent(self, x: Any) -> Any:
        """The biased exponent of a float32, int32."""
        bits = type(x)(arith.bitcast(_i32(), x.raw))
        return (bits & 0x7F800000) // (1 << 23)

    def power(self, exponent: Any) -> Any:
        """2 to an int32 exponent in -126..127, as float32."""
        return type(exponent)(arith.bitcast(_f32(), ((exponent + 127) * (1 << 23)).raw))

    def larger(self, a: Any, b: Any) -> Any:
        """The larger of two integers."""
        return type(a)(arith.maxsi(a.raw, b.raw))

    def across(self, x: Any, distance: int) -> Any:
        """x of the lane whose number differs in one bit."""
        return type(x)(self._utils.shfl_bfly(x.raw, distance))
