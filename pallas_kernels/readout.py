"""The outputs of one state tile: readouts of the checkpoint plus weighted values of ring and new tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import TILE
from pallas_kernels.packing import part_step, part_weights
from pallas_kernels.pipeline import Geometry, row_products, row_sums, single_layout, warp_barrier

# Columns of a state tile that a lane holds at once.
PIECE = 32


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
    ) -> list[jax.Array]:
        """Outputs [64], float32, of every token of the call.

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
        readouts = self._readouts(state, readers, packed, head)
        past = plgpu.load(values.T, layout=values_layout, optimized=False).astype(jnp.float32)
        if geo.tile_heads > 1:
            rows = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout.reduce(1))
            row_head = lax.div(first_row + rows, geo.head_dim)

        def output(t: int) -> jax.Array:
            result: Any = None
            for k in range(geo.tile_heads):
                h = offset + (jnp.minimum(head + k, geo.group_heads - 1) if geo.tile_heads > 1 else head)
                row = weights.at[t, h, pl.ds(0, geo.tile_slots)]
                weight = plgpu.load(row, layout=values_layout.reduce(0))
                sums = row_products(plgpu, values_layout, [(past, weight)], fused)
                readout = readouts[t]
                if joint and geo.tile_heads == 1:
                    y = row_sums(sums + (readout * scale[t, h] if self.shared_reader else readout))
                else:
                    readout, sums = row_sums(readout), row_sums(sums)
                    sums = plgpu.layout_cast(sums, layout.reduce(1)) if fused else sums
                    y = sums + (readout * scale[t, h] if self.shared_reader else readout)
                result = y if k == 0 else jnp.where(row_head >= head + k, y, result)
            return result

        return [output(t) for t in range(geo.tokens)]

    def _readouts(self, state: Any, readers: Any, packed: Any, head: jax.Array) -> list[jax.Array]:
        """Partial sums along rows of the state times the reader of each token."""
        plgpu, geo = self.plgpu, self.geometry
        layout = plgpu.Layout.WGMMA
        if self.parts:
            products = self._all_readouts(state, packed.at[0 if self.shared_reader else head])
            step = part_step(self.state_dtype)

            def joined(t: int) -> jax.Array:
                factors = part_weights(plgpu, layout.reduce(0), self.columns, t, self.parts, step)
                return row_products(plgpu, layout, [(products, factors)], self.fused)

            return [joined(t) for t in range(geo.tokens)]

        sums: list = [None] * geo.tokens
        for first in range(0, geo.d_state, PIECE):
            columns = pl.ds(first, PIECE)
            if first and self.fused:
                # Without it the compiler loads all pieces at once: too many registers for two CTAs.
                warp_barrier(plgpu)
            matrix = plgpu.load(state.at[:, columns], layout=layout)
            for t in range(geo.tokens):
                reader = readers.at[t] if self.shared_reader else readers.at[t, head]
                vector = plgpu.load(reader.at[columns], layout=layout.reduce(0)).astype(jnp.float32)
                sums[t] = row_products(plgpu, layout, [(matrix, vector)], self.fused, sums[t])
        return sums

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
