"""The outputs of one state tile: readouts of the checkpoint plus weighted values of ring and new tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import TILE
from pallas_kernels.packing import part_step, part_weights
from pallas_kernels.pipeline import Geometry, row_products, row_sums, single_layout


@dataclasses.dataclass(frozen=True)
class Readout:
    """How a kernel reads its tiles. shared_reader: as in `Recurrence`; parts, columns: of a 16-bit state's
    packed readers, 0 for a float32 state; fused: compiled, not interpreted."""

    plgpu: Any
    geometry: Geometry
    state_dtype: Any
    shared_reader: bool
    parts: int
    columns: int
    fused: bool

    def __call__(
        self,
        state: Any,
        values: Any,
        group: tuple,
        head: jax.Array,
        offset: jax.Array,
        first_row: jax.Array,
    ) -> Callable[[Any], jax.Array]:
        """The function from a token of the call to its outputs [64], float32.

        state [64, K] and values [slots, 64]: the tile's buffers. group: buffers of its group: weights
        [T, heads, slots], scale [T, heads] or None, readers [T, K] (shared_reader) or [T, heads, K], packed
        readers [heads, columns, K] or None. head, first_row: the tile's first in the group, whose heads begin
        at `offset` in weights and scale.
        """
        plgpu, geo, fused = self.plgpu, self.geometry, self.fused
        weights, scale, readers, packed = group
        layout = plgpu.Layout.WGMMA
        # Transposed loads of 32-bit values need one element a register; the row sums land in the same places.
        values_layout = layout if jnp.dtype(values.dtype).itemsize == 2 else single_layout(plgpu)
        joint = values_layout is layout
        past = plgpu.load(values.T, layout=values_layout, optimized=False).astype(jnp.float32)
        if self.parts:
            matrix = self._all_readouts(state, packed.at[0 if self.shared_reader else head])
        else:
            matrix = plgpu.load(state, layout=layout)
        if geo.tile_heads > 1:
            rows = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout.reduce(1))
            row_head = lax.div(first_row + rows, geo.head_dim)

        def times(operand: jax.Array, vector: jax.Array, layout: Any = layout) -> jax.Array:
            return row_products(plgpu, layout, [(operand, vector)], fused)

        def values_sum(weight: jax.Array) -> jax.Array:
            sums = row_sums(times(past, weight, values_layout))
            return plgpu.layout_cast(sums, layout.reduce(1)) if fused else sums

        def output(t: Any) -> jax.Array:
            result: Any = None
            for k in range(geo.tile_heads):
                h = jnp.minimum(head + k, geo.group_heads - 1) if geo.tile_heads > 1 else head
                row = weights.at[t, offset + h, pl.ds(0, geo.tile_slots)]
                weight = plgpu.load(row, layout=values_layout.reduce(0))
                if k == 0 or not self.shared_reader:
                    vector = self._reader(readers.at[t] if self.shared_reader else readers.at[t, h], t)
                if not self.shared_reader:
                    if joint:
                        y = row_sums(row_products(plgpu, layout, [(matrix, vector), (past, weight)], fused))
                    else:
                        y = row_sums(times(matrix, vector)) + values_sum(weight)
                else:
                    if k == 0:
                        checkpoint = times(matrix, vector)
                    if geo.tile_heads == 1 and joint:
                        y = row_sums(checkpoint * scale[t, offset + h] + times(past, weight))
                    else:
                        if k == 0:
                            checkpoint = row_sums(checkpoint)
                        y = checkpoint * scale[t, offset + h] + values_sum(weight)
                result = y if k == 0 else jnp.where(row_head >= head + k, y, result)
            return result

        return output

    def _reader(self, source: Any, t: Any) -> jax.Array:
        """Reader [K] of a token, or the factors that add its parts' columns."""
        layout = self.plgpu.Layout.WGMMA.reduce(0)
        if self.parts:
            step = part_step(self.state_dtype)
            return part_weights(self.plgpu, layout, self.columns, t, self.parts, step)
        return self.plgpu.load(source, layout=layout).astype(jnp.float32)

    def _all_readouts(self, state: Any, packed: Any) -> jax.Array:
        """State times all packed readers on the tensor cores: products of 16-bit numbers are exact."""

        def multiply(total: Any) -> jax.Array:
            self.plgpu.wgmma(total, state, packed.T)
            return total[...]

        return pl.run_scoped(multiply, self.plgpu.ACC((TILE, self.columns), jnp.float32))


def store_row(plgpu: Any, target: Any, values: jax.Array, fused: bool) -> None:
    """target[...] = values [64], in global memory; the lines stay in the L2 cache while the state streams
    through it."""
    if not fused:
        target[...] = values
        return

    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    bits = 8 * jnp.dtype(values.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA.reduce(1)))
    def store(_, target, values):
        i32, raw = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(bits)
        void, i64 = ir.Type.parse("!llvm.void"), ir.IntegerType.get_signless(64)
        policy: Any = llvm.inline_asm(i64, [], "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l")
        places = values.layout.thread_idxs(values.shape)
        for register, (row,) in zip(values.registers.flat, places, strict=True):
            pointer = utils.getelementptr(utils.memref_ptr(target), [arith.index_cast(i32, row)], raw)
            llvm.inline_asm(
                void,
                [pointer, utils.bitcast(register, raw), policy],
                f"st.global.L2::cache_hint.b{bits} [$0], $1, $2;",
                f"l,{'h' if bits == 16 else 'r'},l",
                has_side_effects=True,
            )

    store(target, values)
