"""Kernels that rewrite the state: the flush of a ring and the eager decode step, one 64-row tile at a time in
registers.

A flush folds the committed tokens, stores the tile and then continues with the call's tokens without storing;
an eager step has no history and stores after every token, into the slot of its position where several states
a row are kept.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.blocks import BLOCK, Fold, block_layout, fold_block, read_block
from pallas_kernels.launch import TILE, flushes_beside, mosaic_gpu
from pallas_kernels.pipeline import (
    SM_SHARED_BYTES,
    SMS,
    Geometry,
    Operands,
    granule_live,
    pin_plain,
    row_products,
    row_sums,
    shared_bytes,
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

    def times(self, matrix: jax.Array, vector: jax.Array) -> jax.Array:
        """matrix [64, K] x vector [K]."""
        return row_sums(row_products(self.plgpu, self.layout, [(matrix, vector)], self.fused))


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """How a recurrence moves a tile.

    token(tile, state, value [64], key [K], scalars) -> state applies one token; reads_key: it also takes the
    old state times the key [64]. read(tile, readouts, value, scalars) -> [64] is the token's output, from the
    old state times the reader [64], key . reader and, reads_key, the old state times the key. history(tile,
    state, length, read, read_scalars) -> state folds the committed tokens: read(j) gives value, key and
    scalars of the j-th, read_scalars(j) the scalars alone (a scalar each, or [64] where a tile holds several
    heads). block folds up to 16 of them at once, in the lanes of a warp.
    """

    token: Callable[..., jax.Array]
    read: Callable[..., jax.Array]
    history: Callable[..., jax.Array]
    block: Fold
    reads_key: bool
    scalars: int
    head_constants: int


def one_by_one(token: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The history rule that applies the tokens of a rule that reads the key in order."""

    def history(
        tile: Tile, state: jax.Array, length: jax.Array, read: Callable, read_scalars: Callable
    ) -> jax.Array:
        def step(j: jax.Array, state: jax.Array) -> jax.Array:
            value, key, scalars = read(j)
            state = token(tile, state, value, key, scalars, tile.times(state, key))
            return tile.plgpu.layout_cast(state, tile.layout)

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
    beside: bool = False,
    counter: Any = None,
    interpret: Any = None,
) -> None:
    """Outputs of the flushing rows into operands.out; rewrites their state tiles in place.

    operands.state is a reference [states*B*G*tiles, 64, K]. history: fold the ring first and store then (a
    flush). Without it the rings are not touched, and the state after position p is stored in slot p mod
    `states` (an eager step from position `start`, at most `states` tokens).
    beside: nothing is left to do when the window's kernel flushes as well (`launch.flushes_beside`).
    counter: reference int32 [1] to set to zero.
    """
    plgpu = mosaic_gpu()
    geometry.check()
    scratch, serve, arguments = flush_work(
        rule, geometry, operands, history=history, states=states, interpret=interpret
    )
    ctas = min(ctas, geometry.batch * geometry.groups * geometry.tiles)
    if history:
        ctas = min(ctas, SMS * (SM_SHARED_BYTES // (shared_bytes(scratch) + 1024)))

    def body(*refs: Any, **buffers: Any) -> None:
        cta = lax.axis_index("cta")
        if counter is not None:
            refs, zeroed = refs[:-1], refs[-1]

            @pl.when(cta == 0)
            def _():
                zeroed[0] = jnp.int32(0)

        rows = None
        if beside:
            counts = refs[[argument is operands.counts for argument in arguments].index(True)]
            rows = jnp.where(flushes_beside(counts), 0, counts[1])
        serve(refs, cta, ctas, buffers, rows)

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
    kernel(*arguments, *([] if counter is None else [counter]))


def flush_work(
    rule: TokenRule,
    geometry: Geometry,
    operands: Operands,
    *,
    history: bool = True,
    states: int = 1,
    stages: int = 2,
    granule: int = 8,
    interpret: Any = None,
) -> tuple[dict, Callable[..., None], list]:
    """Shared-memory buffers, program and arguments of `fold_tiles`, for use in a kernel of its own or beside
    others.

    serve(references to the arguments, worker, workers, buffers, rows) takes every `workers`-th tile of the
    plan's last `rows` rows (None: those that flush) from the `worker`-th on; a worker is a warpgroup. stages:
    tiles of a worker that are in flight or in work.
    """
    plgpu = mosaic_gpu()
    geo = geometry
    fused = interpret is None
    ring, tokens, tiles, groups = geo.ring, geo.tokens, geo.tiles, geo.groups
    row_tiles = groups * tiles
    granules = ring // granule if history else 0
    value_dtype, key_dtype = operands.new_values.dtype, operands.new_keys.dtype
    state_dtype = operands.state.dtype
    # Exact products need bfloat16 inputs; a warp's 16 rows must share a head.
    sixteen = {jnp.dtype(x.dtype) for x in (operands.new_values, operands.new_keys, operands.reader)}
    blocks = history and fused and sixteen == {jnp.dtype(jnp.bfloat16)} and not geo.head_dim % BLOCK
    layout = block_layout(plgpu) if blocks else state_layout(plgpu)
    width = 8
    has_constants = operands.constants is not None
    planned = operands.cursor is not None

    def staged(*shape: int, dtype: Any) -> Any:
        return plgpu.SMEM((stages, *shape), dtype)

    scratch = {}
    if history:
        scratch = {
            "tile": staged(TILE, geo.d_state, dtype=state_dtype),
            "values": staged(ring, TILE, dtype=value_dtype),
            "keys": staged(ring, geo.d_state, dtype=key_dtype),
            "scalars": tuple(staged(ring, width, dtype=jnp.float32) for _ in range(rule.scalars)),
            "new_values": staged(tokens, TILE, dtype=value_dtype),
            "new_keys": staged(tokens, geo.d_state, dtype=key_dtype),
            "reader": staged(tokens, geo.d_state, dtype=operands.reader.dtype),
            # Copies begin at multiples of 128 bytes.
            "new_scalars": tuple(staged(8, width, dtype=jnp.float32) for _ in range(rule.scalars)),
        }
        copies = 4 + 2 * granules + 2 * rule.scalars
        scratch["barrier"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)

    def serve(refs: tuple, worker: Any, workers: int, buffers: dict, rows: Any = None) -> None:
        out, state, *rest = refs
        if history:
            values_ring, keys_ring, *rest = rest
            scalar_rings, rest = rest[: rule.scalars], rest[rule.scalars :]
        values_in, keys_in, *rest = rest
        scalars_in, rest = rest[: rule.scalars], rest[rule.scalars :]
        reader_in, *rest = rest
        if planned:
            cursor_in, counts_in, *rest = rest
        constants_in = rest
        if history:
            tile, barrier, reader = (buffers[name] for name in ("tile", "barrier", "reader"))
            values, keys, scalars = (buffers[name] for name in ("values", "keys", "scalars"))
            new_values, new_keys, new_scalars = (
                buffers["new_" + name] for name in ("values", "keys", "scalars")
            )
        if fused and history:
            pin_plain(plgpu, [ref for ref in jax.tree.leaves(buffers) if ref is not buffers["barrier"]])
        if rows is None:
            rows = counts_in[1] if planned else geo.batch
        steps = lax.div(jnp.maximum(rows * row_tiles - worker + workers - 1, 0), workers)

        def locate(step: jax.Array) -> tuple:
            """Row, start and length, group, tile in the group, its first head and a copy's first head."""
            index = worker + step * workers
            row, within = lax.div(index, row_tiles), lax.rem(index, row_tiles)
            start = length = jnp.int32(0)
            if planned:
                # From the end of the list, so that the cursor's address does not depend on the counts.
                at = geo.batch - 1 - row
                row, start, length = cursor_in[at, 0], cursor_in[at, 1], cursor_in[at, 2]
            group, part = lax.div(within, tiles), lax.rem(within, tiles)
            head = group * geo.group_heads + lax.div(part * TILE, geo.head_dim)
            aligned = jnp.minimum(lax.div(head, 4) * 4, max(geo.heads - width, 0))
            return row, start, length, group, part, head, aligned

        def issue(step: jax.Array, stage: jax.Array) -> None:
            row, start, length, group, part, _, aligned = locate(step)
            block, landed = row * groups + group, barrier.at[stage]
            plgpu.copy_gmem_to_smem(state.at[block * tiles + part], tile.at[stage], landed)
            for g in range(granules):
                live = granule_live(g * granule, granule, start, length, ring)
                source = block if interpret is not None else jnp.where(live, block, geo.batch * groups)
                slots = pl.ds(g * granule, granule)
                plgpu.copy_gmem_to_smem(values_ring.at[source, slots, part], values.at[stage, slots], landed)
                plgpu.copy_gmem_to_smem(keys_ring.at[source, slots], keys.at[stage, slots], landed)
            plgpu.copy_gmem_to_smem(values_in.at[block, :, part], new_values.at[stage], landed)
            plgpu.copy_gmem_to_smem(keys_in.at[block], new_keys.at[stage], landed)
            plgpu.copy_gmem_to_smem(reader_in.at[block], reader.at[stage], landed)
            heads = pl.ds(aligned, width)
            for sources, targets, count in ((scalar_rings, scalars, ring), (scalars_in, new_scalars, tokens)):
                for source, target in zip(sources, targets, strict=True):
                    into = target.at[stage, pl.ds(0, count)]
                    plgpu.copy_gmem_to_smem(source.at[row, :, heads], into, landed)

        def one_tile(step: jax.Array, carry: None) -> None:
            row, start, length, group, part, first_head, aligned = locate(step)
            stage = lax.rem(step, stages)
            block = row * groups + group

            def place_of(token: int) -> jax.Array:
                """Where the state after the call's token lies; -1: the last one before the call."""
                slot = lax.rem(start + (token + states), states) if states > 1 else 0
                return (slot * (geo.batch * groups) + block) * tiles + part

            place = place_of(-1)
            head = first_head - group * geo.group_heads
            if geo.tile_heads > 1:
                rows_of = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout.reduce(1))
                row_head = lax.div(part * TILE + rows_of, geo.head_dim)

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
                ring_values, ring_keys = values.at[stage], keys.at[stage]
                ring_scalars = tuple(s.at[stage] for s in scalars)
                value_of, key_of, reader_of = new_values.at[stage], new_keys.at[stage], reader.at[stage]
                plgpu.barrier_wait(barrier.at[stage])
                matrix = plgpu.load(tile.at[stage], layout=layout, optimized=False).astype(jnp.float32)

                def scalar_of(s: Any, at: Any) -> jax.Array:
                    return a_row(lambda k: s[stage, at, first_head + k - aligned])

                def read_scalars(j: jax.Array) -> tuple:
                    slot = lax.rem(start + j, ring)
                    return tuple(scalar_of(s, slot) for s in scalars)

                def read(j: jax.Array) -> tuple:
                    slot = lax.rem(start + j, ring)
                    value = plgpu.load(ring_values.at[slot], layout=layout.reduce(1), optimized=False)
                    key = plgpu.load(ring_keys.at[slot], layout=layout.reduce(0), optimized=False)
                    return value.astype(jnp.float32), key.astype(jnp.float32), read_scalars(j)

                def fold(i: jax.Array, matrix: jax.Array) -> jax.Array:
                    return fold_block(
                        rule.block,
                        plgpu,
                        layout,
                        matrix,
                        (ring_values, ring_keys, ring_scalars),
                        (lax.rem(start, ring), i * BLOCK, length, first_head - aligned, part * TILE),
                        constants,
                        geo.head_dim,
                    )

                if blocks:
                    matrix = lax.fori_loop(0, lax.div(length + BLOCK - 1, BLOCK), fold, matrix)
                else:
                    matrix = rule.history(tile_rule, matrix, length, read, read_scalars)
                stored = matrix.astype(state_dtype)

                @pl.when(length > 0)
                def _():
                    state[place] = stored

                matrix = stored.astype(jnp.float32)
            else:
                value_of, key_of, reader_of = (
                    values_in.at[block, :, part],
                    keys_in.at[block],
                    reader_in.at[block],
                )
                matrix = plgpu.load(state.at[place], layout=layout, optimized=False).astype(jnp.float32)

            for t in range(tokens):
                value = plgpu.load(value_of.at[t], layout=layout.reduce(1), optimized=False)
                value = value.astype(jnp.float32)
                if history:
                    here = tuple(scalar_of(s, t) for s in new_scalars)
                    slot = lax.rem(start + length + t, ring)
                    values_ring[block, slot, part] = value.astype(value_dtype)
                    for k in range(geo.tile_heads):
                        one = first_head + (jnp.minimum(head + k, geo.group_heads - 1) - head)
                        for source, target in zip(new_scalars, scalar_rings, strict=True):
                            target[row, slot, one] = source[stage, t, one - aligned]

                    @pl.when(part == 0)
                    def _(slot=slot, t=t):
                        keys_ring[block, slot] = plgpu.load(
                            key_of.at[t], layout=layout.reduce(0), optimized=False
                        )

                else:
                    here = tuple(a_row(lambda k, s=s, t=t: s[row, t, first_head + k]) for s in scalars_in)
                last = t == tokens - 1
                if blocks and last:
                    readouts = read_block(
                        plgpu, layout, matrix, key_of.at[t], reader_of.at[t], with_key=rule.reads_key
                    )
                else:
                    key = plgpu.load(key_of.at[t], layout=layout.reduce(0), optimized=False)
                    query = plgpu.load(reader_of.at[t], layout=layout.reduce(0), optimized=False)
                    key, query = key.astype(jnp.float32), query.astype(jnp.float32)
                    readouts = tile_rule.times(matrix, query), jnp.sum(key * query)
                    if rule.reads_key:
                        readouts += (tile_rule.times(matrix, key),)
                    if not (last and history):
                        moved = rule.token(tile_rule, matrix, value, key, here, *readouts[2:])
                    if not history:
                        state[place_of(t)] = moved.astype(state_dtype)
                result = rule.read(tile_rule, readouts, value, here)
                out[row, t, group, part] = result.astype(out.dtype)
                matrix = matrix if last else moved
            if history:
                # Every warp has read the stage before the next copies overwrite it.
                plgpu.commit_smem()

                @pl.when(step + stages < steps)
                def _():
                    issue(step + stages, stage)

            return carry

        if history:
            for stage in range(stages):

                @pl.when(stage < steps)
                def _(stage=stage):
                    issue(jnp.int32(stage), jnp.int32(stage))

        lax.fori_loop(0, steps, one_tile, None)

    rings = [operands.values, operands.keys, *operands.scalars] if history else []
    arguments = [
        operands.out,
        operands.state,
        *rings,
        operands.new_values,
        operands.new_keys,
        *operands.new_scalars,
        operands.reader,
    ]
    if planned:
        arguments += [operands.cursor, operands.counts]
    if has_constants:
        arguments.append(operands.constants)
    return scratch, serve, arguments
