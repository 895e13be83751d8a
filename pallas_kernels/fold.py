"""The flush: folds a row's committed tokens into its checkpoint, one 64-row tile at a time in registers, and
makes the outputs of the call's tokens from the tile as stored."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.appends import store_scalars, store_tokens
from pallas_kernels.blocks import BLOCK, block_layout
from pallas_kernels.launch import TILE, Unsupported, mosaic_gpu
from pallas_kernels.pipeline import (
    CTA_SHARED_BYTES,
    SMS,
    Geometry,
    Operands,
    pin_plain,
    row_products,
    row_sums,
    run_kernel,
    shared_bytes,
    tiled_layout,
)
from pallas_kernels.rewrite import FLOAT32, Formats, Writer, decoded
from pallas_kernels.warp_programs import fold_block, key_transforms, write_outputs


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
    heads). block(warp) folds up to 16 of them at once, in the lanes of a warp; with
    reads_key, block(warp, new) also makes the outputs of the call's tokens. factors(ops, constants, scalars)
    gives a lane decay and rate of a token: u = rate (value - decay old state x key) or, without reads_key,
    rate x value. skip: the head constant that weighs a token's own value in its output.
    """

    token: Callable[..., jax.Array]
    read: Callable[..., jax.Array]
    history: Callable[..., jax.Array]
    block: Callable[..., list]
    factors: Callable[..., tuple]
    reads_key: bool
    scalars: int
    head_constants: int
    skip: int | None = None


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


def of_rows(
    plgpu: Any, layout: Any, geo: Geometry, part: jax.Array, head: jax.Array, pick: Callable
) -> jax.Array:
    """pick(0), the scalar of a tile's first head, or [64] values where the tile holds rows of several heads.

    part: the tile's place in its group; head: its first one in the group; pick(k): scalar of the k-th.
    """
    result = pick(jnp.int32(0))
    if geo.tile_heads == 1:
        return result
    rows = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout.reduce(1))
    row_head = lax.div(part * TILE + rows, geo.head_dim)
    result = jnp.full((TILE,), result, jnp.float32)
    for k in range(1, geo.tile_heads):
        here = pick(jnp.minimum(head + k, geo.group_heads - 1) - head)
        result = jnp.where(row_head >= head + k, jnp.full((TILE,), here, jnp.float32), result)
    return result


def claim(plgpu: Any, counts: Any, last: jax.Array, place: int = 2) -> jax.Array:
    """int32 [128] whose first element is counts[place], which then moves on, back to 0 after `last`.

    Each thread holds an element. The value arrives while the thread goes on, until it is used.
    """
    from jax.experimental.mosaic.gpu import FragmentedArray, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    from pallas_kernels.lanes import Lanes, first_element

    layout = plgpu.Layout.WG_STRIDED((128,), vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=layout),
    )
    def take(_, counts, last):
        ops, i32 = Lanes(), ir.IntegerType.get_signless(32)
        first = ops.equal(ops.warp * 32 + ops.lane, 0)
        at = utils.getelementptr(utils.memref_ptr(counts), [arith.constant(i32, place)], i32)
        ticket: Any = llvm.inline_asm(
            i32,
            [at, first_element(last).raw, first.raw],
            "mov.u32 $0, 0; @$3 atom.global.inc.u32 $0, [$1], $2;",
            "=&r,l,r,b",
            has_side_effects=True,
        )
        return FragmentedArray.splat(ticket, (128,), layout.to_mgpu(), is_signed=True)

    return take(counts, last)


def synchronise(plgpu: Any, fused: bool) -> None:
    """Waits for all threads of a warpgroup; orders their reads before copies into the same buffers."""
    if not fused:
        plgpu.commit_smem()
        return

    from jax.experimental.mosaic.gpu import utils

    @plgpu.inline_mgpu()
    def wait(_):
        utils.warpgroup_barrier()

    wait()


def flush_tiles(
    rule: TokenRule,
    geometry: Geometry,
    operands: Operands,
    workers: int,
    *,
    formats: Formats = FLOAT32,
    interpret: Any = None,
) -> None:
    """Folds the rings of the flushing rows into operands.state, a reference, and makes their outputs.

    workers: warpgroups of a CTA, at most, each with its own tiles; a CTA a multiprocessor. All of them in one
    CTA make the compiler keep to the registers that let so many run.
    """
    geometry.check()
    options = {"formats": formats, "claims": interpret is None, "interpret": interpret}
    one = shared_bytes(flush_work(rule, geometry, operands, **options)[0])
    workers = max(1, min(workers, CTA_SHARED_BYTES // one))
    scratch, serve = flush_work(rule, geometry, operands, workers=workers, **options)
    ctas = min(SMS, geometry.batch * geometry.groups * geometry.tiles)

    def body(source: Any, buffers: dict) -> None:
        mine = lax.axis_index("warpgroup") if workers > 1 else 0
        worker = mine * ctas + lax.axis_index("cta")
        serve(source, worker, workers * ctas, buffers, source.counts[1], mine)

    options = {"scratch": scratch, "warpgroups": workers, "interpret": interpret}
    run_kernel(body, operands.arguments(), ctas, "replay_flush", **options)


def flush_work(
    rule: TokenRule,
    geometry: Geometry,
    operands: Operands,
    *,
    workers: int = 1,
    formats: Formats = FLOAT32,
    stages: int = 2,
    claims: bool = False,
    interpret: Any = None,
) -> tuple[dict, Callable[..., None]]:
    """Shared-memory buffers and program of the flush, for a kernel of its own or beside others.

    serve(references by name, worker, of_all, buffers, rows, mine) takes tiles of the plan's last
    `rows` rows; a worker is a warpgroup, `mine` its place among the `workers` of the CTA. formats: of
    checkpoint and copy. claims: workers claim tiles, since some multiprocessors get more memory bandwidth
    than others, else each has every `of_all`-th. stages: tiles of a worker whose tokens are in shared memory
    (1 or 2). A tile of the state is copied there while the one before is in work.
    """
    plgpu = mosaic_gpu()
    geo = geometry
    fused = interpret is None
    ring, tokens, tiles, groups = geo.ring, geo.tokens, geo.tiles, geo.groups
    row_tiles = groups * tiles
    value_dtype, key_dtype = operands.new_values.dtype, operands.new_keys.dtype
    reader_dtype, state_dtype = operands.reader.dtype, operands.state.dtype
    # Exact products need bfloat16 inputs; a warp's 16 rows must share a head.
    sixteen = {jnp.dtype(x.dtype) for x in (operands.new_values, operands.new_keys, operands.reader)}
    blocks = fused and sixteen == {jnp.dtype(jnp.bfloat16)} and not geo.head_dim % BLOCK
    # Projections that the fold needs anyway serve the outputs, unless the stored state is rounded.
    joint = blocks and rule.reads_key and jnp.dtype(state_dtype) == jnp.float32
    # Parts in bfloat16 of a state as stored.
    exact = {"bfloat16": 1, "float16": 2}.get(jnp.dtype(state_dtype).name, 3)
    layout = block_layout(plgpu) if blocks else state_layout(plgpu)
    writer = None if formats == FLOAT32 else Writer(plgpu, layout, geo.d_state, fused)
    if writer is not None and fused and not blocks:
        raise Unsupported(
            "checkpoints below fp32 and copies need bfloat16 inputs and head_dim a multiple of 16"
        )
    width = 8

    def staged(*shape: int, dtype: Any, transforms: tuple = ()) -> Any:
        return plgpu.SMEM((workers * stages, *shape), dtype, transforms=transforms)

    scratch = {
        "tile": plgpu.SMEM((workers, TILE, geo.d_state), state_dtype),
        "values": staged(ring, TILE, dtype=value_dtype),
        "keys": staged(
            ring, geo.d_state, dtype=key_dtype, transforms=key_transforms(plgpu) if blocks else ()
        ),
        "scalars": tuple(staged(ring, width, dtype=jnp.float32) for _ in range(rule.scalars)),
        "new_values": staged(tokens, TILE, dtype=value_dtype),
        # Copies begin at multiples of 128 bytes.
        "new_scalars": tuple(staged(8, width, dtype=jnp.float32) for _ in range(rule.scalars)),
    }
    if blocks:
        scratch["probes"] = staged(2 * tokens, geo.d_state, dtype=key_dtype)
        scratch["outputs"] = plgpu.SMEM((workers, tokens, TILE), jnp.float32)
    else:
        scratch["new_keys"] = staged(tokens, geo.d_state, dtype=key_dtype)
        scratch["reader"] = staged(tokens, geo.d_state, dtype=reader_dtype)
    if claims:
        scratch["ticket"] = plgpu.SMEM((workers, 128), jnp.int32)
    plain = [name for name in scratch if not (blocks and name == "keys")]
    scratch["tile_landed"] = plgpu.Barrier(num_arrivals=1, num_barriers=workers)
    copies = 5 + 2 * rule.scalars
    scratch["tokens_landed"] = plgpu.Barrier(num_arrivals=copies, num_barriers=workers * stages)

    def serve(source: Any, worker: Any, of_all: int, buffers: dict, rows: Any, mine: Any = 0) -> None:
        out, state, scale_ref, words_in = source.out, source.state, source.scale, source.words
        values_ring, keys_ring, scalar_rings = source.values, source.keys, source.scalars
        values_in, keys_in, scalars_in = source.new_values, source.new_keys, source.new_scalars
        reader_in, cursor_in, counts_in = source.reader, source.cursor, source.counts
        smem = types.SimpleNamespace(**buffers)
        if fused:
            pin_plain(plgpu, jax.tree.leaves([buffers[name] for name in plain]))
        total = rows * row_tiles
        tile, tile_landed = smem.tile.at[mine], smem.tile_landed.at[mine]

        def stage_of(step: Any) -> jax.Array:
            return mine * stages + lax.rem(step, stages)

        def keys_at(stage: Any) -> tuple:
            """Buffers of the new keys and readers."""
            if blocks:
                both = smem.probes.at[stage]
                return both.at[pl.ds(0, tokens)], both.at[pl.ds(tokens, tokens)]
            return smem.new_keys.at[stage], smem.reader.at[stage]

        def locate(index: jax.Array) -> tuple:
            """Row, start and length, group, tile in the group, its first head and a copy's first head."""
            row, within = lax.div(index, row_tiles), lax.rem(index, row_tiles)
            # From the end of the list, so that the cursor's address does not depend on the counts.
            at = geo.batch - 1 - row
            row, start, length = cursor_in[at, 0], cursor_in[at, 1], cursor_in[at, 2]
            group, part = lax.div(within, tiles), lax.rem(within, tiles)
            head = group * geo.group_heads + lax.div(part * TILE, geo.head_dim)
            aligned = jnp.minimum(lax.div(head, 4) * 4, max(geo.heads - width, 0))
            return row, start, length, group, part, head, aligned

        def issue_tile(index: jax.Array) -> None:
            row, _, _, group, part, _, _ = locate(index)
            block = row * groups + group
            place = block * tiles + part
            if operands.forgotten is not None and interpret is None:
                # Copies from beyond the end write zeros and read nothing.
                gone = lax.bitwise_and(lax.shift_right_logical(source.forgotten[block], part), 1) == 1
                place = jnp.where(gone, geo.batch * row_tiles, place)
            plgpu.copy_gmem_to_smem(state.at[place], tile, tile_landed)

        def issue_tokens(index: jax.Array, stage: Any) -> None:
            row, _, _, group, part, _, aligned = locate(index)
            block, landed = row * groups + group, smem.tokens_landed.at[stage]
            # A row that flushes has a nearly full ring.
            plgpu.copy_gmem_to_smem(values_ring.at[block, :, part], smem.values.at[stage], landed)
            plgpu.copy_gmem_to_smem(keys_ring.at[block], smem.keys.at[stage], landed)
            plgpu.copy_gmem_to_smem(values_in.at[block, :, part], smem.new_values.at[stage], landed)
            new_keys, reader = keys_at(stage)
            plgpu.copy_gmem_to_smem(keys_in.at[block], new_keys, landed)
            plgpu.copy_gmem_to_smem(reader_in.at[block], reader, landed)
            heads = pl.ds(aligned, width)
            pairs = ((scalar_rings, smem.scalars, ring), (scalars_in, smem.new_scalars, tokens))
            for sources, targets, count in pairs:
                for one, target in zip(sources, targets, strict=True):
                    into = target.at[stage, pl.ds(0, count)]
                    plgpu.copy_gmem_to_smem(one.at[row, :, heads], into, landed)

        def one_tile(carry: tuple) -> tuple:
            step, index, after = carry
            stage = stage_of(step)
            row, start, length, group, part, first_head, aligned = locate(index)
            block = row * groups + group
            head = first_head - group * geo.group_heads
            rows_of = functools.partial(of_rows, plgpu, layout, geo, part, head)
            constants = tuple(
                rows_of(lambda k, c=c: source.constants[c, first_head + k])
                for c in range(rule.head_constants)
            )
            ring_buffers = (
                smem.values.at[stage],
                smem.keys.at[stage],
                tuple(s.at[stage] for s in smem.scalars),
            )
            new_values, new_scalars = smem.new_values.at[stage], tuple(s.at[stage] for s in smem.new_scalars)
            new_keys, reader = keys_at(stage)
            if claims:
                ticket = claim(plgpu, counts_in, total - 1)

            place = block * tiles + part
            scale = None
            if scale_ref is not None:
                scale = plgpu.load(scale_ref.at[place], layout=layout.reduce(1), optimized=False)
            plgpu.barrier_wait(tile_landed)
            matrix = decoded(plgpu.load(tile, layout=layout, optimized=False), scale)
            # Every warp has read the tile, and all of the tile before, before copies overwrite them.
            synchronise(plgpu, fused)

            @pl.when(after < total)
            def _():
                issue_tile(after)
                if stages > 1:
                    issue_tokens(after, stage_of(step + 1))

            plgpu.barrier_wait(smem.tokens_landed.at[stage])
            here = _Tokens(plgpu, layout, rows_of, (new_values, new_keys, new_scalars), first_head - aligned)
            if blocks:
                origin = first_head - aligned, part * TILE
                call = (new_values, smem.probes.at[stage], new_scalars), smem.outputs.at[mine]

                def fold(part_count: int, i: jax.Array, matrix: jax.Array) -> jax.Array:
                    cursors = lax.rem(start, ring), i * BLOCK, length
                    arrays = matrix, ring_buffers, cursors, origin, constants
                    joined = call if joint else None
                    return fold_block(rule, plgpu, layout, *arrays, geo.head_dim, joined, part_count)

                first, count = 0, lax.div(length + BLOCK - 1, BLOCK)
                if exact < 3:
                    first = jnp.minimum(count, 1)
                    matrix = lax.fori_loop(0, first, functools.partial(fold, exact), matrix)
                count = jnp.maximum(count, 1) if joint else count
                matrix = lax.fori_loop(first, count, functools.partial(fold, 3), matrix)
            else:
                committed = _Tokens(plgpu, layout, rows_of, ring_buffers, first_head - aligned)
                tile_rule = Tile(plgpu, layout, fused, constants)
                matrix = rule.history(
                    tile_rule,
                    matrix,
                    length,
                    lambda j: committed(lax.rem(start + j, ring)),
                    lambda j: committed.scalars(lax.rem(start + j, ring)),
                )
            if writer is None:
                stored = matrix.astype(state_dtype)

                @pl.when(length > 0)
                def _():
                    state[place] = stored

                matrix = stored.astype(jnp.float32)
            else:
                random = None
                if words_in is not None:
                    first = lax.rem(place, row_tiles) * (TILE * geo.d_state)
                    first = first + words_in[row, 1].astype(jnp.int32)
                    random = writer.random(words_in[row, 0], first)
                stored, matrix = writer.rewritten(formats, matrix, random)
                kept = (state,) if scale_ref is None else (state, scale_ref)
                write = functools.partial(writer.write, stored, (kept, source.copy), place)
                pl.when(length > 0)(write)

            if blocks and not joint:
                write_outputs(rule, plgpu, layout, matrix, call, origin, constants, geo.head_dim, exact)
            if not blocks:
                for t in range(tokens):
                    value, key, scalars = here(t)
                    query = plgpu.load(reader.at[t], layout=layout.reduce(0), optimized=False)
                    query = query.astype(jnp.float32)
                    readouts = tile_rule.times(matrix, query), jnp.sum(key * query)
                    if rule.reads_key:
                        readouts += (tile_rule.times(matrix, key),)
                    result = rule.read(tile_rule, readouts, value, scalars)
                    out[row, t, group, part] = result.astype(out.dtype)
                    if t < tokens - 1:
                        matrix = rule.token(tile_rule, matrix, value, key, scalars, *readouts[2:])

            slot = lax.rem(start + length, ring)
            if fused:
                store_tokens(plgpu, values_ring.at[block], new_values, slot, ring, tiles * TILE, part * TILE)
                columns = first_head, first_head - aligned, (group + 1) * geo.group_heads - 1
                targets = tuple(ref.at[row] for ref in scalar_rings)
                store_scalars(plgpu, targets, new_scalars, tokens, geo.tile_heads, slot, *columns)
            else:
                for t in range(tokens):
                    values_ring[block, lax.rem(slot + t, ring), part] = new_values[t]
                    for k in range(geo.tile_heads):
                        one = first_head + (jnp.minimum(head + k, geo.group_heads - 1) - head)
                        for new, target in zip(new_scalars, scalar_rings, strict=True):
                            target[row, lax.rem(slot + t, ring), one] = new[t, one - aligned]

            @pl.when(part == 0)
            def _():
                for t in range(tokens):
                    key = plgpu.load(new_keys.at[t], layout=layout.reduce(0), optimized=False)
                    keys_ring[block, lax.rem(slot + t, ring)] = key

            if claims:
                smem.ticket.at[mine][...] = ticket
            synchronise(plgpu, fused)
            if blocks:
                at = (group * tiles + part) * TILE
                store_tokens(
                    plgpu, out.at[row], smem.outputs.at[mine], slot * 0, tokens, row_tiles * TILE, at
                )
            if stages == 1:

                @pl.when(after < total)
                def _():
                    issue_tokens(after, stage_of(0))

            following = 2 * of_all + smem.ticket[mine, 0] if claims else after + of_all
            return step + 1, after, following

        @pl.when(worker < total)
        def _():
            issue_tile(worker)
            issue_tokens(worker, stage_of(0))

        start = jnp.int32(0), worker, worker + of_all
        lax.while_loop(lambda carry: carry[1] < total, one_tile, start)

    return scratch, serve


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Tokens in shared memory, one at a time: buffers of values, keys and scalars; column: of the scalars of
    a tile's first head."""

    plgpu: Any
    layout: Any
    rows_of: Callable[[Callable], jax.Array]
    buffers: tuple
    column: jax.Array

    def scalars(self, at: Any) -> tuple:
        """Scalars of a token, one each or [64]."""
        return tuple(self.rows_of(lambda k, s=s: s[at, self.column + k]) for s in self.buffers[2])

    def __call__(self, at: Any) -> tuple:
        """Value [64] and key [K], float32, and scalars of a token."""
        value = self.plgpu.load(self.buffers[0].at[at], layout=self.layout.reduce(1), optimized=False)
        key = self.plgpu.load(self.buffers[1].at[at], layout=self.layout.reduce(0), optimized=False)
        return value.astype(jnp.float32), key.astype(jnp.float32), self.scalars(at)
