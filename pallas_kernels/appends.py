"""Stores of a few tokens' entries to global memory by a warpgroup, two neighbouring elements a thread.

The lines stay in the L2 cache while the state streams through it.
"""

from typing import Any

import jax
import jax.numpy as jnp


def store_tokens(
    plgpu: Any, target: Any, source: Any, first: jax.Array, limit: int, stride: int, offset: jax.Array
) -> None:
    """target[((first + t) mod limit) stride + offset + i] = source[t, i], rounded to the target's type.

    target: reference in global memory, taken as flat; source [T, 64] in shared memory; first < limit.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    from pallas_kernels.lanes import Lanes, first_element

    number, bits = plgpu.Layout.WGMMA, 16 * jnp.dtype(target.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), number, number))
    def store(_, target, source, first, offset):
        ops = Lanes()
        tokens, width = ir.MemRefType(source.type).shape
        wanted = ir.MemRefType(target.type).element_type
        given = ir.MemRefType(source.type).element_type
        packed = ir.IntegerType.get_signless(bits)
        i64 = ir.IntegerType.get_signless(64)
        policy: Any = llvm.inline_asm(i64, [], "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l")
        first, offset = first_element(first), first_element(offset)
        for begin in range(0, tokens * width, 2 * 128):
            element = (ops.warp * 32 + ops.lane) * 2 + begin
            token, column = element // width, element & (width - 1)
            there = token < tokens
            pair: Any = llvm.load(
                ir.VectorType.get((2,), given),
                utils.getelementptr(
                    utils.memref_ptr(source), [ops.select(there, element, element * 0).raw], given
                ),
            )
            if given != wanted:
                pair = arith.truncf(ir.VectorType.get((2,), wanted), pair)
            row = first + token
            row = ops.select(row < limit, row, row - limit)
            place = (row * stride + offset + column).raw
            pointer = utils.getelementptr(utils.memref_ptr(target), [place], wanted)
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [pointer, utils.bitcast(pair, packed), policy, there.raw],
                f"@$3 st.global.L2::cache_hint.b{bits} [$0], $1, $2;",
                f"l,{'r' if bits == 32 else 'l'},l,b",
                has_side_effects=True,
            )

    store(target, source, first, offset)


def store_scalars(
    plgpu: Any,
    targets: tuple,
    sources: tuple,
    tokens: int,
    heads: int,
    first: jax.Array,
    head: jax.Array,
    column: jax.Array,
    last: jax.Array,
) -> None:
    """target[(first + t) mod R, head + k] = source[t, column + k] for all tokens t and up to `heads` heads.

    last: the group's last head, above which nothing is stored.

    Targets: references float32 [R, H] in global memory; sources: [8, columns] in shared memory.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    from pallas_kernels.lanes import Lanes, first_element

    number, ref = plgpu.Layout.WGMMA, plgpu.RefType()
    refs = (ref,) * len(targets)

    @plgpu.inline_mgpu(arg_types=(refs, refs, (number,) * 4))
    def store(_, targets, sources, numbers):
        ops, f32 = Lanes(), ir.F32Type.get()
        first, head, column, last = map(first_element, numbers)
        thread = ops.warp * 32 + ops.lane
        token, k = thread // heads, thread - thread // heads * heads
        there = (token < tokens) & (head + k < last + 1)
        token = ops.select(there, token, token * 0)
        k = ops.select(there, k, k * 0)
        for target, source in zip(targets, sources, strict=True):
            slots, width = ir.MemRefType(target.type).shape
            row = first + token
            row = ops.select(row < slots, row, row - slots)
            value = ops.real(source, token, column + k)
            pointer = utils.getelementptr(utils.memref_ptr(target), [(row * width + head + k).raw], f32)
            with utils.when(there.raw):
                llvm.store(value.raw, pointer)

    store(targets, sources, (first, head, column, last))
