"""The eager decode step: every token moves the state, one 64-row tile at a time in registers.

The state is stored after every token, into the slot of its position where several states a row are kept.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fold import Tile, TokenRule, of_rows
from pallas_kernels.launch import TILE, mosaic_gpu
from pallas_kernels.pipeline import Geometry, Operands, run_kernel, tiled_layout

LANE_BYTES = 16


def state_layout(plgpu: Any, d_state: int, dtype: Any) -> Any:
    """Layout of a state tile for direct global access: 16 bytes a lane and as many lanes a row as it takes,
    so that a warp moves 512 bytes that follow each other."""
    vector = LANE_BYTES // jnp.dtype(dtype).itemsize
    columns = 128 if d_state % 128 == 0 else 64
    rows = 32 * vector // columns
    return tiled_layout(plgpu, ((4 * rows, columns), (rows, columns), (1, vector)), (-6,), (-4, -3), -1)


def eager_tiles(
    rule: TokenRule,
    geometry: Geometry,
    operands: Operands,
    ctas: int,
    *,
    states: int = 1,
    interpret: Any = None,
) -> None:
    """Outputs of the flushing rows (without a plan: of all) into operands.out; rewrites their states.

    operands.state is a reference [states*B*G*tiles, 64, K]; the state after position p lies in slot p mod
    `states`, and a call has at most `states` tokens. Rings are not touched.
    """
    plgpu = mosaic_gpu()
    geometry.check()
    geo, fused = geometry, interpret is None
    tokens, tiles, groups = geo.tokens, geo.tiles, geo.groups
    row_tiles = groups * tiles
    layout = state_layout(plgpu, geo.d_state, operands.state.dtype)
    planned = operands.cursor is not None
    ctas = min(ctas, geo.batch * row_tiles)

    def body(source: Any, buffers: dict) -> None:
        del buffers
        state, cursor_in = source.state, source.cursor
        rows = source.counts[1] if planned else geo.batch
        cta = lax.axis_index("cta")
        steps = lax.div(jnp.maximum(rows * row_tiles - cta + ctas - 1, 0), ctas)

        def one_tile(step: jax.Array, carry: None) -> None:
            index = cta + step * ctas
            row, within = lax.div(index, row_tiles), lax.rem(index, row_tiles)
            start = jnp.int32(0)
            if planned:
                # From the end of the list, so that the cursor's address does not depend on the counts.
                at = geo.batch - 1 - row
                row, start = cursor_in[at, 0], cursor_in[at, 1]
            group, part = lax.div(within, tiles), lax.rem(within, tiles)
            block = row * groups + group
            head = lax.div(part * TILE, geo.head_dim)
            first_head = group * geo.group_heads + head

            def rows_of(pick: Any) -> jax.Array:
                return of_rows(plgpu, layout, geo, part, head, pick)

            def place_of(token: int) -> jax.Array:
                """Where the state after the call's token lies; -1: the last one before the call."""
                slot = lax.rem(start + (token + states), states) if states > 1 else 0
                return (slot * (geo.batch * groups) + block) * tiles + part

            constants = tuple(
                rows_of(lambda k, c=c: source.constants[c, first_head + k])
                for c in range(rule.head_constants)
            )
            tile = Tile(plgpu, layout, fused, constants)
            matrix = plgpu.load(state.at[place_of(-1)], layout=layout, optimized=False).astype(jnp.float32)
            for t in range(tokens):
                value = plgpu.load(
                    source.new_values.at[block, t, part], layout=layout.reduce(1), optimized=False
                ).astype(jnp.float32)
                scalars = tuple(
                    rows_of(lambda k, s=s, t=t: s[row, t, first_head + k]) for s in source.new_scalars
                )
                key = plgpu.load(source.new_keys.at[block, t], layout=layout.reduce(0), optimized=False)
                query = plgpu.load(source.reader.at[block, t], layout=layout.reduce(0), optimized=False)
                key, query = key.astype(jnp.float32), query.astype(jnp.float32)
                readouts = tile.times(matrix, query), jnp.sum(key * query)
                if rule.reads_key:
                    readouts += (tile.times(matrix, key),)
                moved = rule.token(tile, matrix, value, key, scalars, *readouts[2:])
                state[place_of(t)] = moved.astype(state.dtype)
                result = rule.read(tile, readouts, value, scalars)
                source.out[row, t, group, part] = result.astype(source.out.dtype)
                matrix = moved
            return carry

        lax.fori_loop(0, steps, one_tile, None)

    run_kernel(body, operands.arguments(), ctas, "eager_step", interpret=interpret)
