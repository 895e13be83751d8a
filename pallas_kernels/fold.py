"""Kernels that rewrite the state: the flush of a ring and the eager decode step, one 64-row tile at a time in
registers.

A flush folds the committed tokens, stores the tile and then continues with the call's tokens without storing;
an eager step has no history and stores after every token, into the slot of its position where several states
a row are kept. Tokens are applied one after the other, as the recurrence is written.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import TILE, mosaic_gpu
from pallas_kernels.pipeline import (
    Geometry,
    Operands,
    granule_live,
    pin_plain,
    row_products,
    row_sums,
    tiled_layout,
)


def state_layout(plgpu: Any) -> Any:
    """Layout of a state tile for direct global access: 16 bytes a lane, eight lanes (128 bytes) a row."""
    return tiled_layout(plgpu, ((16, 32), (4, 32), (1, 4)), (-6,), (-4, -3), -1)


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a recurrence needs to apply one token to a tile: layout, arithmetic form and head constants a
    row."""

    plgpu: Any
    layout: Any
    fused: bool
    constants: tuple


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """How a recurrence moves a tile.

    token(tile, state, value [64], key [K], scalars) -> state applies one token; output(tile, readout [64],
    value) -> [64]; history(tile, state, length, read, read_scalars) -> state folds the committed tokens:
    read(j) gives value, key and scalars of the j-th, read_scalars(j) the scalars alone (a scalar each, or
    [64] where a tile holds several heads).
    """

    token: Callable[..., jax.Array]
    output: Callable[..., jax.Array]
    history: Callable[..., jax.Array]
    scalars: int
    head_constants: int


def one_by_one(token: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The history rule that applies the tokens in order."""

    def history(
        tile: Tile, state: jax.Array, length: jax.Array, read: Callable, read_scalars: Callable
    ) -> jax.Array:
        def step(j: jax.Array, state: jax.Array) -> jax.Array:
            return tile.plgpu.layout_cast(token(tile, state, *read(j)), tile.layout)

        return lax.fori_loop(0, length, step, state)

    return history


def fold_tiles(
    rule: TokenRule,
    geometry: Geometry,
    operands: Operands,
    ctas: int,
    *,
    history: bool,
    states: int = 1,
    granule: int = 8,
    overlap: bool = False,
    interpret: Any = None,
) -> None:
    """Outputs of the flushing rows into operands.out; rewrites their state tiles in place.

    operands.state is a reference [states*B*G*tiles, 64, K]. history: fold the ring first and store then (a
    flush). Without it the rings are not touched, and the state after position p is stored in slot p mod
    `states` (an eager step from position `start`, at most `states` tokens).
    overlap: let the next kernel start at once; it must not depend on this one.
    """
    plgpu = mosaic_gpu()
    geo = geometry
    geo.check()
    fused = interpret is None
    ring, tokens, tiles, groups = geo.ring, geo.tokens, geo.tiles, geo.groups
    row_tiles = groups * tiles
    ctas = min(ctas, geo.batch * row_tiles)
    granules = ring // granule if history else 0
    value_dtype, key_dtype = operands.new_values.dtype, operands.new_keys.dtype
    state_dtype = operands.state.dtype
    layout = state_layout(plgpu)
    width = 8
    copies = 2 * granules + rule.scalars
    has_constants = operands.constants is not None

    scratch = (
        {
            "values": plgpu.SMEM((ring, TILE), value_dtype),
            "keys": plgpu.SMEM((ring, geo.d_state), key_dtype),
            "scalars": tuple(plgpu.SMEM((ring, width), jnp.float32) for _ in range(rule.scalars)),
            "barrier": plgpu.Barrier(num_arrivals=copies),
        }
        if history
        else {}
    )

    def body(
        *refs: Any, values: Any = None, keys: Any = None, scalars: tuple = (), barrier: Any = None
    ) -> None:
        out, state, *rest = refs
        if history:
            values_ring, keys_ring, *rest = rest
            scalar_rings, rest = rest[: rule.scalars], rest[rule.scalars :]
        values_in, keys_in, *rest = rest
        scalars_in, rest = rest[: rule.scalars], rest[rule.scalars :]
        reader_in, cursor_in, counts_in, *constants_in = rest
        if fused and history:
            pin_plain(plgpu, [values, keys, *scalars])
        if overlap and fused:
            plgpu.griddepcontrol_launch_dependents()
        total = counts_in[1] * row_tiles
        cta = lax.axis_index("cta")

        def serve(step: jax.Array, carry: None) -> None:
            index = cta + step * ctas
            at = geo.batch - counts_in[1] + lax.div(index, row_tiles)
            within = lax.rem(index, row_tiles)
            row, start, length = cursor_in[at, 0], cursor_in[at, 1], cursor_in[at, 2]
            group, tile = lax.div(within, tiles), lax.rem(within, tiles)
            block = row * groups + group

            def place_of(token: int) -> jax.Array:
                """Where the state after the call's token lies; -1: the last one before the call."""
                slot = lax.rem(start + (token + states), states) if states > 1 else 0
                return slot * (geo.batch * row_tiles) + row * row_tiles + within

            place = place_of(-1)
            head = lax.div(tile * TILE, geo.head_dim)
            first_head = group * geo.group_heads + head

            if history:
                for g in range(granules):
                    live = granule_live(g * granule, granule, start, length, ring)
                    source = block if interpret is not None else jnp.where(live, block, geo.batch * groups)
                    rows = pl.ds(g * granule, granule)
                    plgpu.copy_gmem_to_smem(values_ring.at[source, rows, tile], values.at[rows], barrier)
                    plgpu.copy_gmem_to_smem(keys_ring.at[source, rows], keys.at[rows], barrier)
                aligned = jnp.minimum(lax.div(first_head, 4) * 4, max(geo.heads - width, 0))
                for source, target in zip(scalar_rings, scalars, strict=True):
                    plgpu.copy_gmem_to_smem(source.at[row, :, pl.ds(aligned, width)], target, barrier)

            matrix = plgpu.load(state.at[place], layout=layout, optimized=False).astype(jnp.float32)

            if geo.tile_heads > 1:
                rows_of = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout.reduce(1))
                row_head = lax.div(tile * TILE + rows_of, geo.head_dim)

            def a_row(pick: Callable[[jax.Array], jax.Array]) -> jax.Array:
                """A scalar of the tile's head, or [64] values where a tile holds rows of several heads."""
                last = geo.group_heads - 1
                result = pick(jnp.int32(0))
                if geo.tile_heads == 1:
                    return result
                result = jnp.full((TILE,), result, jnp.float32)
                for k in range(1, geo.tile_heads):
                    here = pick(jnp.minimum(head + k, last) - head)
                    result = jnp.where(row_head >= head + k, jnp.full((TILE,), here, jnp.float32), result)
                return result

            constants = tuple(
                a_row(lambda k, c=c: constants_in[0][c, first_head + k]) for c in range(rule.head_constants)
            )
            tile_rule = Tile(plgpu, layout, fused, constants)

            if history:
                plgpu.barrier_wait(barrier)

                def read_scalars(j: jax.Array) -> tuple:
                    slot = lax.rem(start + j, ring)
                    return tuple(a_row(lambda k, s=s: s[slot, first_head + k - aligned]) for s in scalars)

                def read(j: jax.Array) -> tuple:
                    slot = lax.rem(start + j, ring)
                    value = plgpu.load(values.at[slot], layout=layout.reduce(1), optimized=False)
                    key = plgpu.load(keys.at[slot], layout=layout.reduce(0), optimized=False)
                    return value.astype(jnp.float32), key.astype(jnp.float32), read_scalars(j)

                matrix = rule.history(tile_rule, matrix, length, read, read_scalars)
                stored = matrix.astype(state_dtype)

                @pl.when(length > 0)
                def _():
                    state[place] = stored

                matrix = stored.astype(jnp.float32)

            for t in range(tokens):
                value = plgpu.load(values_in.at[block, t, tile], layout=layout.reduce(1), optimized=False)
                key = plgpu.load(keys_in.at[block, t], layout=layout.reduce(0), optimized=False)
                reader = plgpu.load(reader_in.at[block, t], layout=layout.reduce(0), optimized=False)
                value, key, reader = (x.astype(jnp.float32) for x in (value, key, reader))
                here = tuple(a_row(lambda k, s=s, t=t: s[row, t, first_head + k]) for s in scalars_in)
                if history:
                    slot = lax.rem(start + length + t, ring)
                    values_ring[block, slot, tile] = value.astype(value_dtype)
                    for k in range(geo.tile_heads):
                        one = first_head + (jnp.minimum(head + k, geo.group_heads - 1) - head)
                        for source, target in zip(scalars_in, scalar_rings, strict=True):
                            target[row, slot, one] = source[row, t, one]

                    @pl.when(tile == 0)
                    def _(slot=slot, key=key):
                        keys_ring[block, slot] = key.astype(key_dtype)

                matrix = rule.token(tile_rule, matrix, value, key, here)
                if not history:
                    state[place_of(t)] = matrix.astype(state_dtype)
                readout = row_sums(row_products(plgpu, layout, [(matrix, reader)], fused))
                out[row, t, group, tile] = rule.output(tile_rule, readout, value).astype(out.dtype)
            if history:
                # Every warp has read the ring before the next tile's copies overwrite it.
                plgpu.commit_smem()
            return carry

        lax.fori_loop(0, lax.div(jnp.maximum(total - cta + ctas - 1, 0), ctas), serve, None)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        scratch_types=scratch,
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=128),
        kernel_name="replay_flush" if history else "eager_step",
        **({} if interpret is None else {"interpret": interpret}),
    )
    rings = [operands.values, operands.keys, *operands.scalars] if history else []
    arguments = [
        operands.out,
        operands.state,
        *rings,
        operands.new_values,
        operands.new_keys,
        *operands.new_scalars,
        operands.reader,
        operands.cursor,
        operands.counts,
    ]
    if has_constants:
        arguments.append(operands.constants)
    kernel(*arguments)
